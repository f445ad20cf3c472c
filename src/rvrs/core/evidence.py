r"""ELBO, log Z and log evidence of a fitted ``r``, each with a Monte Carlo standard error.

All three are functions of means over proposals ``z ~ q``, so every proposal counts and nothing
needs to be accepted or rejected:

.. math::

    \log Z = \log E_q[a_\epsilon], \qquad
    ELBO = \frac{E_q[a_\epsilon A]}{E_q[a_\epsilon]} + \log Z, \qquad
    \log p(x) = \log E_q[e^{lw}].

Averaging over the accept decision in this way can only lower the variance. The standard errors
are those of the delta method. The estimates of logarithms and of the ratio have a bias of order
``1 / num_proposals``, far below the standard error; where many targets are added up it counts, and
``elbo_bias`` estimates it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rvrs.core.acceptance import evaluate
from rvrs.core.problem import PRNGKey, Problem, Targets, log_weights
from rvrs.core.randomness import unrolled


class Evidence(NamedTuple):
    """Estimates for each of B targets, with standard errors.

    >>> import jax.numpy as jnp
    >>> from rvrs.core import evidence
    >>> lw = jnp.zeros((1000, 1))  # log weights of proposals from the posterior itself
    >>> found = evidence.from_log_weights(lw, jnp.zeros(1), epsilon=0.0)
    >>> bool(jnp.allclose(found.elbo, found.log_evidence, atol=1e-6))
    True
    """

    elbo: Float[Array, " b"]
    elbo_error: Float[Array, " b"]
    elbo_bias: Float[Array, " b"]
    """What the finite number of proposals adds to ``elbo`` on average, to first order."""
    log_normalizer: Float[Array, " b"]
    """``log Z``, the log of the acceptance probability."""
    log_normalizer_error: Float[Array, " b"]
    log_evidence: Float[Array, " b"]
    """``log p(x)`` by importance sampling from the proposal."""
    log_evidence_error: Float[Array, " b"]
    threshold: Float[Array, " b"]
    """T that all this holds for."""


class _Moments(NamedTuple):
    """Sums over proposals, kept relative to their own scale and centre so that none overflows.

    With ``alpha = exp(log a_e - log_scale)`` and ``d = A - centre``; the last three fields are the
    same for the importance weights ``exp(lw)``.
    """

    num: Float[Array, " b"]
    log_scale: Float[Array, " b"]
    centre: Float[Array, " b"]  # sum(alpha A) / sum(alpha)
    weight: Float[Array, " b"]  # sum(alpha)
    square: Float[Array, " b"]  # sum(alpha^2)
    square_d: Float[Array, " b"]  # sum(alpha^2 d)
    square_dd: Float[Array, " b"]  # sum(alpha^2 d^2)
    evidence_scale: Float[Array, " b"]
    evidence_weight: Float[Array, " b"]
    evidence_square: Float[Array, " b"]


def estimate(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    threshold: Float[Array, " b"],
    *,
    num_proposals: int,
    epsilon: float,
    chunk_size: int = 10_000,
) -> Evidence:
    """Estimate from ``num_proposals`` proposals per target.

    At most about ``chunk_size`` proposals, over all targets, are in memory at any time. The
    number of proposals is rounded up to a whole number of chunks.
    """
    per_chunk = max(1, min(num_proposals, chunk_size // targets.num_targets))
    num_chunks = math.ceil(num_proposals / per_chunk)
    targets, threshold = lax.stop_gradient((targets, threshold))

    def add_chunk(index: Array, moments: _Moments) -> _Moments:
        key = jax.random.fold_in(unrolled(rng_key), index)
        noise = problem.sample_noise(key, (per_chunk, targets.num_targets))
        lw = log_weights(problem, targets, noise)
        return _merge(moments, _moments(lw, threshold, epsilon))

    moments = lax.fori_loop(0, num_chunks, add_chunk, _no_moments(threshold))
    return _summarize(moments, threshold)


def from_log_weights(
    log_weights: Float[Array, "n b"], threshold: Float[Array, " b"], *, epsilon: float
) -> Evidence:
    """The same estimates from log weights of proposals that are at hand."""
    return _summarize(_moments(log_weights, threshold, epsilon), threshold)


def _moments(lw: Float[Array, "n b"], threshold: Float[Array, " b"], epsilon: float) -> _Moments:
    a = evaluate(lw, threshold[None], epsilon)
    log_scale = _finite_max(a.log_probability)
    alpha = jnp.exp(a.log_probability - log_scale)
    weight = jnp.sum(alpha, axis=0)
    centre = jnp.sum(alpha * a.log_ratio, axis=0) / _at_least_tiny(weight)
    # A sum of log densities of 1e6 is off by many nats in float32; what it is off by is not large.
    centre += jnp.sum(alpha * (a.log_ratio - centre), axis=0) / _at_least_tiny(weight)
    d = a.log_ratio - centre
    # +inf is not a density: like NaN it has no weight.
    log_importance = jnp.where(jnp.isfinite(lw), lw, -jnp.inf)
    evidence_scale = _finite_max(log_importance)
    importance = jnp.exp(log_importance - evidence_scale)
    return _Moments(
        num=jnp.full_like(weight, lw.shape[0]),
        log_scale=log_scale,
        centre=centre,
        weight=weight,
        square=jnp.sum(alpha**2, axis=0),
        square_d=jnp.sum(alpha**2 * d, axis=0),
        square_dd=jnp.sum((alpha * d) ** 2, axis=0),
        evidence_scale=evidence_scale,
        evidence_weight=jnp.sum(importance, axis=0),
        evidence_square=jnp.sum(importance**2, axis=0),
    )


def _no_moments(like: Float[Array, " b"]) -> _Moments:
    """The moments of no proposals at all: nothing, on the smallest scale."""
    zeros = jnp.zeros_like(like)
    smallest = jnp.full_like(like, jnp.finfo(like.dtype).min)
    nothing = _Moments(*[zeros] * len(_Moments._fields))
    return nothing._replace(log_scale=smallest, evidence_scale=smallest)


def _merge(first: _Moments, second: _Moments) -> _Moments:
    """The moments of two sets of proposals together (parallel algorithm of Chan et al.)."""
    log_scale = jnp.maximum(first.log_scale, second.log_scale)
    evidence_scale = jnp.maximum(first.evidence_scale, second.evidence_scale)

    def rescaled_weight(moments: _Moments) -> Array:
        return moments.weight * jnp.exp(moments.log_scale - log_scale)

    weight = rescaled_weight(first) + rescaled_weight(second)
    share = rescaled_weight(second) / _at_least_tiny(weight)
    centre = first.centre + share * (second.centre - first.centre)

    def moved(moments: _Moments) -> _Moments:
        scale = jnp.exp(2 * (moments.log_scale - log_scale))
        shift = moments.centre - centre
        square_dd = moments.square_dd + 2 * shift * moments.square_d + shift**2 * moments.square
        evidence = jnp.exp(moments.evidence_scale - evidence_scale)
        return _Moments(
            num=moments.num,
            log_scale=log_scale,
            centre=centre,
            weight=rescaled_weight(moments),
            square=scale * moments.square,
            square_d=scale * (moments.square_d + shift * moments.square),
            square_dd=scale * square_dd,
            evidence_scale=evidence_scale,
            evidence_weight=evidence * moments.evidence_weight,
            evidence_square=evidence**2 * moments.evidence_square,
        )

    total = jax.tree.map(jnp.add, moved(first), moved(second))
    return total._replace(log_scale=log_scale, centre=centre, evidence_scale=evidence_scale)


def _summarize(m: _Moments, threshold: Float[Array, " b"]) -> Evidence:
    log_normalizer = m.log_scale + jnp.log(m.weight / m.num)
    # A proposal contributes g = alpha (d + 1) / mean(alpha) to the ELBO, to first order; the
    # mean of g is 1 by the choice of the centre.
    elbo_square = m.square_dd + 2 * m.square_d + m.square
    # Second-order delta method for E[alpha A] / E[alpha] + log E[alpha].
    variance = m.num * m.square / _at_least_tiny(m.weight**2) - 1
    covariance = m.num * m.square_d / _at_least_tiny(m.weight**2)
    return Evidence(
        elbo=m.centre + log_normalizer,
        elbo_error=_relative_error(m.num, m.weight, elbo_square),
        elbo_bias=-(covariance + variance / 2) / m.num,
        log_normalizer=log_normalizer,
        log_normalizer_error=_relative_error(m.num, m.weight, m.square),
        log_evidence=m.evidence_scale + jnp.log(m.evidence_weight / m.num),
        log_evidence_error=_relative_error(m.num, m.evidence_weight, m.evidence_square),
        threshold=threshold,
    )


def _relative_error(count: Array, total: Array, square: Array) -> Array:
    """Standard error of the log of a mean, from the sum and the sum of squares.

    Infinite where nothing is known: no proposal counts, or squares overflow.
    """
    variance = count * square / _at_least_tiny(total**2) - 1
    known = (total > 0) & ~jnp.isnan(variance)
    return jnp.where(known, jnp.sqrt(jnp.maximum(variance, 0.0) / count), jnp.inf)


def _finite_max(log_values: Float[Array, "n b"]) -> Float[Array, " b"]:
    highest = jnp.max(log_values, axis=0)
    return jnp.where(jnp.isfinite(highest), highest, 0.0)


def _at_least_tiny(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)
