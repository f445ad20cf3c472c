"""``rvrs bench``: product and peers, turn by turn in one process, on the same work.

Ratios are what is reported: times of their own mean little on a shared machine.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING

import jax

from rvrs import storage

if TYPE_CHECKING:
    from rich.console import Console

_MODULES = {
    "step": "step",
    "quality": "quality",
    "sampling": "sampling",
    "growth": "growth",
    "memory": "memory",
    "compile": "compilation",
}
SUITES = tuple(_MODULES)
"""Names of the suites, in the order in which they run."""


def check(names: Sequence[str], out: str | PathLike[str] | None) -> None:
    """Refuse, before any work, what :func:`run` could not do."""
    for name in names:
        if name not in SUITES:
            raise ValueError(f"there is no suite {name!r}; choose from {', '.join(SUITES)}.")
    if out is not None:
        storage.check_writable(out)


@contextmanager
def _conditions(quick: bool) -> Iterator[None]:
    """Compile for speed, or for little time where nothing is measured; and tame LAPACK.

    Its threads wait for each other by spinning: on a busy machine the Cholesky factor of a small
    matrix takes a hundred times as long as with one thread, whoever asks for it.
    """
    from threadpoolctl import threadpool_limits

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", before or quick)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def run(
    names: Sequence[str], quick: bool, out: str | PathLike[str] | None, console: "Console"
) -> None:
    """Run suites (all, if none is named), print their tables and write them to ``out``.

    Parameters
    ----------
    quick
        Whether to go through everything at tiny sizes: to see that it runs, not to measure.
    out
        A JSON file, which is complete after every suite.
    """
    from rvrs.bench import report

    check(names, out)
    suites = []
    for name in [suite for suite in SUITES if suite in names or not names]:
        # One at a time, since some need packages that others do not.
        module = importlib.import_module(f"rvrs.bench.{_MODULES[name]}")
        with _conditions(quick), console.status(f"{name}: begins") as status:
            found = module.measure(
                quick=quick, progress=lambda text, name=name: status.update(f"{name}: {text}")
            )
        report.show(console, found)
        suites.append(found)
        if out is not None:
            report.write(out, suites)
