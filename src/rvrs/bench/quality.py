"""How long it takes to get close to the posterior: seconds until most of a gap is closed.

The gap is that between the log evidence and the ELBO of the best mean-field normal: what an
ordinary fit leaves open. Every method is judged by its own bound on the log evidence.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from rvrs import fitting
from rvrs.bench import logistic, peers, snapshots
from rvrs.bench.peers import Estimate
from rvrs.bench.report import Figure, Row, Suite
from rvrs.bench.snapshots import Curve, Snapshot
from rvrs.bench.works import Work
from rvrs.result import Fit

NAME = "quality"

LEVELS = (0.80, 0.95, 0.98)
"""Shares of the gap."""

DEFAULT = ("mvn", 0.1)
"""Proposal and target acceptance that rvrs.fit chooses by itself at these works."""


class Effort(NamedTuple):
    """How much is tried."""

    settings: tuple[tuple[str, float], ...] = tuple(
        (proposal, acceptance)
        for proposal in ("mvn", "diagonal")
        for acceptance in (0.3, 0.1, 0.05)
    )
    """Proposals and target acceptances of rvrs.fit."""
    num_steps: int = fitting.NUM_STEPS
    """Training steps of rvrs.fit."""
    reference_draws: int = 100_000
    """Draws that the gap is estimated from."""
    peers: tuple[str, ...] = (
        *("AutoDiagonalNormal", "AutoMultivariateNormal", "AutoBNAFNormal"),
        *("AutoDAIS-24", "IWAE-24", "meanfield_vi", "fullrank_vi"),
    )
    peer_rates: tuple[float, ...] = (1e-2, 1e-3)
    peer_seconds: float = 5.0
    """Of training, for every rate and schedule."""
    peer_steps: int = 60_000


_QUICK = Effort(
    settings=(DEFAULT,),
    num_steps=1_000,
    reference_draws=20_000,
    peers=("AutoMultivariateNormal", "fullrank_vi"),
    peer_rates=(1e-2,),
    peer_seconds=0.5,
)
# The schedules of a peer: as many steps as it has time for, at a constant rate or with a decay, and
# a decay within a part of them, which is done sooner.
_SHORT_SHARE = 1 / 6

# A snapshot is judged to this share of the gap (one standard error), or until it is clear on which
# side of all levels it is, or that often.
_TOLERANCE = 0.004
_CLEAR_ERRORS = 4.0
_MOST_ESTIMATES = 100

_NOTES = (
    "Seconds of pure training (compilation, initialisation of peers and evaluation apart) until "
    "that share of the gap between the mean-field ELBO and the log evidence is closed; none if "
    "never. A method is judged by its own bound (AutoDAIS: its annealed ELBO, IWAE-K: its K-sample "
    "bound) at snapshots along the way. RVRS is the whole of rvrs.fit: the search of a start by "
    "mode and curvature, the warm-up, the calibration of T and {num_steps:,} training steps; a "
    "snapshot before training counts as RVRS with the proposal of that moment. The default is what "
    "rvrs.fit chooses by itself ({default}). The best of RVRS and of the peers have the least "
    "seconds at each level, over all settings; the last row is the ratio of the peers' seconds to "
    "those of the default. 'nats' is the bound at the end, with the standard errors of the two "
    "ends of the gap. Peers start where NumPyro and BlackJAX put them, "
    "without our search. Adam has the learning rates {rates}, each of them constant, decaying "
    "along a cosine within all of the steps, and within a sixth of them ({steps:,} steps, or as "
    "many as take {seconds:g} s); the best of these counts at each level. NumPyro has one draw per "
    "step, IWAE-K has K, BlackJAX 5. Mean-field methods close 0 % by definition. There is one run "
    "of each, not in turns: compare orders of magnitude."
)


def measure(*, quick: bool, progress: Callable[[str], None]) -> Suite:
    """Run the suite; ``quick`` is a short one on made-up data, to see that it works."""
    peers.blackjax()
    effort = _QUICK if quick else Effort()
    rows, missing = logistic.measure_each(
        lambda work: measure_work(work, effort, progress), quick=quick
    )
    notes = _NOTES.format(
        default=_name(*DEFAULT),
        num_steps=effort.num_steps,
        rates=" and ".join(f"{rate:g}" for rate in effort.peer_rates),
        steps=effort.peer_steps,
        seconds=effort.peer_seconds,
    )
    return Suite(NAME, "Seconds to close the gap to the posterior", notes + missing, rows)


def measure_work(work: Work, effort: Effort, progress: Callable[[str], None]) -> list[Row]:
    """The rows of one work: ends of the gap, all contestants, and the best of either kind."""
    progress(f"{work.name}: mean-field")
    mean_field = _fit(work, "diagonal", 1.0, effort)
    fits = {}
    for setting in effort.settings:
        progress(f"{work.name}: {_name(*setting)}")
        fits[setting] = _fit(work, *setting, effort)
    best = min(fits.values(), key=lambda fit: fit.log_evidence_error)
    gap = Gap.between(
        Estimate(mean_field.elbo, mean_field.elbo_error),
        Estimate(best.log_evidence, best.log_evidence_error),
    )
    ours: dict[str, Result] = {}
    for setting, fit in fits.items():
        progress(f"{work.name}: {_name(*setting)}, timed")
        curve = snapshots.of_fit(jax.random.key(0), fit.guide, fit.arguments, effort.num_steps)
        ours[_name(*setting)] = judge(curve, gap)
    theirs: dict[str, Result] = {}
    for name in effort.peers:
        progress(f"{work.name}: {name}")
        theirs[name] = best_of([judge(curve, gap) for curve in _peer_curves(name, work, effort)])
    found = {**ours, "best of RVRS": best_of([*ours.values()])}
    found |= {**theirs, "best of peers": best_of([*theirs.values()])}
    rows = [Row(work.name, name, _reference(bound)) for name, bound in gap.ends.items()]
    rows += [Row(work.name, name, _figures(result, gap)) for name, result in found.items()]
    if _name(*DEFAULT) in ours:
        ratios = _ratios(found["best of peers"], ours[_name(*DEFAULT)])
        rows.append(Row(work.name, "best of peers / default", ratios))
    return rows


def _name(proposal: str, target_acceptance: float) -> str:
    return f"RVRS {proposal} {target_acceptance:g}"


def _fit(work: Work, proposal: str, target_acceptance: float, effort: Effort) -> Fit:
    with warnings.catch_warnings():
        # That mean-field is no good fit is what this is about.
        warnings.simplefilter("ignore", UserWarning)
        return fitting.fit(
            jax.random.key(0),
            work.model,
            *work.args,
            proposal=proposal,
            target_acceptance=target_acceptance,
            num_steps=effort.num_steps,
            num_evaluation_draws=effort.reference_draws,
            progress=False,
        )


def _peer_curves(name: str, work: Work, effort: Effort) -> Iterator[Curve]:
    peer = peers.trainer(name, work)
    steps = snapshots.affordable_steps(peer, effort.peer_seconds, effort.peer_steps)
    schedules = ((steps, False), (steps, True), (max(1, int(_SHORT_SHARE * steps)), True))
    for rate, (length, decays) in itertools.product(effort.peer_rates, schedules):
        yield snapshots.of_peer(jax.random.key(0), peer, length, learning_rate=rate, decays=decays)


class Gap(NamedTuple):
    """What an ordinary fit leaves open."""

    mean_field: Estimate
    """The ELBO of the best mean-field normal."""
    log_evidence: Estimate

    @staticmethod
    def between(mean_field: Estimate, log_evidence: Estimate) -> "Gap":
        """The gap, if it is one."""
        gap = Gap(mean_field, log_evidence)
        # Three standard errors of either end.
        if not gap.size > 3 * (mean_field.error + log_evidence.error):
            raise ValueError(
                f"there is no gap to close: the mean-field ELBO is {mean_field.value:.4f} and the "
                f"log evidence {log_evidence.value:.4f}; use a posterior with correlations."
            )
        return gap

    @property
    def size(self) -> float:
        """In nats."""
        return self.log_evidence.value - self.mean_field.value

    @property
    def ends(self) -> dict[str, Estimate]:
        """Both ends, by name."""
        return {"log evidence": self.log_evidence, "mean-field ELBO": self.mean_field}

    def share(self, bound: Estimate) -> Estimate:
        """The share that a bound closes."""
        return Estimate((bound.value - self.mean_field.value) / self.size, bound.error / self.size)


class Result(NamedTuple):
    """How far a method came."""

    seconds: tuple[float | None, ...]
    """Until each of :data:`LEVELS`; None if it was not reached."""
    labels: tuple[str | None, ...]
    """The snapshots that reached them."""
    final: float
    """Share of the gap that it ended with."""
    total_seconds: float


def judge(curve: Curve, gap: Gap, levels: Sequence[float] = LEVELS) -> Result:
    """The first snapshot that reaches each level, and where the last one is.

    Snapshots are judged in turn until the highest level is reached.
    """
    reached: list[Snapshot] = []
    for snapshot in curve.snapshots:
        share = _share(curve, snapshot, gap, levels[len(reached) :])
        while len(reached) < len(levels) and share >= levels[len(reached)]:
            reached.append(snapshot)
        if len(reached) == len(levels):
            break
    last = curve.snapshots[-1]
    missing = (None,) * (len(levels) - len(reached))
    return Result(
        seconds=(*(snapshot.seconds for snapshot in reached), *missing),
        labels=(*(snapshot.label for snapshot in reached), *missing),
        final=_share(curve, last, gap, None),
        total_seconds=last.seconds,
    )


def _share(curve: Curve, snapshot: Snapshot, gap: Gap, levels: Sequence[float] | None) -> float:
    """The share of the gap, from as many estimates as are needed to tell it from the levels.

    The random numbers are the same for all snapshots of a curve. Without levels, it is as good
    as the tolerance.
    """
    found: list[Estimate] = []
    while True:
        key = jax.random.key(len(found))
        found.append(gap.share(curve.bound(key, snapshot.parameters)))
        values, errors = np.array(found).T
        share, error = values.mean(), np.linalg.norm(errors) / len(found)
        clear = levels is not None and np.all(
            np.abs(share - np.array(levels)) > _CLEAR_ERRORS * error
        )
        # What is not a number will not become one.
        if clear or not error > _TOLERANCE or len(found) == _MOST_ESTIMATES:
            return float(share)


def best_of(results: Sequence[Result]) -> Result:
    """The least seconds to every level, and the highest end."""

    def seconds(index: int, result: Result) -> float:
        found = result.seconds[index]
        return math.inf if found is None else found

    firsts = [min(results, key=partial(seconds, index)) for index in range(len(LEVELS))]
    last = max(results, key=lambda result: -math.inf if math.isnan(result.final) else result.final)
    return Result(
        seconds=tuple(first.seconds[index] for index, first in enumerate(firsts)),
        labels=tuple(first.labels[index] for index, first in enumerate(firsts)),
        final=last.final,
        total_seconds=last.total_seconds,
    )


_COLUMNS = tuple(f"{100 * level:.0f} %" for level in LEVELS)


def _figures(result: Result, gap: Gap) -> dict[str, Figure]:
    return dict(zip(_COLUMNS, result.seconds, strict=True)) | {
        "total s": result.total_seconds,
        "end %": 100 * result.final,
        "nats": gap.mean_field.value + result.final * gap.size,
        "error": None,
        "highest level at": next((label for label in reversed(result.labels) if label), None),
    }


def _reference(bound: Estimate) -> dict[str, Figure]:
    nothing: dict[str, Figure] = dict.fromkeys((*_COLUMNS, "total s", "end %"))
    return nothing | {"nats": bound.value, "error": bound.error}


def _ratios(result: Result, reference: Result) -> dict[str, Figure]:
    pairs = zip(_COLUMNS, result.seconds, reference.seconds, strict=True)
    return {name: a / b if a is not None and b else None for name, a, b in pairs}
