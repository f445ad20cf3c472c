r"""The smoothed acceptance probability and everything that derives from it.

A proposal ``z`` with log weight ``lw = log p(x, z) - log q(z)`` is accepted with
probability

.. math::  a_\epsilon = \epsilon + (1 - \epsilon)\, a, \qquad a = \sigma(lw + T),

(Eqn. 3 of the paper, with the guardrail of its Eqn. for :math:`a_\epsilon`). What survives
is distributed as ``r(z) = q(z) a_e(z) / Z`` with ``Z = E_q[a_e]``, and the ELBO is
``E_r[A] + log Z`` with ``A = lw - log a_e``.

A log weight that is not finite belongs to a point outside the support of ``r``: it is never
accepted, whatever ``epsilon`` is, and its gradient is zero.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Acceptance(NamedTuple):
    """What the estimators need to know about a draw; every field has the log weight's shape.

    Where the log weight is not finite, ``log_probability`` is ``-inf`` and the others are 0.
    """

    log_probability: Float[Array, "*shape"]
    """``log a_e``."""
    probability: Float[Array, "*shape"]
    """``a_e``."""
    sigmoid: Float[Array, "*shape"]
    """``a = sigmoid(lw + T)``, the acceptance probability without the guardrail."""
    kappa: Float[Array, "*shape"]
    """``(zeta + a^2) / (zeta + a)`` with ``zeta = eps / (1 - eps)``:
    ``grad_phi log(q a_e) = kappa grad_phi log q``. Equals ``1 - c``."""
    c: Float[Array, "*shape"]
    """``(1 - eps) a (1 - a) / a_e = d log a_e / d log p``."""
    log_ratio: Float[Array, "*shape"]
    """``A = lw - log a_e``, the log of ``p / (q a_e)``."""


def log_acceptance(
    log_weight: Float[Array, "*shape"], threshold: Float[Array, "*#shape"], epsilon: float
) -> Float[Array, "*shape"]:
    """``log a_e``; ``-inf`` with gradient zero where the log weight is not finite."""
    finite = jnp.isfinite(log_weight)
    # The inner `where` keeps non-finite values out of the branch that autodiff visits too.
    log_a = jax.nn.log_sigmoid(jnp.where(finite, log_weight, 0.0) + threshold)
    if epsilon > 0:
        log_a = jnp.logaddexp(math.log1p(-epsilon) + log_a, math.log(epsilon))
    return jnp.where(finite, log_a, -jnp.inf)


def evaluate(
    log_weight: Float[Array, "*shape"], threshold: Float[Array, "*#shape"], epsilon: float
) -> Acceptance:
    """All quantities of :class:`Acceptance`, safe for ``|lw|`` up to 1e6 in float32.

    None of the formulas subtracts two large numbers or forms 0/0: ``share`` and ``guard`` are
    the parts of ``a_e`` that come from the sigmoid and from the guardrail, ``share + guard = 1``.
    One exponential and one logarithm serve them all: this runs on every proposal.

    >>> import jax.numpy as jnp
    >>> from rvrs.core import acceptance
    >>> print(acceptance.evaluate(jnp.array([-1e6, 0.0, 1e6]), jnp.zeros(3), 0.0).probability)
    [0.  0.5 1. ]
    """
    finite = jnp.isfinite(log_weight)
    lw = jnp.where(finite, log_weight, 0.0)
    x = lw + threshold
    decay = jnp.exp(-jnp.abs(x))
    larger, smaller = 1 / (1 + decay), decay / (1 + decay)
    a, complement = jnp.where(x >= 0, larger, smaller), jnp.where(x >= 0, smaller, larger)
    log1p_decay = jnp.log1p(decay)
    if epsilon > 0:
        a_e = epsilon + (1 - epsilon) * a
        # Near 1 the logarithm comes from the distance to 1, which a_e itself has lost.
        log_a_e = jnp.where(a_e > 0.5, jnp.log1p(-(1 - epsilon) * complement), jnp.log(a_e))
        share, guard = (1 - epsilon) * a / a_e, epsilon / a_e
        log_ratio = lw - log_a_e
    else:
        a_e = a
        log_a_e = jnp.minimum(x, 0.0) - log1p_decay
        share, guard = jnp.ones_like(a), jnp.zeros_like(a)
        # exp(A) = exp(lw) + exp(-T): lw - log a would cancel completely for lw << -T.
        log_ratio = jnp.maximum(lw, -threshold) + log1p_decay
    zero = jnp.zeros_like(lw)
    return Acceptance(
        log_probability=jnp.where(finite, log_a_e, -jnp.inf),
        probability=jnp.where(finite, a_e, zero),
        sigmoid=jnp.where(finite, a, zero),
        kappa=jnp.where(finite, guard + share * a, zero),
        c=jnp.where(finite, share * complement, zero),
        log_ratio=jnp.where(finite, log_ratio, zero),
    )
