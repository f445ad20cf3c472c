"""How far a fit can be trusted: Pareto k-hat and effective sample size of its draws' weights."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from rvrs.core.arguments import check_count, check_numbers, check_seed

__all__ = ["Distance", "Smoothed", "max_sliced_wasserstein", "smooth"]

# Above this, importance weights have so heavy a tail that they cannot be relied on (Vehtari et
# al., "Pareto smoothed importance sampling").
KHAT_LIMIT = 0.7
# Relative deviation of the acceptance from its target that is worth a warning.
ACCEPTANCE_TOLERANCE = 0.2
# KL(r || posterior) = log p(x) - ELBO, in nats, that is worth a warning: k-hat cannot tell of
# what no draw has seen, but a fit that far off has errors of some tenths of a standard deviation.
EVIDENCE_LIMIT = 0.1
# Log weights that differ by less than this are equal for all that can be done with them; the tail
# of what is left of them is rounding.
_NEGLIGIBLE_SPREAD = 0.01
# The least number of largest weights that a tail can be fitted to; there is none for fewer.
_SHORTEST_TAIL = 5


class Smoothed(NamedTuple):
    """Pareto-smoothed importance weights of draws against the posterior.

    >>> import numpy as np
    >>> from rvrs import diagnostics
    >>> smoothed = diagnostics.smooth(np.zeros(1000))  # draws from the posterior itself
    >>> smoothed.khat, round(smoothed.ess)
    (0.0, 1000)
    """

    weights: np.ndarray
    """Normalised to sum to one."""
    khat: float
    """Shape of the Pareto tail: below 0.5 good, above 0.7 not to be relied on."""
    ess: float
    """Effective sample size of the weighted draws."""


def smooth(log_weights: np.ndarray) -> Smoothed:
    """Pareto-smooth the log weights of independent draws (PSIS, through ArviZ).

    Where the largest weights agree within one percent there is no tail to speak of: k-hat is 0.

    >>> import numpy as np
    >>> from rvrs import diagnostics
    >>> z = np.random.default_rng(0).normal(size=5000)
    >>> too_narrow = 0.5 * z**2 - 0.5 * (z / 4) ** 2  # draws of scale 1, a posterior of scale 4
    >>> bool(diagnostics.smooth(too_narrow).khat > 0.7)
    True
    """
    log_weights = check_numbers("log_weights", log_weights)
    if log_weights.ndim != 1:
        raise ValueError(f"log_weights must be (n,), got the shape {log_weights.shape}.")
    if not np.all(np.isfinite(log_weights)):
        raise ValueError("log_weights must be finite; leave out draws that were not completed.")
    if log_weights.size < 2:  # there is nothing to tell them by
        return Smoothed(np.ones_like(log_weights), math.nan, float(log_weights.size))
    with warnings.catch_warnings():
        # What ArviZ has to say about k-hat, the fit says in its own words; and it announces its
        # own refactoring at import.
        warnings.simplefilter("ignore")
        smoothed, khat = arviz().psislw(log_weights)
    weights = np.exp(np.asarray(smoothed, float) - np.max(smoothed))
    weights /= weights.sum()
    ess = float(1 / np.sum(weights**2))
    # The tail that PSIS fits, and the largest weight below it.
    length = math.ceil(min(log_weights.size / 5, 3 * math.sqrt(log_weights.size)))
    largest = np.sort(log_weights)[-length - 1 :]
    if length >= _SHORTEST_TAIL and np.ptp(largest) < _NEGLIGIBLE_SPREAD:
        khat = 0.0
    return Smoothed(weights, float(khat), ess)


def concerns(
    *,
    khat: float,
    acceptance: float,
    target_acceptance: float | None,
    num_capped: int,
    num_without_gradient: int,
    num_steps: int,
    missing_evidence: float,
) -> tuple[str, ...]:
    """What is doubtful about a fit, in words; nothing if all is well."""
    found = []
    if not khat <= KHAT_LIMIT:
        found.append(
            f"k-hat is {khat:.2f} (above {KHAT_LIMIT}): the posterior has mass or tails that the "
            "fit misses, and means and intervals may be off. Lower target_acceptance, use a "
            "richer proposal (a flow), or reparameterise the model; compare with MCMC."
        )
    if target_acceptance is not None:
        off = acceptance / target_acceptance - 1
        if abs(off) > ACCEPTANCE_TOLERANCE:
            found.append(
                f"acceptance is {acceptance:.3g}, {100 * off:+.0f} % off its target "
                f"{target_acceptance:g}: the density may be non-finite over much of the proposal; "
                "check the model's support."
            )
    if num_capped:
        found.append(
            f"max_proposals was hit in {num_capped} of {num_steps} steps, which were skipped: "
            "the proposal was far from the posterior then. Take more steps, or raise "
            "max_proposals."
        )
    if num_without_gradient:
        found.append(
            f"{num_without_gradient} of {num_steps} steps had no finite gradient and were skipped: "
            "the model's density is finite there but its derivative is not, e.g. that of a square "
            "root at 0 or of what a jnp.where leaves out. Training may have stopped where it was."
        )
    if missing_evidence > EVIDENCE_LIMIT:
        found.append(
            f"the ELBO is {missing_evidence:.2f} below the log evidence (more than "
            f"{EVIDENCE_LIMIT}), which is the divergence of the fit from the posterior: narrow or "
            "far parts of it are missed, even if k-hat looks fine. Lower target_acceptance, use a "
            "richer proposal (a flow), or reparameterise the model (e.g. non-centered)."
        )
    return tuple(found)


class Distance(NamedTuple):
    """A distance, over replicates of its random directions.

    >>> from rvrs import diagnostics
    >>> diagnostics.Distance(mean=0.03, sd=0.002).mean
    0.03
    """

    mean: float
    sd: float


def max_sliced_wasserstein(
    draws: np.ndarray,
    reference: np.ndarray,
    *,
    num_projections: int = 1000,
    num_replicates: int = 10,
    seed: int = 0,
) -> Distance:
    """Max-sliced Wasserstein distance of draws ``(n, D)`` and ``(m, D)``, through POT.

    The largest 2-Wasserstein distance of the two along ``num_projections`` random directions.
    Draws of the same distribution are some way apart as well: compare with the distance of two
    sets of reference draws of the same sizes.

    >>> import numpy as np
    >>> from rvrs import diagnostics
    >>> draws = np.random.default_rng(0).normal(size=(2, 1000, 3))
    >>> distance = diagnostics.max_sliced_wasserstein(draws[0] + 1, draws[1], num_projections=100)
    >>> bool(1 < distance.mean < 2)  # the shift is sqrt(3) in its own direction
    True
    """
    draws, reference = check_numbers("draws", draws), check_numbers("reference", reference)
    check_count("num_projections", num_projections)
    check_count("num_replicates", num_replicates)
    check_seed("seed", seed)
    shapes = draws.shape, reference.shape
    if any(len(shape) != 2 or 0 in shape for shape in shapes) or shapes[0][1] != shapes[1][1]:
        raise ValueError(
            f"draws and reference must be (n, D) and (m, D), got {draws.shape} and "
            f"{reference.shape}."
        )
    distances = [
        pot().max_sliced_wasserstein_distance(
            draws, reference, n_projections=num_projections, seed=seed + replicate
        )
        for replicate in range(num_replicates)
    ]
    return Distance(float(np.mean(distances)), float(np.std(distances)))


def pot() -> Any:
    """The POT library of optimal transport, or advice on how to get it."""
    try:
        with warnings.catch_warnings():
            # It looks for every array library that there is.
            warnings.simplefilter("ignore")
            import ot
    except ImportError as error:
        raise ImportError(
            "Wasserstein distances need POT, which is not installed; run: "
            "pip install 'rvrs[experiments]'"
        ) from error
    return ot


def arviz() -> Any:
    """The ArviZ library, or advice on how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import arviz
    except ImportError as error:
        raise ImportError(
            "k-hat and InferenceData need ArviZ, which is not installed; run: "
            "pip install 'rvrs[arviz]'"
        ) from error
    return arviz


def table(draws: dict[str, np.ndarray]) -> list[str]:
    """Lines with moments and quantiles of every coordinate of sites, from draws."""
    lines = [f"{'site':<24}{'mean':>12}{'sd':>12}{'5 %':>12}{'median':>12}{'95 %':>12}"]
    for name, value in draws.items():
        flat = np.asarray(value, float).reshape(len(value), -1)
        for index, column in enumerate(flat.T):
            place = ",".join(str(i) for i in np.unravel_index(index, value.shape[1:]))
            label = name if flat.shape[1] == 1 else f"{name}[{place}]"
            figures = [column.mean(), column.std(), *np.quantile(column, [0.05, 0.5, 0.95])]
            lines.append(f"{label:<24}" + "".join(f"{figure:>12.4g}" for figure in figures))
    return lines
