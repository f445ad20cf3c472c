r"""Surrogates whose gradient is an estimate of the ELBO's gradient.

Every estimator of the method is a weighted sum over the S accepted draws of a target. With
``A``, ``kappa``, ``c`` and ``a`` from :mod:`rvrs.core.acceptance`, and
:math:`\bar A_s / m` short for the centred ``A_s`` divided by the number that makes the sample
covariance unbiased:

==================== ============================= ==========================================
gradient             weight of draw s              of
==================== ============================= ==========================================
phi, reparameterised 2 a c Abar / m + kappa^2 / S  d_z (log p - log q) . grad_phi z
phi, score (VRS)     kappa Abar / m                grad_phi log q(z), z held fixed
theta, unbiased      1 / S + c Abar / m            grad_theta log p(x, z), z held fixed
theta, truncated     1 / S                         the same (biased; the paper's choice)
==================== ============================= ==========================================

The first line is Eqn. (epsphigrad) of the paper: with :math:`f = \bar A \kappa` its integrand is
:math:`f\, \partial_z \log a_\epsilon + \partial_z f`. All derivatives with respect to z go through
the log weight, where :math:`d\log a_\epsilon = c`, :math:`dA = 1 - c = \kappa` and
:math:`d\kappa = a c - c\,(1-a)\,\epsilon/a_\epsilon`, so the factor of :math:`\bar A` is
:math:`\kappa c + d\kappa = 2 a c` for every epsilon. ``A`` contains ``log a_e``, not ``log a``,
and the covariance in the theta gradient has a plus sign (the paper has a minus).

Where T follows the parameters to keep Z at its target, the gradient has another term: every
:math:`\bar A_s` is less by the multiplier of that constraint
(:func:`rvrs.core.threshold.multiplier`). The paper treats T as fixed, and so stops short of the
best ELBO at the wanted acceptance.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from rvrs.core.acceptance import evaluate
from rvrs.core.problem import Problem, PyTree, Targets
from rvrs.core.rejection import Draws

Estimator = Literal["reparameterized", "score"]
ModelGradient = Literal["unbiased", "truncated"]
Baseline = Literal["leave_one_out", "running"]


class Objective(NamedTuple):
    """Estimates for each of B targets; targets without all their draws contribute zero."""

    surrogate: Float[Array, " b"]
    """Its value is ``elbo``, its gradient the gradient estimate."""
    elbo: Float[Array, " b"]
    """``mean_s A_s + log Z``, whichever gradient was asked for."""


def elbo_surrogate(
    problem: Problem,
    targets: Targets,
    draws: Draws,
    threshold: Float[Array, " b"],
    *,
    epsilon: float,
    estimator: Estimator = "reparameterized",
    model_gradient: ModelGradient = "unbiased",
    running_log_ratio: Float[Array, " b"] | None = None,
    multiplier: Float[Array, " b"] | None = None,
) -> Objective:
    """The surrogate objective for accepted draws.

    Parameters
    ----------
    targets
        Differentiate with respect to ``targets.proposal`` for phi and ``targets.model`` or
        ``targets.data`` (or whatever else ``problem.log_joint`` depends on) for theta.
    running_log_ratio
        A running estimate of ``E_r[A]``, NaN where there is none yet. None, or NaN, centres ``A``
        by the mean over the draws, which is unbiased if there are two or more; of a single draw
        it leaves the path of ``kappa^2`` alone. A running estimate does with one draw (the paper's
        footnote) and is unbiased as far as it is independent of the draws and right. It is also
        less noisy: for S = 2 by half in the term of the covariance.
    multiplier
        None gives the gradient of the ELBO at fixed T. A number, from
        :func:`rvrs.core.threshold.multiplier`, gives that of ``ELBO - multiplier log Z``, which is
        the gradient of the ELBO when T follows the parameters such that Z stays where it is.
    """
    weights = _weights(
        draws, threshold, epsilon, estimator, model_gradient, running_log_ratio, multiplier
    )
    frozen = lax.stop_gradient(targets.proposal)
    if estimator == "reparameterized":
        z = _for_each_draw(_position(problem))(targets.proposal, draws.noise)
        log_q = _for_each_draw(problem.log_proposal)(frozen, z)
    else:
        z = _for_each_draw(_position(problem))(frozen, draws.noise)
        log_q = _for_each_draw(problem.log_proposal)(targets.proposal, z)

    # log p is evaluated once: its weight is the one that theta needs, and the weight that z needs
    # is made of it by scaling what flows into z.
    z = jax.tree.map(lambda leaf: _scale_gradient(leaf, weights.path / weights.model), z)
    per_target = jax.vmap(problem.log_joint, in_axes=(None, 0, 0))
    log_p = jax.vmap(per_target, in_axes=(None, None, 0))(targets.model, targets.data, z)

    carrier = jnp.sum(weights.model * log_p + weights.proposal * log_q, axis=0)
    carrier = jnp.where(draws.complete, carrier, 0.0)
    elbo = lax.stop_gradient(weights.mean_log_ratio + draws.log_normalizer)
    elbo = jnp.where(draws.complete, elbo, 0.0)
    return Objective(
        surrogate=elbo + (carrier - lax.stop_gradient(carrier)),
        elbo=elbo,
    )


class _Weights(NamedTuple):
    """The weights of the module's table; none of them carries a gradient."""

    path: Float[Array, "s b"]  # of d_z log p
    model: Float[Array, "s b"]  # of grad_theta log p; never zero
    proposal: Float[Array, "s b"]  # of log q
    mean_log_ratio: Float[Array, " b"]


def _weights(
    draws: Draws,
    threshold: Float[Array, " b"],
    epsilon: float,
    estimator: Estimator,
    model_gradient: ModelGradient,
    running_log_ratio: Float[Array, " b"] | None,
    multiplier: Float[Array, " b"] | None,
) -> _Weights:
    # The sampler has evaluated the log weights already; they are values, not functions, here.
    a = evaluate(draws.log_weight, lax.stop_gradient(threshold), epsilon)
    num_samples = draws.log_weight.shape[0]
    is_draw = jnp.arange(num_samples, dtype=jnp.int32)[:, None] < draws.num_draws
    count = jnp.maximum(draws.num_draws, 1).astype(a.log_ratio.dtype)
    # The weight of a draw in a mean over the draws that the target has.
    share = jnp.where(is_draw, 1 / count, 0.0)
    mean = jnp.sum(share * a.log_ratio, axis=0)
    # What one draw alone would be centred by is itself.
    centred = (a.log_ratio - mean) * share * (count / jnp.maximum(count - 1, 1))
    if running_log_ratio is not None:
        running = lax.stop_gradient(running_log_ratio)
        known = ~jnp.isnan(running)
        by_running = (a.log_ratio - jnp.where(known, running, 0.0)) * share
        centred = jnp.where(known, by_running, centred)
    if multiplier is not None:
        # grad log Z is E_r of the same terms that the covariance with A is made of.
        centred = centred - lax.stop_gradient(multiplier) * share

    model = share
    if model_gradient == "unbiased":
        model = model + centred * a.c
    model = jnp.where(jnp.abs(model) < _SMALLEST_WEIGHT, _SMALLEST_WEIGHT, model)
    if estimator == "reparameterized":
        path = 2 * a.sigmoid * a.c * centred + a.kappa**2 * share
        return _Weights(path, model, -path, mean)
    return _Weights(jnp.zeros_like(centred), model, a.kappa * centred, mean)


# A weight of exactly zero could not be rescaled into the weight that z needs; the error made by
# this one is far below rounding.
_SMALLEST_WEIGHT = 1e-12


def differentiable_if(condition: Bool[Array, ""], tree: PyTree) -> PyTree:
    """``tree`` in value; without derivative unless the condition holds.

    For targets without draws, which are evaluated at points whose gradient need not be finite: a
    weight of zero would make NaN of it.
    """
    return jax.tree.map(lambda x: jnp.where(condition, x, lax.stop_gradient(x)), tree)


def _scale_gradient(x: Float[Array, "s b *event"], factor: Float[Array, "s b"]) -> Array:
    """``x`` in value; its derivative, forward or reverse, multiplied by ``factor``."""
    fixed = lax.stop_gradient(x)
    return fixed + factor.reshape(factor.shape + (1,) * (x.ndim - 2)) * (x - fixed)


def _position(problem: Problem) -> Callable[[PyTree, PyTree], PyTree]:
    return lambda proposal, noise: problem.propose(proposal, noise)[0]


def _for_each_draw(function: Callable[[PyTree, PyTree], PyTree]) -> Callable:
    """Lift a function of one target and one draw to ``(B, ...)`` and ``(S, B, ...)``."""
    return jax.vmap(jax.vmap(function), in_axes=(None, 0))
