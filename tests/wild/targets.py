"""Targets that break samplers, each with what is known about it.

Every target is a log density over flat unconstrained vectors. Log evidences are closed forms, or
quadratures in double precision; in one dimension all that there is to know about ``r`` is found by
quadrature too. Those targets are also branches of one density, so that one program does for all of
them: compiling is what takes the time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from scipy import special, stats


@dataclass(frozen=True, eq=False)
class Target:
    name: str
    log_density: Callable[[jax.Array], jax.Array]
    start: tuple[float, ...]
    """A position of finite density."""
    log_evidence: float
    grid: np.ndarray | None = None
    """In one dimension: points that show all of the density's details."""


def normal(z: jax.Array) -> jax.Array:
    return -0.5 * jnp.sum(z**2 + math.log(2 * math.pi))


def cauchy(z: jax.Array) -> jax.Array:
    return -jnp.sum(jnp.log1p(z**2) + math.log(math.pi))


# An observation of noise 1 that a horseshoe prior explains by a large coefficient or by noise.
_OBSERVED = 3.0


def horseshoe(z: jax.Array) -> jax.Array:
    """Logs of the global and the local scale, and the coefficient, not decentered."""
    log_scale = z[0] + z[1]
    half_cauchy = jnp.log(2 / math.pi) + z[:2] - jnp.logaddexp(0.0, 2 * z[:2])
    coefficient = normal(z[2:] * jnp.exp(-log_scale)) - log_scale
    return jnp.sum(half_cauchy) + coefficient + normal(z[2:] - _OBSERVED)


def _horseshoe_log_evidence() -> float:
    log_scale = np.linspace(-40, 40, 2001)
    prior = stats.halfcauchy.pdf(np.exp(log_scale)) * np.exp(log_scale)
    variance = 1 + np.exp(2 * (log_scale[:, None] + log_scale))
    likelihood = stats.norm.pdf(_OBSERVED, scale=np.sqrt(variance))
    return float(np.log(prior @ likelihood @ prior * (log_scale[1] - log_scale[0]) ** 2))


def at_the_edge(z: jax.Array) -> jax.Array:
    """An exponential distribution: nothing left of 0, and the most right there."""
    return jnp.sum(jnp.where(z >= 0, -5 * z, -jnp.inf))


# Beta(0.3, 0.3) over a logit: its mass is near 0 and 1, where the logit has long tails.
_SHAPE = 0.3


def both_edges(z: jax.Array) -> jax.Array:
    return jnp.sum(_SHAPE * z - 2 * _SHAPE * jax.nn.softplus(z) - special.betaln(_SHAPE, _SHAPE))


def half_missing(z: jax.Array) -> jax.Array:
    """A normal distribution without its left half."""
    return jnp.sum(jnp.where(z > 0, -0.5 * z**2 - 0.5 * math.log(2 * math.pi), -jnp.inf))


_JUMP = 3.0


def jump(z: jax.Array) -> jax.Array:
    """A normal density that is e^3 times as large right of 0.5."""
    return normal(z) + _JUMP * jnp.sum(z > 0.5)


def offset(z: jax.Array) -> jax.Array:
    """A normal density times e^1e6, so that its logarithm has no digits left in float32."""
    return normal(z) + 1e6


def needle(z: jax.Array) -> jax.Array:
    """A normal distribution a thousand times as narrow: its log density falls to -1e6 within 1."""
    return normal(1e3 * (z - 0.3)) + math.log(1e3)


def far_modes(z: jax.Array) -> jax.Array:
    return jnp.logaddexp(normal(z - 20), normal(z + 20)) - math.log(2)


_FUNNEL_DIMENSION = 50


def funnel(z: jax.Array) -> jax.Array:
    return (
        normal(z[:1] / 3)
        - math.log(3)
        + normal(z[1:] * jnp.exp(-z[0] / 2))
        - ((_FUNNEL_DIMENSION - 1) * z[0] / 2)
    )


def sprinkled_nan(z: jax.Array) -> jax.Array:
    """NaN at one percent of all points, in a thousand places."""
    bad = jnp.mod(37 * z, 1.0) < 0.01
    return jnp.sum(jnp.where(bad, jnp.nan, -0.5 * z**2 - 0.5 * math.log(2 * math.pi)))


def overflow(z: jax.Array) -> jax.Array:
    """The logarithm of a Gamma(2) variable; overflows at 89, and its gradient with it."""
    return jnp.sum(2 * z - jnp.exp(z))


def no_gradient(z: jax.Array) -> jax.Array:
    """A normal density in value; left of 0 its derivative is NaN, by JAX's rules for ``where``."""
    return normal(z) + jnp.sum(jnp.where(z > 0, 0 * jnp.sqrt(z), 0.0))


def _around_zero(half_width: float) -> np.ndarray:
    return np.linspace(-half_width, half_width, 400_001)


CAUCHY = Target("Cauchy", cauchy, (0.5,), 0.0, _around_zero(100))
HORSESHOE = Target("horseshoe", horseshoe, (0.0, 0.0, 1.0), _horseshoe_log_evidence())
AT_THE_EDGE = Target("mass at the edge", at_the_edge, (0.1,), -math.log(5), _around_zero(8))
BOTH_EDGES = Target("mass at both edges", both_edges, (0.0,), 0.0, _around_zero(100))
HALF_MISSING = Target("half is -inf", half_missing, (0.01,), -math.log(2), _around_zero(10))
JUMP = Target(
    "discontinuity",
    jump,
    (0.0,),
    float(np.log1p(np.expm1(_JUMP) * stats.norm.sf(0.5))),
    _around_zero(10),
)
OFFSET = Target("log density of 1e6", offset, (0.0,), 1e6, _around_zero(10))
NEEDLE = Target("log density of -1e6", needle, (0.0,), 0.0, np.linspace(0.29, 0.31, 100_001))
FAR_MODES = Target("far modes", far_modes, (0.5,), 0.0, _around_zero(60))
FUNNEL = Target("funnel", funnel, (0.0,) * _FUNNEL_DIMENSION, 0.0)
SPRINKLED_NAN = Target("NaN at 1 %", sprinkled_nan, (0.01,), math.log(0.99), _around_zero(10))
OVERFLOW = Target("overflow", overflow, (0.0,), 0.0, np.linspace(-60, 8, 400_001))
NO_GRADIENT = Target("no gradient", no_gradient, (0.5,), 0.0, _around_zero(10))

ONE_DIMENSIONAL = (
    CAUCHY,
    AT_THE_EDGE,
    BOTH_EDGES,
    HALF_MISSING,
    JUMP,
    OFFSET,
    NEEDLE,
    FAR_MODES,
    SPRINKLED_NAN,
    OVERFLOW,
    NO_GRADIENT,
)


def one_of(targets: tuple[Target, ...], which: jax.Array, z: jax.Array) -> jax.Array:
    """The log density of one of some targets, by its number."""
    return jax.lax.switch(which, [target.log_density for target in targets], z)


def one_of_them(which: jax.Array, z: jax.Array) -> jax.Array:
    """The log density of one of the targets in one dimension."""
    return one_of(ONE_DIMENSIONAL, which, z)


def model_of_one(which: jax.Array) -> None:
    """The same as a NumPyro model."""
    z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), (1,)))
    numpyro.factor("target", one_of_them(which, z))


def model_of(target: Target) -> Callable[[], None]:
    """A NumPyro model of a target of any dimension."""

    def model() -> None:
        shape = (len(target.start),)
        z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), shape))
        numpyro.factor("target", target.log_density(z))

    return model


class Exact(NamedTuple):
    """What quadrature knows about ``r``."""

    elbo: float
    log_normalizer: float
    log_evidence_error: float
    """The standard error of the log evidence from one proposal; a lower bound, since the tails
    that it may be infinite for lie outside of the grid."""
    z: np.ndarray
    cdf: np.ndarray


def quadrature(target: Target, loc: float, scale: float, t: float, epsilon: float) -> Exact:
    """For a normal proposal and T; in float64 and without the package."""
    assert target.grid is not None
    z = np.union1d(target.grid, loc + scale * np.linspace(-10, 10, 20_001))
    with jax.enable_x64():
        log_p = np.asarray(jax.jit(jax.vmap(target.log_density))(jnp.asarray(z)[:, None]))
    log_q = stats.norm.logpdf(z, loc, scale)
    log_p = np.where(np.isfinite(log_p), log_p, -np.inf)
    lw = log_p - log_q
    log_a = np.where(lw > -np.inf, -np.logaddexp(0, -(lw + t)), -np.inf)
    if epsilon > 0:
        log_a = np.logaddexp(log_a + math.log1p(-epsilon), math.log(epsilon))
        log_a[lw == -np.inf] = -np.inf
    cell = np.gradient(z)
    mass = np.exp(log_q + log_a) * cell
    inside = mass > 0
    normalizer = mass.sum()
    log_ratio = (lw[inside] - log_a[inside]) @ mass[inside] / normalizer
    relative = np.exp(log_p - target.log_evidence)
    square = np.exp(np.minimum(2 * (log_p - target.log_evidence) - log_q, 300)) @ cell
    return Exact(
        elbo=float(log_ratio + np.log(normalizer)),
        log_normalizer=float(np.log(normalizer)),
        log_evidence_error=math.sqrt(max(0.0, square - (relative @ cell) ** 2)),
        z=z,
        cdf=np.cumsum(mass) / normalizer,
    )


def rounding(value: float) -> float:
    """What float32 may add to sums of numbers of this size."""
    return 2 * float(np.spacing(np.float32(abs(value)))) + 1e-5


def few(targets: tuple[Target, ...], quick: tuple[Target, ...]) -> pytest.MarkDecorator:
    """All targets one by one, of which ``make test`` has the quick ones only."""
    return pytest.mark.parametrize(
        "target",
        [
            pytest.param(
                target, id=target.name, marks=() if target in quick else (pytest.mark.slow,)
            )
            for target in targets
        ],
    )
