r"""Figure 1 of the paper: rejection sculpts a mean-field proposal towards a funnel.

The target ("Characterizing RVRS" in the paper's appendix) is a funnel turned by 45 degrees,

.. math::

    \log p(x, y) = \log \phi\left(\tfrac{x + y}{\sqrt 2} \mid 0, 1\right)
                 + \log \phi\left(\tfrac{x - y}{\sqrt 2} \mid 0, e^{(x + y) / \sqrt 2}\right),

with :math:`\phi(\cdot \mid \mu, \sigma^2)` the normal density. It is normalised, so an ELBO is
minus a KL divergence and the best possible one is 0.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rvrs import vi
from rvrs.core.acceptance import log_acceptance
from rvrs.experiments import _seeds, funnel_figure
from rvrs.experiments.experiment import Claim, Experiment, Outcome, Preset, Report, Result, Unit
from rvrs.proposals import DiagonalNormal, diagonal_normal

TARGET_ACCEPTANCES = (1.0, 0.5, 0.05)
"""Z_target of the figure's fits; 1 is ordinary mean-field variational inference."""

NUM_STEPS = 50_000
"""Steps per fit. The exact ELBO was then within 5e-4 of its limit for each of three seeds, less
than the Monte Carlo error of its estimate. (The paper takes 5 million steps.)"""

NUM_EVALUATION_PROPOSALS = 1_000_000
"""Proposals that an ELBO is estimated from, as in the paper."""

# Rate of Adam at the first step; it falls to zero along a cosine, which averages out the noise.
_LEARNING_RATE = 1e-2
# The paper's guardrail for this figure.
_EPSILON = 1e-6


class Fit(NamedTuple):
    """One fit and its evaluation."""

    name: str
    target_acceptance: float
    epsilon: float
    parameters: DiagonalNormal
    """The mean-field normal proposal ``q``."""
    elbo: float
    elbo_error: float
    """Monte Carlo standard error of ``elbo``."""
    acceptance: float
    """``Z``, the acceptance probability of a proposal."""
    threshold: float
    """``T``, calibrated to the trained proposal."""
    seconds: float
    """Wall time of the training, including compilation."""


def log_density(position: jax.Array) -> jax.Array:
    """Log density of the normalised funnel at ``position = (x, y)``."""
    x, y = position
    along, across = (x + y) / math.sqrt(2), (x - y) / math.sqrt(2)
    log_variance = along
    squares = along**2 + across**2 * jnp.exp(-log_variance)
    return -0.5 * (squares + log_variance) - math.log(2 * math.pi)


def method_name(target_acceptance: float) -> str:
    """What a fit is called in tables."""
    return "mean-field" if target_acceptance == 1 else f"RVRS, Z_target = {target_acceptance:g}"


def fit(
    rng_key: jax.Array,
    target_acceptance: float,
    *,
    num_steps: int = NUM_STEPS,
    num_evaluation_proposals: int = NUM_EVALUATION_PROPOSALS,
    callback: Callable[[int, vi.RVRSState, vi.RVRSInfo], None] | None = None,
) -> Fit:
    """Train a mean-field proposal at ``target_acceptance`` from the origin, and evaluate it.

    The paper starts RVRS from a mean-field fit; here the origin leads to the same ELBO. The
    ``callback`` is that of :func:`rvrs.vi.run`.
    """
    train_key, evaluate_key = jax.random.split(rng_key)
    algorithm = _algorithm(target_acceptance, num_steps)
    start = time.perf_counter()
    state = algorithm.init(jnp.zeros(2))
    state, _ = vi.run(train_key, algorithm, state, num_steps, callback=callback)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    evidence = algorithm.evaluate(evaluate_key, state, num_proposals=num_evaluation_proposals)
    return Fit(
        name=method_name(target_acceptance),
        target_acceptance=target_acceptance,
        epsilon=_epsilon(target_acceptance),
        parameters=state.parameters,
        elbo=float(evidence.elbo),
        elbo_error=float(evidence.elbo_error),
        acceptance=math.exp(evidence.log_normalizer),
        threshold=float(evidence.threshold),
        seconds=seconds,
    )


# Cached so that a second fit with the same settings finds its compiled programs.
@cache
def _algorithm(target_acceptance: float, num_steps: int) -> vi.VIAlgorithm:
    return vi.as_top_level_api(
        log_density,
        optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, num_steps)),
        proposal="diagonal",
        target_acceptance=target_acceptance,
        epsilon=_epsilon(target_acceptance),
    )


def _epsilon(target_acceptance: float) -> float:
    # Where everything is accepted there is nothing to guard.
    return 0.0 if target_acceptance == 1 else _EPSILON


class Densities(NamedTuple):
    """The functions that Figure 1 shows, on a grid; arrays are indexed ``[y, x]``."""

    target: np.ndarray
    """``p(z)``."""
    proposal: np.ndarray
    """``q(z)``."""
    acceptance: np.ndarray
    """``a_e(z)``, the probability that a proposal at z is accepted."""
    fit: np.ndarray
    """``r(z) = q(z) a_e(z) / Z``."""


def densities(fit: Fit, axis: np.ndarray) -> Densities:
    """Evaluate a fit on the square grid ``axis`` times ``axis``."""
    x, y = np.meshgrid(axis, axis)
    z = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=-1), fit.parameters.loc.dtype)
    log_p, log_q, log_a = _log_densities(z, fit.parameters, fit.threshold, epsilon=fit.epsilon)
    log_r = log_q + log_a - math.log(fit.acceptance)
    return Densities(
        *(np.exp(np.asarray(log, float)).reshape(x.shape) for log in (log_p, log_q, log_a, log_r))
    )


@partial(jax.jit, static_argnames="epsilon")
def _log_densities(
    z: jax.Array, parameters: DiagonalNormal, t: jax.typing.ArrayLike, *, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``log p``, ``log q`` and ``log a_e`` at points ``(n, 2)``."""
    log_p = jax.vmap(log_density)(z)
    log_q = jax.vmap(diagonal_normal().log_density, in_axes=(None, 0))(parameters, z)
    log_a = log_acceptance(log_p - log_q, jnp.full_like(log_p, t), epsilon)
    return log_p, log_q, log_a


def plot(fits: Iterable[Fit], path: str | PathLike[str]) -> None:
    """Draw Figure 1 and save it to ``path``.

    Parameters
    ----------
    fits
        One or more RVRS fits and the mean-field fit, in any order; they become the columns, by
        rising target acceptance.
    path
        Image file; its suffix tells the format.
    """
    fits = sorted(fits, key=lambda fit: fit.target_acceptance)
    if len(fits) < 2 or fits[-1].target_acceptance != 1:
        raise ValueError(
            "fits must hold a mean-field fit (target_acceptance=1) and at least one other, got "
            f"target acceptances {[fit.target_acceptance for fit in fits]}."
        )
    funnel_figure.draw(fits, [densities(fit, funnel_figure.GRID) for fit in fits], path)


_NAME = "funnel"
_METHODS = {"mean-field" if z == 1 else f"rvrs-{z:g}": z for z in TARGET_ACCEPTANCES}
# What is "nearly 0" here: the limits of training are -0.20, -0.047 and -0.002 as Z falls.
_NEARLY = 0.01


def run(
    unit: Unit, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], report: Report
) -> Outcome:
    """One fit; the seed is that of all randomness."""
    num_steps = settings["num_steps"]
    found = fit(
        jax.random.key(unit.seed),
        _METHODS[unit.method],
        num_steps=num_steps,
        num_evaluation_proposals=settings["num_evaluation_proposals"],
        callback=lambda steps, _state, _info: report(steps / num_steps, f"step {steps}"),
    )
    return Outcome(
        {
            "elbo": found.elbo,
            "elbo_error": found.elbo_error,
            "acceptance": found.acceptance,
            # JSON has no infinity, which is the T of accepting everything.
            "threshold": None if found.target_acceptance == 1 else found.threshold,
            "seconds": found.seconds,
            "loc": np.asarray(found.parameters.loc, float).tolist(),
            "log_scale": np.asarray(found.parameters.log_scale, float).tolist(),
        }
    )


def _rebuilt(result: Result) -> Fit:
    """The fit that a result was made of."""
    figures = dict(result.figures)
    target_acceptance = _METHODS[result.unit.method]
    parameters = DiagonalNormal(*(jnp.asarray(figures.pop(x)) for x in DiagonalNormal._fields))
    if figures["threshold"] is None:
        figures["threshold"] = math.inf
    return Fit(
        name=method_name(target_acceptance),
        target_acceptance=target_acceptance,
        epsilon=_epsilon(target_acceptance),
        parameters=parameters,
        **figures,
    )


def _by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of every method that has some, by falling target acceptance."""
    found = {method: _seeds.succeeded(results, _NAME, method) for method in _METHODS}
    return {method: group for method, group in found.items() if group}


def plot_results(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw Figure 1 from the first seed of every method, if there is enough for it."""
    fits = [_rebuilt(group[0]) for group in _by_method(results).values()]
    if len(fits) < 2 or fits[0].target_acceptance != 1:
        return []
    path = folder / "funnel.png"
    plot(fits, path)
    return [path]


def tables(results: Sequence[Result]) -> str:
    """ELBO, Z, T and time of every method."""
    lines = [
        "The best possible ELBO is 0. Means over seeds with their standard errors (the ELBO of a "
        "single seed: Monte Carlo error); seconds are those of training, with compilation.",
        "",
        "| method | seeds | ELBO | Monte Carlo error of one ELBO | Z | T | seconds |",
        "| --- |" + " ---: |" * 6,
    ]
    for method, group in _by_method(results).items():
        threshold = "infinite" if method == "mean-field" else _text(group, "threshold", 2)
        cells = [
            *(method_name(_METHODS[method]), str(len(group)), _elbo(group).text(4)),
            *(_text(group, "elbo_error", 4), _text(group, "acceptance", 4), threshold),
            _text(group, "seconds", 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""]) + _seeds.failures(results)


def _elbo(group: Sequence[Result]) -> _seeds.Estimate:
    return _seeds.estimate(group, "elbo", "elbo_error")


def _text(group: Sequence[Result], name: str, digits: int) -> str:
    return _seeds.estimate(group, name).text(digits)


def claims(results: Sequence[Result]) -> list[Claim]:
    """That rejection brings the ELBO up, and in the end nearly to 0."""
    elbos = {method: _elbo(group) for method, group in _by_method(results).items()}
    words = ", ".join(f"{each.text(4)} ({method})" for method, each in elbos.items())
    best = elbos.get("rvrs-0.05")
    return [
        Claim(
            "The ELBO rises as Z falls",
            words or "no results",
            _rises(list(elbos.values())) if len(elbos) == len(_METHODS) else None,
        ),
        Claim(
            f"At Z = 0.05 the ELBO is nearly 0, the best possible (here: above -{_NEARLY})",
            "no results" if best is None else best.text(4),
            None if best is None else best.mean > -_NEARLY,
        ),
    ]


def _rises(elbos: Sequence[_seeds.Estimate]) -> bool | None:
    """None if some step up or down is within two standard errors."""
    steps = [
        (second.mean - first.mean, 2 * math.hypot(first.error or 0.0, second.error or 0.0))
        for first, second in itertools.pairwise(elbos)
    ]
    if any(gap < -error for gap, error in steps):
        return False
    return True if all(gap > error for gap, error in steps) else None


def _preset(num_steps: int, num_seeds: int) -> Preset:
    settings = {
        "num_steps": num_steps,
        "num_evaluation_proposals": NUM_EVALUATION_PROPOSALS,
    }
    return Preset((_NAME,), tuple(_METHODS), num_seeds, settings)


EXPERIMENT = Experiment(
    name=_NAME,
    title="Figure 1: rejection sculpts a mean-field proposal towards a funnel",
    datasets=(_NAME,),
    methods=tuple(_METHODS),
    presets={
        "quick": _preset(2000, 1),
        "cpu": _preset(NUM_STEPS, 5),
        "paper": _preset(5_000_000, 5),
    },
    run=run,
    plot=plot_results,
    tables=tables,
    claims=claims,
)
