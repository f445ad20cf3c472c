"""Runs the units of an experiment that are not stored yet, and stores each as soon as it is there.

Whatever ends a run, the units that were computed stay stored, and the same call goes on.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

from rvrs import datasets as data
from rvrs.core.arguments import check_count
from rvrs.experiments import catalogue, workers
from rvrs.experiments.experiment import Experiment, Preset, Result, Unit
from rvrs.experiments.store import Origin, Store, differences, origin
from rvrs.experiments.workers import Computed, Task, Workers

_SECONDS_BETWEEN_REPORTS = 0.1


class Observer:
    """Is told how a run proceeds; this one does not care."""

    def planned(self, plan: "Plan") -> None:
        """Before the first unit."""

    def started(self, unit: Unit) -> None:
        """A worker has been given a unit."""

    def advanced(self, unit: Unit, share: float, words: str) -> None:
        """A unit under way has come to a share from 0 to 1."""

    def ended(self, result: Result) -> None:
        """A unit is computed, be it a failure, and stored."""


class Summary(NamedTuple):
    """What a run has done."""

    experiment: str
    computed: int
    stored: int
    """How many of the units that were asked for were there already."""
    failures: list[Result]
    """Those of the units that were asked for or computed, also if they were stored before."""


@dataclass(frozen=True)
class Plan:
    """Units to be computed, after all checks."""

    experiment: Experiment
    address: str
    origin: Origin
    settings: dict[str, Any]
    store: Store
    wanted: tuple[Unit, ...]
    """All that were asked for, stored or not."""
    first: tuple[Unit, ...]
    """References that units of ``missing`` need; they need not have been asked for."""
    missing: tuple[Unit, ...]
    """The others that are to be computed."""


def run(
    experiment: str,
    preset: str = "quick",
    *,
    methods: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    num_seeds: int | None = None,
    out: str | PathLike[str],
    jobs: int = 1,
    scheduler: str | None = None,
    retry_failed: bool = False,
    progress: Observer | None = None,
) -> Summary:
    """Compute what is missing of an experiment: :func:`plan`, then :func:`execute`.

    Parameters
    ----------
    experiment
        A name of :data:`rvrs.experiments.catalogue.NAMES`.
    preset
        The size: ``quick``, ``cpu`` or ``paper``.
    methods, datasets, num_seeds
        A part of the experiment, or more than the preset has; by default what it has.
    out
        Folder of the :class:`~rvrs.experiments.store.Store`.
    jobs
        Processes to compute in; 1 is this one.
    scheduler
        Address of a Dask scheduler, whose workers compute instead.
    retry_failed
        Whether units that are stored as failed are computed again.
    progress
        Is told how the run proceeds.
    """
    check_count("jobs", jobs)
    planned = plan(
        experiment,
        preset,
        methods=methods,
        datasets=datasets,
        num_seeds=num_seeds,
        out=out,
        retry_failed=retry_failed,
    )
    return execute(planned, jobs=jobs, scheduler=scheduler, progress=progress)


def plan(
    experiment: str,
    preset: str = "quick",
    *,
    methods: Sequence[str] | None = None,
    datasets: Sequence[str] | None = None,
    num_seeds: int | None = None,
    out: str | PathLike[str],
    retry_failed: bool = False,
) -> Plan:
    """Check everything that can be checked before the long work, and find what is to be done."""
    address = catalogue.address(experiment)
    found = catalogue.load(address)
    if preset not in found.presets:
        raise ValueError(_unknown("preset", preset, experiment, list(found.presets)))
    size: Preset = found.presets[preset]
    for kind, names, known in (
        ("method", methods, found.methods),
        ("data set", datasets, found.datasets),
    ):
        for name in names or ():
            if name not in known:
                raise ValueError(_unknown(kind, name, experiment, known))
    if num_seeds is not None:
        check_count("num_seeds", num_seeds)
    store = Store(out)
    store.check(found, preset, size.settings)
    wanted = tuple(
        Unit(experiment, dataset, method, seed)
        for dataset in dict.fromkeys(size.datasets if datasets is None else datasets)
        for method in dict.fromkeys(size.methods if methods is None else methods)
        for seed in range(size.num_seeds if num_seeds is None else num_seeds)
    )
    missing = [unit for unit in wanted if _is_missing(store, unit, retry_failed)]
    first = _needed_references(found, store, missing, retry_failed)
    for name in dict.fromkeys(unit.dataset for unit in missing):
        if name in data.names():
            # A file that is missing or malformed is told now.
            data.load(name)
        elif name in data.image_names():
            data.load_images(name)
    return Plan(
        experiment=found,
        address=address,
        origin=origin(found, preset, size.settings),
        settings=dict(size.settings),
        store=store,
        wanted=wanted,
        first=first,
        missing=tuple(unit for unit in missing if unit not in first),
    )


def _unknown(kind: str, name: str, experiment: str, known: Sequence[str]) -> str:
    return f"{experiment} has no {kind} {name!r}; choose from {', '.join(known)}."


def _is_missing(store: Store, unit: Unit, retry_failed: bool) -> bool:
    if not store.has(unit):
        return True
    return retry_failed and store.read(unit).result.failure is not None


def _needed_references(
    experiment: Experiment, store: Store, missing: Sequence[Unit], retry_failed: bool
) -> tuple[Unit, ...]:
    """References without arrays that missing units are to be given; one that failed has none."""
    if experiment.reference is None:
        return ()
    needed = []
    for dataset in dict.fromkeys(u.dataset for u in missing if u.method != experiment.reference):
        unit = Unit(experiment.name, dataset, experiment.reference, 0)
        if _is_missing(store, unit, retry_failed) or _has_lost_arrays(store, unit):
            needed.append(unit)
    return tuple(needed)


def _has_lost_arrays(store: Store, reference: Unit) -> bool:
    return store.read(reference).result.failure is None and store.arrays(reference) is None


def execute(
    plan: Plan,
    *,
    jobs: int = 1,
    scheduler: str | None = None,
    progress: Observer | None = None,
) -> Summary:
    """Compute the units of a plan.

    Meanwhile no other process can store results of the same experiment in the same folder: it gets
    a :class:`rvrs.files.LockedError`.
    """
    observer = Observer() if progress is None else progress
    with plan.store.held(plan.experiment.name):
        plan = _as_of_now(plan)
        observer.planned(plan)
        if plan.first or plan.missing:
            try:
                with _workers(jobs, scheduler, observer) as crew:
                    _Run(plan, crew, observer).go()
            except (BrokenExecutor, CancelledError) as error:
                raise RuntimeError(_died(plan)) from error
    computed = {*plan.first, *plan.missing}
    concerned = dict.fromkeys([*plan.wanted, *plan.first])
    results = [plan.store.read(unit).result for unit in concerned]
    return Summary(
        plan.experiment.name,
        len(computed),
        len(set(plan.wanted) - computed),
        [result for result in results if result.failure is not None],
    )


def _as_of_now(plan: Plan) -> Plan:
    """The plan without what another process has stored since it was made."""
    plan.store.check(plan.experiment, plan.origin.preset, plan.settings)

    def is_there(unit: Unit) -> bool:
        return plan.store.has(unit) and plan.store.read(unit).result.failure is None

    missing = tuple(unit for unit in plan.missing if not is_there(unit))
    first = tuple(
        unit for unit in plan.first if not is_there(unit) or plan.store.arrays(unit) is None
    )
    return replace(plan, first=first, missing=missing)


def _workers(
    jobs: int, scheduler: str | None, observer: Observer
) -> AbstractContextManager[Workers]:
    if scheduler is not None:
        return workers.dask(scheduler)
    if jobs > 1:
        return workers.processes(jobs)
    return workers.here(lambda report: observer.advanced(*report))


def _died(plan: Plan) -> str:
    stored = sum(map(plan.store.has, plan.wanted))
    return (
        f"a worker process died, perhaps of memory; {stored} of {len(plan.wanted)} units of "
        f"{plan.experiment.name} are stored, the same command goes on."
    )


class _Run:
    """A plan under way."""

    def __init__(self, plan: Plan, crew: Workers, observer: Observer) -> None:
        self.plan, self.crew, self.observer = plan, crew, observer
        referenced = {unit.dataset: unit for unit in plan.first}
        self.waiting: dict[str, list[Unit]] = {dataset: [] for dataset in referenced}
        self.ready = deque(plan.first)
        for unit in plan.missing:
            if unit.dataset in referenced and unit.method != plan.experiment.reference:
                self.waiting[unit.dataset].append(unit)
            else:
                self.ready.append(unit)
        self.under_way: dict[Future[Computed], Unit] = {}

    def go(self) -> None:
        try:
            while self.ready or self.under_way:
                self._submit()
                done, _ = wait(
                    self.under_way, _SECONDS_BETWEEN_REPORTS, return_when=FIRST_COMPLETED
                )
                for report in self.crew.received():
                    self.observer.advanced(*report)
                for future in done:
                    self._keep(future)
        except BaseException:
            # One unit's end must not cost those that ended well at the same time.
            for future in list(self.under_way):
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._keep(future)
            raise

    def _submit(self) -> None:
        """No more at a time than can be computed, so that little is lost or to be cancelled."""
        while self.ready and len(self.under_way) < self.crew.number:
            unit = self.ready.popleft()
            self.observer.started(unit)
            task = Task(
                self.plan.address,
                unit,
                self.plan.origin.preset,
                self.plan.settings,
                self._reference_arrays(unit),
                str(self.plan.store.checkpoint(unit)) if self.plan.experiment.checkpoints else None,
            )
            self.under_way[self.crew.executor.submit(self.crew.compute, task)] = unit

    def _reference_arrays(self, unit: Unit) -> dict[str, Any]:
        reference = self.plan.experiment.reference
        if reference is None or unit.method == reference:
            return {}
        return self.plan.store.arrays(unit._replace(method=reference, seed=0)) or {}

    def _keep(self, future: Future[Computed]) -> None:
        result, arrays, made_with, machine = future.result()
        other = differences(made_with, self.plan.origin)
        if other:
            raise RuntimeError(
                f"a worker has something else than this process (there -> here): "
                f"{'; '.join(other)}; install the same there."
            )
        stored = self.plan.store.write(result, made_with, arrays=arrays, machine=machine)
        unit = self.under_way.pop(future)
        if stored.failure is None:
            self.plan.store.checkpoint(unit).unlink(missing_ok=True)
        self.observer.ended(stored)
        if unit in self.plan.first:
            self.ready.extend(self.waiting.pop(unit.dataset))
