"""The random numbers of ``jax.random``, bit for bit, at a fraction of the cost on CPUs.

JAX's default generator, Threefry-2x32 (Salmon et al., 2011), is compiled for CPUs as a loop over
its rounds, whose every pass moves arrays about. For the few hundred numbers of a block of proposals
these moves cost more than all the arithmetic. Written out, the twenty rounds are one operation.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import define_prng_impl

from rvrs.core.problem import PRNGKey, PyTree


def unrolled(rng_key: PRNGKey) -> PRNGKey:
    """The key that gives the same numbers faster; keys of other generators as they are."""
    # What splitting gives depends on this flag; our form is that of its default.
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return rng_key
    if str(jax.random.key_impl(rng_key)) != "threefry2x32":
        return rng_key
    return jax.random.wrap_key_data(jax.random.key_data(rng_key), impl=_UNROLLED)


def noise_for_keys(rng_key: PRNGKey, shape: tuple[int, ...], _: PyTree = None) -> jax.Array:
    """Noise of distributions that can only be drawn with keys: the data of fresh keys.

    Any random bits will do.
    """
    return jax.random.bits(rng_key, (*shape, 2), jnp.uint32)


def key_from_noise(noise: jax.Array) -> PRNGKey:
    """The key that such noise stands for."""
    return jax.random.wrap_key_data(noise, impl="threefry2x32")


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def _threefry(key: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encrypt a counter: twenty rounds, with words of the key added after every fourth."""
    words = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    # The counter's high word is always 0.
    x, y = jnp.broadcast_to(words[0], counter.shape), counter + words[1]
    for injection in range(1, 6):
        for by in _ROTATIONS[(injection - 1) % 2]:
            x = x + y
            y = x ^ ((y << by) | (y >> (32 - by)))
        x = x + words[injection % 3]
        y = y + words[(injection + 1) % 3] + injection
    return x, y


def _materialized(function: Callable[[jax.Array], jax.Array], key: jax.Array) -> jax.Array:
    """``function(key)``, computed once and stored.

    The compiler takes integer arithmetic for cheap and repeats it in every operation that reads
    the numbers. It does not look into the branches of a condition, so here is one that it cannot
    know to be true: no square is 3 modulo 8.
    """
    result = jax.eval_shape(function, key)
    always = (key[0] * key[0]) % 8 != 3
    return lax.cond(always, function, lambda _: jnp.zeros(result.shape, result.dtype), key)


def _counter(shape: tuple[int, ...]) -> jax.Array:
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"{size} random numbers are too many for one call; draw in chunks.")
    return lax.iota(jnp.uint32, size).reshape(shape)


def _seed(seed: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _materialized(lambda key: jnp.stack(_threefry(key, _counter(shape)), axis=-1), key)


def _fold_in(key: jax.Array, data: int | jax.Array) -> jax.Array:
    return jnp.stack(_threefry(key, jnp.asarray(data, jnp.uint32)))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    def bits(key: jax.Array) -> jax.Array:
        high, low = _threefry(key, _counter(shape))
        if bit_width == 64:
            return (high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64)
        return (high ^ low).astype(f"uint{bit_width}")

    return _materialized(bits, key)


_UNROLLED = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_unrolled",
    tag="utf",
)
