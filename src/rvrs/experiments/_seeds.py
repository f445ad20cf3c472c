"""Figures over the seeds of an experiment, for its plots, tables and claims."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rvrs.experiments.experiment import Result


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    error: float | None
    """Its standard error; None where a single seed does not tell."""
    num_seeds: int

    def text(self, digits: int = 3) -> str:
        """As tables show it."""
        if self.error is None:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.error:.{digits}f}"


def succeeded(results: Iterable[Result], dataset: str, method: str) -> list[Result]:
    """Those of a data set and method that did not fail, by seed."""
    found = [
        result
        for result in results
        if result.failure is None and result.unit[1:3] == (dataset, method)
    ]
    return sorted(found, key=lambda result: result.unit.seed)


def datasets(results: Iterable[Result]) -> list[str]:
    """The data sets of which there is a result that did not fail."""
    return sorted({result.unit.dataset for result in results if result.failure is None})


def estimate(results: Sequence[Result], name: str, error_name: str | None = None) -> Estimate:
    """The mean of a figure over seeds.

    ``error_name`` is the figure that holds the Monte Carlo error, which counts where there is only
    one seed.
    """
    found = mean([result.figures[name] for result in results])
    if found.error is None and error_name is not None:
        return found._replace(error=results[0].figures[error_name])
    return found


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(float(np.mean(values)), error, len(values))


def bars(groups: Iterable[Sequence[Result]]) -> str:
    """What the bars of a figure are, for its title."""
    most = max(len(group) for group in groups)
    return f"bars: standard errors over {most} seeds" if most > 1 else "one seed"


def failures(results: Iterable[Result]) -> str:
    """Which units failed and why, as Markdown; empty if none did."""
    lines = [
        f"- {result.unit.dataset}, {result.unit.method}, seed {result.unit.seed}: {result.failure}"
        for result in results
        if result.failure is not None
    ]
    return "\n".join(["", "Left out, because they failed:", "", *lines, ""]) if lines else ""


def significant(value: float, digits: int = 5) -> float:
    """A number rounded to so many significant digits."""
    return float(f"{value:.{digits}g}")
