import jax
import pytest

from rvrs.bench import growth
from rvrs.bench.growth import Axis


def test_the_exponent_of_linear_growth_is_one():
    axis = Axis("size", (2, 4, 8), lambda size, num_steps: None)
    # The second turn was twice as slow as the first.
    times = {"2": [1.0, 2.0], "4": [2.0, 4.0], "8": [4.0, 8.0]}
    rows = growth._rows(axis, times, dict.fromkeys(times, 10))
    assert [row.contestant for row in rows] == ["2", "4", "8"]
    assert [row.figures["over half the size"] for row in rows] == [None, 2.0, 2.0]
    assert [row.figures["exponent"] for row in rows] == [None, None, pytest.approx(1.0)]


@pytest.mark.parametrize("quick", [True, False])
def test_every_size_is_twice_the_one_before(quick):
    for axis in growth.axes(quick=quick):
        assert all(2 * one == other for one, other in zip(axis.sizes, axis.sizes[1:], strict=False))
        assert len(axis.sizes) > (1 if quick else 4)


@pytest.mark.slow
def test_a_step_for_many_targets_moves_all_of_them():
    program = growth.targets_program(8, 3)
    parameters, _ = jax.jit(program.function)(jax.random.key(0), program.state)
    assert bool((parameters["local"].loc != program.state[0]["local"].loc).all())


@pytest.mark.slow
def test_a_quick_run_times_two_sizes_of_each_kind():
    suite = growth.measure(quick=True, progress=lambda _: None)
    assert [(row.work, row.contestant) for row in suite.rows] == [
        ("dimension D", "16"),
        ("dimension D", "32"),
        ("targets B", "32"),
        ("targets B", "64"),
    ]
    assert all(row.figures["µs per step"] > 0 for row in suite.rows)
