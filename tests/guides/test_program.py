import jax
import jax.numpy as jnp
import numpy as np

from rvrs.guides._program import Programs


def counted():
    """A function of arrays and a flag, and a list that grows whenever it is traced."""
    traces = []

    def function(scale, x, arguments):
        (y,), options = arguments
        traces.append(options)
        return scale * x + (jnp.sum(y) if options["total"] else y[0])

    return function, traces


def test_array_values_are_inputs_and_everything_else_is_part_of_the_program():
    function, traces = counted()
    programs = Programs()
    for y in (np.array([1.0, 2.0]), np.array([3.0, 4.0]), jnp.array([5.0, 6.0])):
        got = programs.call(function, (2,), (jnp.float32(10.0),), ((y,), {"total": True}))
        assert float(got) == 20 + float(y.sum())
    assert len(traces) == 1
    got = programs.call(function, (2,), (jnp.float32(10.0),), ((y,), {"total": False}))
    assert float(got) == 25
    got = programs.call(function, (3,), (jnp.float32(10.0),), ((y,), {"total": False}))
    assert float(got) == 35
    assert len(traces) == 3


def test_a_function_that_needs_the_values_gets_them_at_every_call():
    def sized(x, arguments):
        return x + jnp.zeros(int(arguments.max()))

    programs = Programs()
    for size in (2, 5):
        assert programs.call(sized, (), (jnp.float32(1.0),), np.array([1, size])).shape == (size,)


def test_arguments_without_a_hash_are_taken():
    class Unhashable:
        __hash__ = None
        value = 3.0

    programs = Programs()
    got = programs.call(lambda x, thing: x * thing.value, (), (jnp.float32(2.0),), Unhashable())
    assert float(got) == 6


def test_programs_can_be_differentiated_and_mapped():
    programs = Programs()

    def square(x, y):
        return jnp.sum(x**2 * y)

    call = lambda x: programs.call(square, (), (x,), np.array([1.0, 2.0]))  # noqa: E731
    assert float(jax.grad(call)(jnp.float32(3.0))) == 18
    np.testing.assert_allclose(jax.vmap(call)(jnp.array([1.0, 2.0])), [3.0, 12.0])
