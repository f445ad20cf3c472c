"""Where units are computed: in this process, in several, or by a Dask cluster.

All three are a :class:`concurrent.futures.Executor` that is given a :class:`Task` of plain data and
a function that can be imported, so that any other executor (of an MPI pool, say) can take them too.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rvrs import storage
from rvrs.experiments import catalogue, store
from rvrs.experiments.experiment import DivergedError, Outcome, Result, Unit

Send = Callable[[tuple[Unit, float, str]], None]
"""Takes how far a unit is: the unit, its share from 0 to 1, and a few words."""


class Task(NamedTuple):
    """All that a worker needs to know."""

    address: str
    """``module:attribute`` of the experiment."""
    unit: Unit
    preset: str
    settings: dict[str, Any]
    arrays: dict[str, np.ndarray]
    """Those of the reference."""
    checkpoint: str | None = None
    """A file for what the unit has so far, if its experiment stores that."""


class Computed(NamedTuple):
    """What a worker has to say of a unit."""

    result: Result
    arrays: dict[str, np.ndarray]
    origin: store.Origin
    """A worker on another machine may have other versions than the one who asks."""
    machine: dict[str, Any]


@dataclass(frozen=True)
class Workers:
    """Who computes units."""

    executor: Executor
    number: int
    compute: Callable[[Task], Computed]
    """What the executor is to be given."""
    received: Callable[[], Iterator[tuple[Unit, float, str]]]
    """What has been sent since it was last called."""


def compute(task: Task, send: Send = lambda _: None) -> Computed:
    """Compute a unit; what goes wrong in it is its result.

    What goes wrong with files is not: errors of the system and unusable checkpoints are raised.
    """
    experiment = catalogue.load(task.address)
    unit = Unit(*task.unit)

    def report(share: float, words: str) -> None:
        send((unit, float(share), words[:200]))

    options: dict[str, Any] = {}
    if task.checkpoint is not None:
        options["checkpoint"] = Path(task.checkpoint)
        options["checkpoint"].parent.mkdir(parents=True, exist_ok=True)
    outcome, failure = Outcome({}), None
    began = time.perf_counter()
    with warnings.catch_warnings():
        # A unit's figures say what a fit warns of; a terminal has no room for that of all units.
        warnings.simplefilter("ignore", UserWarning)
        try:
            outcome = experiment.run(unit, task.settings, task.arrays, report, **options)
        except OSError:
            # Of the machine, as a full disk: the unit has not failed, it can be computed elsewhere
            # or later.
            raise
        except storage.CheckpointError as error:
            raise storage.CheckpointError(
                f"{' '.join(str(error).split())} Delete the checkpoint {task.checkpoint} to "
                "start its unit again."
            ) from None
        except Exception as error:
            failure = _reason(error)
    seconds = time.perf_counter() - began
    return Computed(
        Result(unit, outcome.figures, failure, seconds),
        {name: np.asarray(array) for name, array in outcome.arrays.items()},
        store.origin(experiment, task.preset, task.settings),
        store.machine(),
    )


def _reason(error: Exception) -> str:
    if isinstance(error, DivergedError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _Serial(Executor):
    """Computes at once, in this process; an interruption passes through."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def here(send: Send) -> Iterator[Workers]:
    """The process itself; reports are sent while a unit is computed."""
    yield Workers(_Serial(), 1, partial(compute, send=send), lambda: iter(()))


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def processes(number: int) -> Iterator[Workers]:
    """Processes on this machine, which share its cores."""
    # Not forked: JAX has threads, which do not survive that.
    context = multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    others = set(multiprocessing.active_children())

    def received() -> Iterator[tuple[Unit, float, str]]:
        while not reports.empty():
            yield reports.get()

    with (
        tempfile.TemporaryDirectory(prefix="rvrs-", ignore_cleanup_errors=True) as cache,
        _environment(_variables(number, cache)),
    ):
        pool = ProcessPoolExecutor(number, context, _enter_pool, (reports,))
        try:
            yield Workers(pool, number, _compute_in_pool, received)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            # What is under way may take hours, and nobody would take its result.
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
                child.join()
            raise
        finally:
            pool.shutdown()
            reports.close()


def _variables(number: int, cache: str) -> dict[str, str]:
    threads = str(max(1, cores() // number))
    # XLA takes its threads from NPROC, NumPy's linear algebra from the others.
    variables = dict.fromkeys(["NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"], threads)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # Units that differ in their seed have the same programs. The folder ends with the pool: JAX
        # does not write its files at one stroke, and would warn of a broken one ever after.
        variables["JAX_COMPILATION_CACHE_DIR"] = cache
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return variables


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Of a process of the pool: where its reports go.
_reports: Any = None


def _enter_pool(reports: Any) -> None:
    global _reports
    _reports = reports
    # Ctrl-C reaches all processes of a terminal; the one that started them decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool does not notice that who started it was killed: its processes would stay for good.

    Meanwhile they would write checkpoints into a folder that somebody else may hold by now.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _compute_in_pool(task: Task) -> Computed:
    return compute(task, _reports.put)


@contextmanager
def dask(address: str) -> Iterator[Workers]:
    """The workers of a Dask cluster; how far a unit is does not get through."""
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise ImportError(
            "a scheduler needs Dask, which is not installed; run: pip install 'rvrs[dask]'"
        ) from None
    try:
        client = Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        # Not the threads: units that share a process would share its cores and its caches.
        threads: Any = client.nthreads()
        number = len(threads)
        if number == 0:
            raise RuntimeError(f"the Dask scheduler at {address} has no workers yet; start some.")
        executor = client.get_executor()
        try:
            yield Workers(executor, number, compute, lambda: iter(()))
        except KilledWorker as error:
            raise BrokenExecutor(str(error)) from error
        finally:
            executor.shutdown(wait=False)
