"""Posterior draws per second: of a fit, which are independent, and effective ones of NUTS."""

import statistics
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from rvrs import fitting
from rvrs.bench import logistic, timing
from rvrs.bench.nuts import Nuts, min_ess
from rvrs.bench.report import Row, Suite
from rvrs.bench.works import Work
from rvrs.result import Fit

NAME = "sampling"

WANTED = 10_000
"""Effective draws that the time from the model to the draws is reported for."""


class Effort(NamedTuple):
    """How much is drawn."""

    num_steps: int = fitting.NUM_STEPS
    num_draws: int = 100_000
    """Draws of a fit in a turn."""
    num_warmup: int = 500
    nuts: tuple[tuple[int, int], ...] = ((4, 500), (64, 100))
    """Chains of NUTS, and draws per chain in a turn."""
    repeats: int = 5


_QUICK = Effort(num_steps=1_000, num_draws=10_000, num_warmup=100, nuts=((4, 100),), repeats=2)

_NOTES = (
    "Draws per second once a fit is trained and NUTS is warmed up, compilation apart; all "
    "contestants of a work take turns, and figures are medians. Draws of a fit (rvrs.fit and "
    "fit.sample as they are by default) are independent, so that all of them count; 'weighted' is "
    "the share of them that counts when they are weighted against the posterior. Draws of NUTS "
    "(NumPyro, float32, chains side by side in one program) count as the effective sample size of "
    "the coordinate that mixes worst. '/ best NUTS' is the ratio of effective draws per second to "
    "those of the better NUTS, 'weighted / best NUTS' the same of what is left after weighting. "
    "'ready s' is the time of the fit, its evaluation included, or of the warm-up; the last column "
    f"is the time until there are {WANTED:,} effective draws, 'ready s' included."
)


def measure(*, quick: bool, progress: Callable[[str], None]) -> Suite:
    """Run the suite; ``quick`` is a short one on made-up data, to see that it works."""
    effort = _QUICK if quick else Effort()
    rows, missing = logistic.measure_each(
        lambda work: measure_work(work, effort, progress), quick=quick
    )
    return Suite(NAME, "Posterior draws per second", _NOTES + missing, rows)


def measure_work(work: Work, effort: Effort, progress: Callable[[str], None]) -> list[Row]:
    """The rows of one work: the fit, and NUTS with few and with many chains."""
    progress(f"{work.name}: fit")
    fit = _fit(work, effort)
    fit = _fit(work, effort)  # once more, now that all is compiled
    samplers, contestants = {}, {}
    contestants["RVRS"] = lambda key: fit.sample(key, effort.num_draws)
    for num_chains, num_samples in effort.nuts:
        progress(f"{work.name}: NUTS, {num_chains} chains")
        name = f"NUTS, {num_chains} chains"
        samplers[name] = _Recorder(
            Nuts(
                work,
                num_warmup=effort.num_warmup,
                num_samples=num_samples,
                num_chains=num_chains,
            )
        )
        contestants[name] = samplers[name]
    progress(f"{work.name}: turns")
    times = timing.interleaved(contestants, repeats=effort.repeats)
    found = {"RVRS": _Found(effort.num_draws, effort.num_draws, fit.seconds)}
    for name, sampler in samplers.items():
        found[name] = _Found(sampler.num_draws, sampler.median_ess(), sampler.nuts.warmup_seconds)
    return _rows(work.name, times, found, fit.ess / fit.num_draws)


class _Found(NamedTuple):
    """What a contestant has drawn in a turn."""

    num_draws: int
    effective: float
    ready_seconds: float
    """Before the first draw."""


class _Recorder:
    """NUTS as a contestant, which keeps its draws for the effective sample size."""

    def __init__(self, nuts: Nuts) -> None:
        self.nuts = nuts
        self._draws: list[Any] = []

    def __call__(self, rng_key: jax.Array) -> jax.Array:
        self._draws.append(self.nuts.draw(rng_key))
        return self._draws[-1]

    @property
    def num_draws(self) -> int:
        """Draws of a turn, over all chains."""
        return int(np.prod(self._draws[0].shape[:2]))

    def median_ess(self) -> float:
        """Effective sample size of a turn."""
        return statistics.median(min_ess(draws) for draws in self._draws)


def _fit(work: Work, effort: Effort) -> Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fitting.fit(
            jax.random.key(0),
            work.model,
            *work.args,
            num_steps=effort.num_steps,
            progress=False,
        )


def _rows(
    work: str, times: dict[str, list[float]], found: dict[str, _Found], weighted: float
) -> list[Row]:
    """``weighted`` is the share of a fit's draws that counts after weighting."""
    seconds = {name: statistics.median(times[name]) for name in found}
    rates = {name: each.effective / seconds[name] for name, each in found.items()}
    best = max((name for name in found if name != "RVRS"), key=lambda name: rates[name])
    rows = []
    for name, each in found.items():
        # Effective draws per second relative to the best NUTS, from times of the same turns.
        ratio = timing.median_ratio(times[best], times[name]).value
        ratio *= each.effective / found[best].effective
        ours = name == "RVRS"
        figures = {
            "draws / s": each.num_draws / seconds[name],
            "effective / s": rates[name],
            "weighted": weighted if ours else None,
            "/ best NUTS": ratio,
            "weighted / best NUTS": weighted * ratio if ours else None,
            "ready s": each.ready_seconds,
            f"s to {WANTED:,} effective": each.ready_seconds + WANTED / rates[name],
        }
        rows.append(Row(work, name, figures))
    return rows
