"""NumPyro distributions as proposals whose draws can be reproduced from stored noise.

Noise is what turns a distribution's parameters into a draw. It is standard normal where a normal
distribution is at the bottom, and that of :mod:`rvrs.guides._gamma` for Gamma, Beta and Dirichlet
distributions, so that one call draws it for all proposals; elsewhere, where NumPyro's samplers have
no explicit noise, it is a random key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from rvrs.core.problem import PRNGKey, PyTree
from rvrs.core.randomness import key_from_noise, noise_for_keys
from rvrs.guides import _gamma

Distributions = dict[str, Any]
"""Distributions by the names of their sites; trees of arrays as far as JAX is concerned."""


def sample_noise(
    rng_key: PRNGKey, shape: tuple[int, ...], distributions: Distributions
) -> dict[str, jax.Array]:
    """Noise of all sites with leading axes ``shape``.

    Only the structure of ``distributions`` matters; their parameters may have more axes.
    """
    keys = jax.random.split(rng_key, len(distributions))
    return {
        name: _noise_of(key, shape, fn)
        for key, (name, fn) in zip(keys, distributions.items(), strict=True)
    }


def _noise_of(rng_key: PRNGKey, shape: tuple[int, ...], fn: Any) -> jax.Array:
    kind = _kind(fn)
    if kind is dist.Normal:
        return jax.random.normal(rng_key, shape + fn.shape(), jnp.result_type(float))
    if kind is dist.Beta:
        return _gamma.sample_noise(rng_key, (*shape, *fn.shape(), 2))
    if kind in (dist.Gamma, dist.Dirichlet):
        return _gamma.sample_noise(rng_key, shape + fn.shape())
    return noise_for_keys(rng_key, shape)


def propose(
    distributions: Distributions, noise: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The draw that the noise stands for, and the sum of its log densities."""
    values, log_density = {}, jnp.zeros(())
    for name, fn in distributions.items():
        if _kind(fn) is not None:
            value, intermediates = _from_noise(fn, noise[name])
        else:
            value, intermediates = fn.sample_with_intermediates(key_from_noise(noise[name]))
        values[name] = value
        known = (intermediates,) if intermediates else ()
        log_density = log_density + jnp.sum(fn.log_prob(value, *known))
    return values, log_density


def log_density(distributions: Distributions, values: dict[str, PyTree]) -> jax.Array:
    """The sum of the log densities at given values."""
    return sum((jnp.sum(fn.log_prob(values[n])) for n, fn in distributions.items()), jnp.zeros(()))


def _kind(fn: Any) -> type | None:
    """Which of those with explicit noise it is, transformed, expanded or neither."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    if isinstance(fn, dist.TransformedDistribution):
        # A transform of a part of the event changes the number of coordinates.
        return _kind(fn.base_dist) if fn.base_dist.shape() == fn.shape() else None
    return type(fn) if type(fn) in _VALUES else None


def _from_noise(fn: Any, noise: jax.Array) -> tuple[jax.Array, list[Any]]:
    """The value at explicit noise, and what NumPyro calls its intermediates."""
    if isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        # Noise has the full shape, and shapes are aligned at the right.
        return _from_noise(fn.base_dist, noise)
    if isinstance(fn, dist.TransformedDistribution):
        value, intermediates = _from_noise(fn.base_dist, noise)[0], []
        for transform in fn.transforms:
            before = value
            value, known = transform.call_with_intermediates(before)
            intermediates.append([before, known])
        return jnp.asarray(value), intermediates
    return jnp.asarray(_VALUES[type(fn)](fn, noise)), []


def _normal(fn: Any, noise: jax.Array) -> jax.Array:
    return fn.loc + fn.scale * noise


def _gamma_value(fn: Any, noise: jax.Array) -> jax.Array:
    return jnp.exp(_gamma.log_gamma(fn.concentration, noise)) / fn.rate


def _beta(fn: Any, noise: jax.Array) -> jax.Array:
    first = _gamma.log_gamma(fn.concentration1, noise[..., 0, :])
    return _inside(jax.nn.sigmoid(first - _gamma.log_gamma(fn.concentration0, noise[..., 1, :])))


def _dirichlet(fn: Any, noise: jax.Array) -> jax.Array:
    return _inside(jax.nn.softmax(_gamma.log_gamma(fn.concentration, noise), axis=-1))


def _inside(probability: jax.Array) -> jax.Array:
    """Not rounded to 0 or 1, where the density may be none."""
    info = jnp.finfo(probability.dtype)
    return jnp.clip(probability, info.tiny, 1 - info.epsneg)


_VALUES = {
    dist.Normal: _normal,
    dist.Gamma: _gamma_value,
    dist.Beta: _beta,
    dist.Dirichlet: _dirichlet,
}
