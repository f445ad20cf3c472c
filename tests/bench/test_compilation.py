import jax
import jax.numpy as jnp
import pytest

from rvrs.bench import compilation


def test_programs_are_counted_inside_only():
    x = jnp.ones(3)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(x))
    with compilation.counted() as count:
        function = jax.jit(lambda x: x * 3 + 1)
        function(x)
        assert count() == 1
        function(x)
        assert count() == 1
    jax.block_until_ready(jax.jit(lambda x: x + 2)(x))
    assert count() == 1


def test_a_second_run_that_compiles_again_is_found_out():
    steady = jax.jit(lambda key: jax.random.uniform(key) * 2)
    first, second = compilation.programs_compiled(steady)
    assert (first > 0, second) == (True, 0)
    forgetful = lambda key: jax.jit(lambda key: jax.random.uniform(key))(key)  # noqa: E731
    assert compilation.programs_compiled(forgetful)[1] > 0


@pytest.mark.slow
def test_a_second_run_of_the_product_compiles_nothing():
    suite = compilation.measure(quick=True, progress=lambda _: None)
    counts = [
        row.figures["programs, second run"]
        for row in suite.rows
        if "programs, second run" in row.figures
    ]
    assert counts == [0, 0]
    assert suite.rows[0].figures["to the first step"] > 0


@pytest.mark.slow
def test_a_second_run_of_a_guide_with_local_latents_compiles_nothing():
    product, _ = compilation._semi(40, 2)
    assert compilation.programs_compiled(product.run())[1] == 0
