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
    shifted = jnp.where(finite, log_weight, 0.0) + threshold
    return jnp.where(finite, _add_guardrail(jax.nn.log_sigmoid(shifted), epsilon), -jnp.inf)


def evaluate(
    log_weight: Float[Array, "*shape"], threshold: Float[Array, "*#shape"], epsilon: float
) -> Acceptance:
    """All quantities of :class:`Acceptance`, safe for ``|lw|`` up to 1e6 in float32.

    None of the formulas subtracts two large numbers or forms 0/0: ``share`` and ``guard`` are
    the parts of ``a_e`` that come from the sigmoid and from the guardrail, ``share + guard = 1``.
    """
    finite = jnp.isfinite(log_weight)
    lw = jnp.where(finite, log_weight, 0.0)
    log_a = jax.nn.log_sigmoid(lw + threshold)
    a = jnp.exp(log_a)
    log_a_e = _add_guardrail(log_a, epsilon)
    if epsilon > 0:
        share = jnp.exp(math.log1p(-epsilon) + log_a - log_a_e)
        guard = jnp.exp(math.log(epsilon) - log_a_e)
        log_ratio = lw - log_a_e
    else:
        share = jnp.ones_like(a)
        guard = jnp.zeros_like(a)
        # exp(A) = exp(lw) + exp(-T): lw - log a would cancel completely for lw << -T.
        log_ratio = jnp.logaddexp(lw, -threshold)
    c = share * jax.nn.sigmoid(-(lw + threshold))
    kappa = guard + share * a
    zero = jnp.zeros_like(lw)
    return Acceptance(
        log_probability=jnp.where(finite, log_a_e, -jnp.inf),
        sigmoid=jnp.where(finite, a, zero),
        kappa=jnp.where(finite, kappa, zero),
        c=jnp.where(finite, c, zero),
        log_ratio=jnp.where(finite, log_ratio, zero),
    )


def _add_guardrail(log_a: Float[Array, "*shape"], epsilon: float) -> Float[Array, "*shape"]:
    """``log(eps + (1 - eps) a)``."""
    if epsilon == 0:
        return log_a
    return jnp.logaddexp(math.log1p(-epsilon) + log_a, math.log(epsilon))
