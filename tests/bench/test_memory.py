from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.bench import memory
from rvrs.bench.memory import Memory


def test_the_bytes_of_a_program_are_told_apart():
    def outer(x):
        return jnp.sort(x[:, None] * x, axis=0).sum(axis=0)

    small, large = (memory.of(outer, jnp.ones(size)) for size in (100, 200))
    assert (small.arguments, small.results) == (400, 400)
    assert small.temporary >= 4 * 100**2
    assert 3.5 < large.temporary / small.temporary < 4.5


def test_the_exponent_is_that_of_the_whole_range():
    found = {10: Memory(100, 1, 2), 100: Memory(100, 1, 2), 1000: Memory(10_000, 1, 2)}
    rows = memory._rows("work", found, {10: 5, 100: 5, 1000: 6})
    assert [row.figures["over the size before"] for row in rows] == [None, 1.0, 100.0]
    assert [row.figures["exponent"] for row in rows] == [None, None, pytest.approx(1.0)]
    assert [row.figures["resident peak"] for row in rows] == [1.0, 1.0, 1.2]
    assert rows[2].contestant == "1,000"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        memory.vi_sampler,
        pytest.param(
            memory.guide_sampler,
            marks=pytest.mark.xfail(reason="sites are made of all draws at once", strict=True),
        ),
    ],
)
def test_sampling_takes_no_more_temporary_memory_for_more_draws(sampler):
    # As users have it.
    jax.config.update("jax_disable_most_optimizations", False)
    found = sampler()

    def temporary(num_draws):
        draw = lambda key, state: found.draw(key, state, num_draws)  # noqa: E731
        return memory.of(draw, jax.random.key(0), found.state).temporary

    assert temporary(100_000) <= 1.01 * temporary(10_000)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell")
def test_the_peak_of_a_process_is_its_own():
    # More than the process may have.
    ballast = np.ones(250_000_000)
    kilobytes = memory.resident_peak(100)
    assert 10_000 < kilobytes < ballast.nbytes / 1024


@pytest.mark.slow
def test_a_quick_run_analyses_training_and_sampling():
    suite = memory.measure(quick=True, progress=lambda _: None)
    works = list(dict.fromkeys(row.work for row in suite.rows))
    assert works == [
        "training, dimension D",
        "training, targets B",
        "sampling by vi",
        "sampling by AutoRVRS",
    ]
    assert all(row.figures["temporary bytes"] > 0 for row in suite.rows)
