"""How long it takes to the first step, and how many programs a run compiles."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from rvrs import fitting, vi
from rvrs.baselines import local
from rvrs.bench import bare, hierarchical, works
from rvrs.bench.report import Figure, Row, Suite
from rvrs.bench.timing import Contestant, interleaved, median_ratio
from rvrs.experiments import hierarchical_model as experiment
from rvrs.guides import AutoSemiRVRS

NAME = "compile"
TITLE = "From nothing to the first step, and programs that are compiled"
NOTES = (
    "To the first step: everything is traced and compiled anew, and rvrs.fit finds its start and "
    "warms up; over that of the row below it. Programs: compiled in a first run of several chunks, "
    "with a shorter last one, and in a second one of the same, which should be none."
)

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the programs that JAX compiles inside."""
    count = 0

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        nonlocal count
        count += event == _EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Candidate(NamedTuple):
    """Something that trains."""

    work: str
    name: str
    first_step: Contestant
    """Takes one step, after it has made everything that it needs anew."""
    run: Callable[[], Contestant] | None = None
    """Makes what takes several chunks of steps, of which the last is shorter."""


def measure(*, quick: bool, progress: Callable[[str], None]) -> Suite:
    """Time first steps, by turns, and count what is compiled."""
    size = (20, 3) if quick else (100, 17)
    rows = []
    candidates = [_vi, _fit] if quick else [_vi, _fit, _semi]
    for of_work in (make(*size) for make in candidates):
        progress(of_work[0].work)
        times = interleaved(
            {one.name: one.first_step for one in of_work}, repeats=1 if quick else 3
        )
        for number, candidate in enumerate(of_work):
            own = times[candidate.name]
            figures: dict[str, Figure] = {}
            if number == 0:
                ratio = median_ratio(own, times[of_work[1].name])
                figures |= {"to the first step": ratio.value}
                figures |= {"lower quartile": ratio.low, "upper quartile": ratio.high}
            figures["seconds to the first step"] = float(np.median(own))
            if candidate.run is not None:
                first, second = programs_compiled(candidate.run())
                figures |= {"programs, first run": first, "programs, second run": second}
            rows.append(Row(candidate.work, candidate.name, figures))
    return Suite(NAME, TITLE, NOTES, rows)


def programs_compiled(run: Contestant) -> tuple[int, int]:
    """What a first and a second run compile."""
    found = []
    for number in range(2):
        with counted() as count:
            jax.block_until_ready(run(jax.random.key(number)))
            found.append(count())
    return found[0], found[1]


def _vi(num_data: int, dimension: int) -> list[Candidate]:
    def new() -> tuple[works.Work, Any, Any]:
        work = works.made_up_logistic(num_data, dimension)
        algorithm = vi.as_top_level_api(work.log_density, optax.adam(1e-3))
        return work, algorithm, algorithm.init(jnp.zeros(dimension))

    def first_step(key: jax.Array) -> Any:
        _, algorithm, state = new()
        return vi.run(key, algorithm, state, 1, chunk_size=10)

    def bare_step(key: jax.Array) -> Any:
        work = works.made_up_logistic(num_data, dimension)
        return bare.bare_steps(bare.task(work, 0.1), optax.adam(1e-3), 1)(key)

    def run() -> Contestant:
        _, algorithm, state = new()
        return lambda key: vi.run(key, algorithm, state, 25, chunk_size=10)

    name = f"logistic N={num_data} D={dimension}, rvrs.vi"
    return [Candidate(name, "rvrs.vi", first_step, run), Candidate(name, "bare work", bare_step)]


class _FirstStepError(Exception):
    """Ends a fit at its first step."""


def _stop(*_: Any) -> None:
    raise _FirstStepError


def _fit(num_data: int, dimension: int) -> list[Candidate]:
    work = works.made_up_logistic(num_data, dimension)

    def new_model() -> Callable[..., Any]:
        return lambda *args: work.model(*args)

    def first_step(key: jax.Array) -> Any:
        try:
            fitting.fit(key, new_model(), *work.args, num_steps=1, progress=False, callback=_stop)
        except _FirstStepError:
            return ()

    def peer_step(key: jax.Array) -> Any:
        return _svi_step(key, new_model(), AutoMultivariateNormal, *work.args)

    def run() -> Contestant:
        model = new_model()
        options: dict[str, Any] = {"num_steps": 1100, "progress": False}
        return lambda key: fitting.fit(key, model, *work.args, **options).params

    peer = "NumPyro's SVI, AutoMultivariateNormal"
    return [
        Candidate(f"{work.name}, rvrs.fit", "rvrs.fit", first_step, run),
        Candidate(f"{work.name}, rvrs.fit", peer, peer_step),
    ]


def _svi_step(key: jax.Array, model: Any, guide: Any, *args: Any) -> Any:
    svi = SVI(model, guide(model), optax.adam(1e-3), Trace_ELBO())
    return jax.jit(svi.update)(svi.init(key, *args), *args)


def _semi(num_data: int, dimension: int) -> list[Candidate]:
    dataset = hierarchical.made_up_data(num_data, dimension)
    size = num_data // 10

    def first_step(key: jax.Array) -> Any:
        models = experiment.build(dataset, size)
        try:
            _semi_fit(key, models, _guide(models), 2, _stop)
        except _FirstStepError:
            return ()

    def peer_step(key: jax.Array) -> Any:
        models = experiment.build(dataset, size)
        return _svi_step(key, models.model, AutoNormal)

    def run() -> Contestant:
        models = experiment.build(dataset, size)
        guide = _guide(models)
        return lambda key: _semi_fit(key, models, guide, 1100, None).params

    work = f"hierarchical N={len(dataset.responses)} B={size}, rvrs.fit"
    return [
        Candidate(work, "rvrs.fit, AutoSemiRVRS", first_step, run),
        Candidate(work, "NumPyro's SVI, AutoNormal", peer_step),
    ]


def _guide(models: experiment.Models) -> AutoSemiRVRS:
    global_guide = local.normals(models.global_model)
    return AutoSemiRVRS(models.model, models.local_model, global_guide, target_acceptance=0.5)


def _semi_fit(key: Any, models: Any, guide: Any, num_steps: int, callback: Any) -> Any:
    return fitting.fit(
        key,
        models.model,
        guide=guide,
        num_steps=num_steps,
        progress=False,
        callback=callback,
    )
