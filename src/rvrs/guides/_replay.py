"""NumPyro distributions as proposals whose draws can be reproduced from stored noise.

Noise is what turns a distribution's parameters into a draw. It is standard normal where a normal
distribution is at the bottom, so that one call draws it for all proposals; elsewhere, where
NumPyro's samplers have no explicit noise, it is a random key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from rvrs.core.problem import PRNGKey, PyTree

Distributions = dict[str, Any]
"""Distributions by the names of their sites; trees of arrays as far as JAX is concerned."""

_KEY_KIND = "threefry2x32"


def sample_noise(
    rng_key: PRNGKey, shape: tuple[int, ...], distributions: Distributions
) -> dict[str, jax.Array]:
    """Noise of all sites with leading axes ``shape``.

    Only the structure of ``distributions`` matters; their parameters may have more axes.
    """
    keys = jax.random.split(rng_key, len(distributions))
    return {
        name: jax.random.normal(key, shape + fn.shape(), jnp.result_type(float))
        if _is_normal(fn)
        # Any random bits are the data of a key.
        else jax.random.bits(key, (*shape, 2), jnp.uint32)
        for key, (name, fn) in zip(keys, distributions.items(), strict=True)
    }


def propose(
    distributions: Distributions, noise: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The draw that the noise stands for, and the sum of its log densities."""
    values, log_density = {}, jnp.zeros(())
    for name, fn in distributions.items():
        if _is_normal(fn):
            value, intermediates = _from_normal(fn, noise[name])
        else:
            key = jax.random.wrap_key_data(noise[name], impl=_KEY_KIND)
            value, intermediates = fn.sample_with_intermediates(key)
        values[name] = value
        known = (intermediates,) if intermediates else ()
        log_density = log_density + jnp.sum(fn.log_prob(value, *known))
    return values, log_density


def log_density(distributions: Distributions, values: dict[str, PyTree]) -> jax.Array:
    """The sum of the log densities at given values."""
    return sum((jnp.sum(fn.log_prob(values[n])) for n, fn in distributions.items()), jnp.zeros(()))


def _is_normal(fn: Any) -> bool:
    """Whether it is a normal distribution, transformed, expanded or neither."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    if isinstance(fn, dist.TransformedDistribution):
        # A transform of a part of the event changes the number of coordinates.
        return fn.base_dist.shape() == fn.shape() and _is_normal(fn.base_dist)
    return type(fn) is dist.Normal


def _from_normal(fn: Any, noise: jax.Array) -> tuple[jax.Array, list[Any]]:
    """The value at standard normal noise, and what NumPyro calls its intermediates."""
    if isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        # Noise has the full shape, and shapes are aligned at the right.
        return _from_normal(fn.base_dist, noise)
    if isinstance(fn, dist.TransformedDistribution):
        value, intermediates = _from_normal(fn.base_dist, noise)[0], []
        for transform in fn.transforms:
            before = value
            value, known = transform.call_with_intermediates(before)
            intermediates.append([before, known])
        return jnp.asarray(value), intermediates
    return jnp.asarray(fn.loc + fn.scale * noise), []
