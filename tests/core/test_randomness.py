import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.core.randomness import unrolled

USES = {
    "bits": lambda key: jax.random.bits(key, (3, 5)),
    "one number": lambda key: jax.random.bits(key, ()),
    "bytes": lambda key: jax.random.bits(key, (7,), jnp.uint8),
    "normal": lambda key: jax.random.normal(key, (4, 1, 17)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, (3, 2))),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 77)),
    "gamma": lambda key: jax.random.gamma(key, 0.3, (5,)),
    "vmap": lambda key: jax.vmap(lambda key: jax.random.normal(key, (4,)))(
        jax.random.split(key, 3)
    ),
}


@pytest.mark.parametrize("new_key", [jax.random.key, jax.random.PRNGKey])
def test_numbers_are_those_of_jax_bit_for_bit(new_key):
    @jax.jit
    def both(key):
        return [{name: use(k) for name, use in USES.items()} for k in (unrolled(key), key)]

    for seed in (0, 1, 2**31 - 1):
        ours, theirs = both(new_key(seed))
        for name in USES:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_numbers_of_64_bits_too():
    with jax.enable_x64():
        key = jax.random.key(5)
        expected = jax.random.normal(key, (9,), jnp.float64)
        np.testing.assert_array_equal(jax.random.normal(unrolled(key), (9,), jnp.float64), expected)


def test_keys_of_other_generators_are_left_alone():
    key = jax.random.key(0, impl="rbg")
    assert unrolled(key) is key


def test_keys_are_left_alone_where_jax_splits_them_the_old_way():
    key = jax.random.key(0)
    with jax.threefry_partitionable(False):
        assert unrolled(key) is key


def test_numbers_read_in_several_places_are_computed_in_one():
    def program(key):
        noise = jax.random.normal(unrolled(key), (20, 17))
        return noise, jnp.sum(noise**2, axis=1), noise[jnp.argmax(noise[:, 0])]

    text = jax.jit(program).lower(jax.random.key(0)).compile().as_text()
    computations = re.split(r"\n\n", text)
    # Twenty rounds have a dozen exclusive-ors at the least.
    assert sum(computation.count(" xor(") > 12 for computation in computations) == 1
    assert " while(" not in text
