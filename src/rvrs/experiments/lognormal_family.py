"""What rejection can gain on the precisions of a Student-t likelihood at best, by quadrature.

The local posteriors of :mod:`rvrs.experiments.hierarchical` are Gamma distributions and its
proposals log-normal ones. All data points have the same shape, so that one optimisation over the
two parameters of a proposal tells how much of the gap of mean-field this family can close.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.optimize import minimize as minimize_in_jax
from jax.scipy.special import gammaln, logsumexp
from scipy.optimize import brentq, minimize
from scipy.special import expit, logit

from rvrs.core.arguments import check_positive, check_target_acceptance

# Quadrature for a standard normal: the trapezoidal rule, which is exact to rounding here.
_NODES = np.linspace(-10.0, 10.0, 1001)
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


def family_gap(shape: float, target_acceptance: float, location: float, scale: float) -> float:
    """``KL(r || posterior)`` of a posterior Gamma(shape, 1) and a normal proposal of ``log tau``.

    T is such that the acceptance is ``target_acceptance`` exactly; 1 is without rejection.
    """
    z = location + scale * _NODES
    log_q = -(_NODES**2) / 2 - math.log(scale * math.sqrt(2 * math.pi))
    log_weights = shape * z - np.exp(z) - math.lgamma(shape) - log_q
    if target_acceptance == 1:
        return -float(_WEIGHTS @ log_weights)
    # At these thresholds, all acceptance probabilities are below or above the target.
    ends = logit(target_acceptance) - log_weights[[log_weights.argmax(), log_weights.argmin()]]
    excess = lambda t: _WEIGHTS @ expit(log_weights + t) - target_acceptance  # noqa: E731
    threshold: Any = brentq(excess, *ends)
    r = _WEIGHTS * expit(log_weights + threshold) / target_acceptance
    # A = lw - log a = log(exp(lw) + exp(-T)), and the gap is -(E_r[A] + log Z).
    return -float(r @ np.logaddexp(log_weights, -threshold)) - math.log(target_acceptance)


@cache
def family_optimum(shape: float, target_acceptance: float) -> tuple[float, float]:
    """Least ``KL(r || posterior)`` for a posterior Gamma(shape, rate): with rejection, and without.

    The rate only moves ``log tau``, so that it does not matter. Without rejection, the best normal
    has the variance 1 / shape and gives ``tau`` its posterior mean; what remains is the error of
    Stirling's formula for the Gamma function.
    """
    check_positive("shape", shape)
    check_target_acceptance(target_acceptance, epsilon=0.0)
    start = math.log(shape) - 1 / (2 * shape), -math.log(shape) / 2
    gap = lambda at, acceptance: family_gap(shape, acceptance, at[0], math.exp(at[1]))  # noqa: E731
    found = minimize(gap, start, target_acceptance, method="Nelder-Mead", tol=1e-9)
    return float(found.fun), gap(start, 1.0)


def interpolated_gap(target_acceptance: float) -> Callable[[Array], Array]:
    """The least gap as a function of the posterior's shape that JAX can differentiate."""
    shapes = np.geomspace(*_SHAPES, 100)
    log_gaps = [math.log(family_optimum(float(a), target_acceptance)[0]) for a in shapes]
    return lambda shape: jnp.exp(
        jnp.interp(jnp.log(shape), jnp.asarray(np.log(shapes)), jnp.asarray(log_gaps))
    )


def shortfall(
    shapes: Array, rates: Array, locations: Array, scales: Array, target_acceptance: float
) -> Array:
    """What better normal proposals of ``log tau_n`` would add to the ELBO of each data point.

    The exact posterior of ``tau_n`` is Gamma with shape ``(M,)`` and rate ``(M, n)`` at each of M
    draws of the global variables, which the proposals ``(n,)`` do not follow. The best of these is
    found by minimisation. T is one number per point, such that the acceptance averages to
    ``target_acceptance`` over the draws.
    """
    nodes = jnp.linspace(-8.0, 8.0, 101)
    log_weights = jax.nn.log_softmax(-(nodes**2) / 2)

    def gap(at: Array, rates: Array) -> Array:
        """``E[KL(r || posterior)]`` over the draws, of one point."""
        scale = jnp.exp(at[1])
        z = at[0] + scale * nodes
        log_q = -(nodes**2) / 2 - at[1] - math.log(2 * math.pi) / 2
        log_p = shapes[:, None] * (z + jnp.log(rates)[:, None]) - rates[:, None] * jnp.exp(z)
        lw = log_p - gammaln(shapes)[:, None] - log_q

        def mean_acceptance(t: Array) -> Array:
            return jnp.mean(jnp.exp(logsumexp(log_weights + jax.nn.log_sigmoid(lw + t), axis=1)))

        def halve(ends: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            middle = (ends[0] + ends[1]) / 2
            low = mean_acceptance(middle) < target_acceptance
            return (jnp.where(low, middle, ends[0]), jnp.where(low, ends[1], middle)), None

        # From T at which all is rejected to T at which all is accepted.
        ends = (-lw.max() - 20.0, -lw.min() + 20.0)
        t = lax.stop_gradient(lax.scan(halve, ends, None, 50)[0][0])
        # One step of Newton's method changes nothing but lets gradients follow T.
        error = mean_acceptance(t) - target_acceptance
        t = t - error / lax.stop_gradient(jax.grad(mean_acceptance)(t))
        log_r = log_weights + jax.nn.log_sigmoid(lw + t)
        log_z = logsumexp(log_r, axis=1)
        mean_a = jnp.sum(jnp.exp(log_r - log_z[:, None]) * jnp.logaddexp(lw, -t), axis=1)
        return -jnp.mean(mean_a + log_z)

    def improvement(location: Array, scale: Array, rates: Array) -> Array:
        start = jnp.stack([location, jnp.log(scale)])
        # From a fit, these are more than enough; from rounding it would not stop by itself.
        options = {"maxiter": 15}
        best = minimize_in_jax(gap, start, (rates,), method="BFGS", options=options).fun
        return gap(start, rates) - best

    return jax.jit(jax.vmap(improvement))(locations, scales, rates.T)


# From less than 1 / 2, the shape at no degrees of freedom, to where the tails are those of a
# normal likelihood.
_SHAPES = 0.45, 200.0


def optimal_fraction(degrees_of_freedom: float, target_acceptance: float) -> float:
    """The fraction of the local gap between mean-field and oracle that rejection can close.

    Given the global variables, ``tau_n`` is Gamma(nu/2 + 1/2, nu/2 + residual^2 / (2 sigma^2)): of
    one shape for all data points, and so is the fraction. What fits differ by is less than the
    local gap at the ``nu`` of oracle, as mean-field moves ``nu`` up to where its gap is smaller;
    the experiment's ``optimum-Z`` takes account of that.
    """
    check_positive("degrees_of_freedom", degrees_of_freedom)
    gap, mean_field_gap = family_optimum(degrees_of_freedom / 2 + 0.5, target_acceptance)
    return 1 - gap / mean_field_gap
