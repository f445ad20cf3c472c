r"""The threshold T that gives a wanted acceptance probability.

``Z(T) = E_q[a_e]`` grows with T, so T is determined by the target acceptance: it can be *solved*
for from a sample of log weights (:func:`calibrate`) or *followed* while the proposal changes
(:func:`adapt`). Everything works elementwise over targets.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from rvrs.core.acceptance import evaluate, log_acceptance
from rvrs.core.rejection import Tally

Rule = Literal["tracking", "sgd"]


class ThresholdState(NamedTuple):
    """T and what the online rule remembers of the steps before, one entry per target."""

    value: Float[Array, " b"]
    """T."""
    memory: Float[Array, " b"]
    """The number of past steps that the present T averages over."""
    drift: Float[Array, " b"]
    """Moving average of the relative errors of the acceptance."""
    power: Float[Array, " b"]
    """Moving average of their squares."""
    moments: Float[Array, "4 b"]
    """Sums over the proposals of past steps, the newest counting most, of what
    :func:`mean_log_ratio` and :func:`multiplier` are made of."""


def init(threshold: Float[Array, " b"], memory: float = 0.0) -> ThresholdState:
    """The state at which :func:`adapt` starts from a given T.

    ``memory`` is the number of steps whose proposals T was found with, if it was.
    """
    # Arrays of their own, since training loops may donate them.
    drift, power = jnp.zeros_like(threshold), jnp.zeros_like(threshold)
    return ThresholdState(threshold, drift + memory, drift, power, jnp.stack([drift] * 4))


def observe_weights(
    state: ThresholdState, log_weights: Float[Array, "n b"], epsilon: float, block_size: int
) -> ThresholdState:
    """Moments from a sample of log weights, which counts no more than the steps it will join."""
    a = evaluate(log_weights, state.value, epsilon)
    ratio = jnp.where(a.probability > 0, a.log_ratio + _origin(state.value), 0.0)
    slope = a.probability * a.c
    sums = [a.probability, slope, a.probability * ratio, slope * ratio]
    weight = min(len(log_weights), block_size / (1 - _MOMENT_DECAY))
    return state._replace(moments=weight * jnp.mean(jnp.stack(sums), axis=1))


def observe(state: ThresholdState, tally: Tally) -> ThresholdState:
    """Moments after another step with these proposals."""
    sums = jnp.stack([tally.acceptance, tally.slope, tally.ratio, tally.ratio_slope])
    return state._replace(moments=_MOMENT_DECAY * state.moments + sums)


def is_settled(state: ThresholdState) -> Bool[Array, " b"]:
    """Whether T has not drifted for so long that the moments are those of the present."""
    return state.memory > 1 / (1 - _MOMENT_DECAY)


def mean_log_ratio(state: ThresholdState) -> Float[Array, " b"]:
    """``E_r[A]`` as all proposals of past steps tell, accepted or not."""
    acceptance, _, ratio, _ = state.moments
    tiny = jnp.finfo(acceptance.dtype).tiny
    return ratio / jnp.maximum(acceptance, tiny) - _origin(state.value)


def _origin(threshold: Float[Array, " b"]) -> Float[Array, " b"]:
    """What ``A`` is measured from in the moments, with the other sign; see :class:`Tally`."""
    return jnp.nan_to_num(threshold, posinf=0.0)


def multiplier(state: ThresholdState) -> Float[Array, " b"]:
    r"""What a unit of ``log Z`` is worth in ELBO: the multiplier of the constraint on Z.

    T is not free while it follows the proposal: it is the function of the proposal that keeps
    ``Z = Z_target``. Moving T by dT changes the ELBO by ``COV_r[A, c] dT`` and ``log Z`` by
    ``E_r[c] dT``, so the ELBO's gradient under the constraint is that of
    ``ELBO - multiplier log Z`` at fixed T, with

    .. math::  multiplier = \frac{COV_r[A, c]}{E_r[c]} = \frac{E_r[c A]}{E_r[c]} - E_r[A].

    Without guardrail it is never positive: a higher acceptance costs ELBO. Where the guardrail
    accepts most draws it may be; such a proposal is far from the posterior and is better moved
    by the ELBO alone, so the multiplier is 0 there.
    """
    acceptance, slope, ratio, ratio_slope = state.moments
    tiny = jnp.finfo(slope.dtype).tiny
    known = (slope > tiny) & (acceptance > tiny)
    value = ratio_slope / jnp.maximum(slope, tiny) - ratio / jnp.maximum(acceptance, tiny)
    return jnp.where(known, jnp.minimum(value, 0.0), 0.0)


# Bisection halves an interval whose ends lie as far apart as the log weights; in float32 and
# float64 alike this many steps leave nothing but the rounding of T itself, unless log weights
# differ by more than 1e12: then it goes on to within this distance, which is none of acceptance.
_BISECTIONS = 64
_CLOSE_ENOUGH = 1e-6


def calibrate(
    log_weights: Float[Array, "n b"], target_acceptance: float, epsilon: float = 0.0
) -> Float[Array, " b"]:
    """Solve ``mean(a_e(log_weights; T)) = target_acceptance`` for T, one per column.

    Log weights that are not finite count as proposals that are always rejected. When these are
    so many that no T reaches the target, T is such that nearly all others are accepted. A target
    of 1 gives ``T = inf``: every proposal with a finite density is accepted.

    >>> import jax.numpy as jnp
    >>> from rvrs.core import threshold
    >>> log_weights = jnp.full((100, 1), 3.0)
    >>> t = threshold.calibrate(log_weights, target_acceptance=0.5)
    >>> print(t)  # sigmoid(3 + T) = 0.5
    [-3.]
    """
    if target_acceptance == 1.0:
        return jnp.full(log_weights.shape[1:], jnp.inf, log_weights.dtype)
    finite = jnp.isfinite(log_weights)
    lowest = jnp.min(jnp.where(finite, log_weights, jnp.inf), axis=0)
    highest = jnp.max(jnp.where(finite, log_weights, -jnp.inf), axis=0)
    any_finite = jnp.any(finite, axis=0)
    # At the ends of this interval all finite log weights have a acceptance of e^-reach or less,
    # respectively 1 - e^-reach or more.
    reach = 20.0 - jnp.log(jnp.asarray(target_acceptance, log_weights.dtype))
    low = jnp.where(any_finite, -highest - reach, 0.0)
    high = jnp.where(any_finite, -lowest + reach, 0.0)
    # Their distance must not overflow.
    largest = jnp.finfo(log_weights.dtype).max / 4
    low, high = jnp.clip(low, -largest, largest), jnp.clip(high, -largest, largest)
    # However far apart they are, so many steps lead to neighbouring numbers.
    most = 2 * jnp.finfo(log_weights.dtype).maxexp + _BISECTIONS

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        step, low, high = carry
        apart = high - low > _CLOSE_ENOUGH * jnp.maximum(1.0, jnp.abs(low) + jnp.abs(high))
        return (step < _BISECTIONS) | ((step < most) & jnp.any(apart))

    def halve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, low, high = carry
        middle = low + (high - low) / 2
        acceptance = jnp.mean(jnp.exp(log_acceptance(log_weights, middle[None], epsilon)), axis=0)
        too_low = acceptance < target_acceptance
        return step + 1, jnp.where(too_low, middle, low), jnp.where(too_low, high, middle)

    _, low, high = lax.while_loop(unfinished, halve, (jnp.int32(0), low, high))
    return low + (high - low) / 2


# The error of one step is measured in units of the target, on the scale of log Z. Large errors
# tell only the direction; this bounds the step they cause without touching ordinary noise.
_LARGEST_ERROR = 5.0
# T averages over at most this many steps: it then fluctuates by about one percent of Z.
_LONGEST_MEMORY = 1000.0
# Weight of the newest step in the moving averages that tell drift from noise.
_NEWEST = 0.05
# drift^2 / power is 1 if all errors agree and averages 0.026 if they are pure noise.
_DRIFTING = 0.25
# What a step counts in the moments is less by this factor at every later one: they come from about
# a hundred steps. Fewer would do while T drifts, but a multiplier from a handful of proposals far
# from the posterior is so noisy that it stops the training.
_MOMENT_DECAY = 0.99
# T moves by this many relative errors over memory: about 1 / (d log Z / dT), which is below 1.
_GAIN = 2.0


def adapt(
    state: ThresholdState,
    tally: Tally,
    target_acceptance: float,
    *,
    block_size: int,
    rule: Rule = "tracking",
) -> ThresholdState:
    r"""One online step of T from the proposals of one call of a sampler.

    ``"tracking"`` is stochastic approximation on the scale of ``log Z``. The relative error

    .. math::  e = \frac{\sum_i (a_{\epsilon,i} - Z_{target})}{Z_{target} \cdot block\_size}

    over all proposals has mean zero at the solution even though their number is random (Wald's
    identity; a mean instead of the sum would not). T moves by ``-2 e / memory``. The memory
    grows by one a step, so that T is an average over steps, and shrinks when the errors agree in
    sign for a while, so that T follows a proposal that moves.

    ``"sgd"`` is the paper's rule: gradient descent on ``(Z - Z_target)^2 / 2`` with rate 1, from
    an unbiased estimate of ``E_q[a_e - Z_target] E_q[d a_e / dT]`` over the proposals.
    """
    count = tally.num_proposals.astype(state.value.dtype)
    if rule == "sgd":
        pairs = tally.acceptance * tally.slope - tally.cross
        gradient = pairs / (count * (count - 1)) - target_acceptance * tally.slope / count
        return state._replace(value=state.value - gradient)

    error = (tally.acceptance - target_acceptance * count) / (target_acceptance * block_size)
    error = jnp.clip(error, -_LARGEST_ERROR, _LARGEST_ERROR)
    drift = state.drift + _NEWEST * (error - state.drift)
    power = state.power + _NEWEST * (error**2 - state.power)
    agreement = drift**2 / jnp.maximum(power, jnp.finfo(power.dtype).tiny)
    memory = jnp.where(agreement > _DRIFTING, state.memory * (1 - agreement), state.memory)
    memory = jnp.minimum(memory + 1, _LONGEST_MEMORY)
    value = state.value - _GAIN * error / memory
    return ThresholdState(value, memory, drift, power, state.moments)
