"""Gamma draws as a function of their shape and of explicit noise, with implicit gradients.

JAX's own sampler makes its random numbers inside a loop, from a key of every draw, which takes
twenty times as long as all else about a proposal. Here a draw has the random numbers of a few
attempts of the method of Marsaglia and Tsang (2000), each of which succeeds with a probability of
at least 0.95, and is NaN if none does: a proposal that is rejected. As success says nothing about
the value, the others are exact draws.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import digamma

from rvrs.core.problem import PRNGKey

_ATTEMPTS = 4
NOISE = 2 * _ATTEMPTS + 1
"""Length of the last axis of noise."""


def sample_noise(rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Noise ``(*shape, NOISE)``: a normal and an exponential variable per attempt, and one more."""
    keys = jax.random.split(rng_key)
    dtype = jnp.result_type(float)
    normal = jax.random.normal(keys[0], (*shape, _ATTEMPTS), dtype)
    exponential = jax.random.exponential(keys[1], (*shape, _ATTEMPTS + 1), dtype)
    return jnp.concatenate([normal, exponential], axis=-1)


@jax.custom_jvp
def log_gamma(shape: Array, noise: Array) -> Array:
    """The logarithm of a Gamma(shape, 1) draw; the shape broadcasts against all axes but the last.

    Its derivative with respect to the shape is that of a quantile.
    """
    # A draw of Gamma(a) is one of Gamma(a + 1) times U^(1/a).
    small = shape < 1
    d = jnp.where(small, shape + 1, shape) - 1 / 3
    log_v = jnp.full(jnp.broadcast_shapes(jnp.shape(shape), noise.shape[:-1]), jnp.nan, noise.dtype)
    for attempt in reversed(range(_ATTEMPTS)):
        x, exponential = noise[..., attempt], noise[..., _ATTEMPTS + attempt]
        root = 1 + x / jnp.sqrt(9 * d)
        log_root = jnp.log(jnp.where(root > 0, root, 1.0))
        bound = x**2 / 2 + d * (1 - root**3 + 3 * log_root)
        # The first attempt that succeeds counts, so it comes last.
        log_v = jnp.where((root > 0) & (-exponential < bound), 3 * log_root, log_v)
    boost = jnp.where(small, -noise[..., -1] / jnp.where(small, shape, 1.0), 0.0)
    return jnp.log(d) + log_v + boost


@log_gamma.defjvp
def _log_gamma_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    shape, noise = primals
    value = log_gamma(shape, noise)
    full = jnp.broadcast_to(shape, value.shape)
    # Where the draw itself would underflow, its distribution function is z^a / Gamma(a + 1).
    tiny = ~(value > jnp.log(jnp.finfo(value.dtype).tiny) / 2)
    z = jnp.exp(jnp.where(tiny, 0.0, value))
    implicit = lax.random_gamma_grad(full, z) / z  # pyright: ignore (its arguments are not typed)
    slope = jnp.where(tiny, (digamma(full + 1) - value) / full, implicit)
    # A failed draw is never accepted; nor may it spoil the gradient of those that are.
    slope = jnp.where(jnp.isnan(value), 0.0, slope)
    return value, slope * tangents[0]
