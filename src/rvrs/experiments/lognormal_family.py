"""What rejection can gain on the precisions of a Student-t likelihood at best, by quadrature.

The local posteriors of :mod:`rvrs.experiments.hierarchical` are Gamma distributions and its
proposals log-normal ones. All data points have the same shape, so that one optimisation over the
two parameters of a proposal tells how much of the gap of mean-field this family can close.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import brentq, minimize
from scipy.special import expit, gammaln, logit

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
    log_weights = shape * z - np.exp(z) - gammaln(shape) - log_q
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
