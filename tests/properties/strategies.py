"""What hypothesis draws: legal values over their whole range, and wrong ones of every kind."""

import functools
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

NUM_WEIGHTS, NUM_TARGETS = 16, 3
"""Of arrays whose shape does not matter: one shape means one compilation of every operation."""

DTYPES = st.sampled_from(["float32", "float64"])

# Densities of real models differ by much more than the exponential of a float can hold.
_LARGEST_WEIGHT = 1e6
_FINITE_WEIGHTS = st.one_of(
    st.floats(-30, 30, width=32),
    st.floats(-_LARGEST_WEIGHT, _LARGEST_WEIGHT, width=32),
    st.sampled_from([0.0, -0.0, _LARGEST_WEIGHT, -_LARGEST_WEIGHT]),
)
_ANY_WEIGHTS = st.one_of(_FINITE_WEIGHTS, st.sampled_from([math.inf, -math.inf, math.nan]))

THRESHOLDS = st.one_of(
    st.floats(-30, 30, width=32),
    st.floats(-1e30, 1e30),
    st.sampled_from([0.0, 1e30, -1e30, math.inf, -math.inf]),
)
ACCEPTANCES = st.one_of(
    st.floats(1e-6, 1.0),
    st.sampled_from([1.0, 0.5, 0.1, 0.01, 1e-6, 1 - 1e-9, float(np.nextafter(1.0, 0.0))]),
)
EPSILONS = st.one_of(
    st.just(0.0), st.floats(1e-12, 1, exclude_max=True), st.sampled_from([1e-300, 1e-4, 1 - 1e-9])
)
SEEDS = st.integers(0, 2**31 - 1)


def weights(finite: bool = False, rows: int = NUM_WEIGHTS) -> st.SearchStrategy[np.ndarray]:
    """Log weights ``(rows, NUM_TARGETS)``, of which some may not be finite."""
    size = rows * NUM_TARGETS
    values = st.lists(_FINITE_WEIGHTS if finite else _ANY_WEIGHTS, min_size=size, max_size=size)
    return values.map(lambda drawn: np.reshape(drawn, (rows, NUM_TARGETS)))


def thresholds(size: int = NUM_TARGETS) -> st.SearchStrategy[np.ndarray]:
    """One T for each of some targets."""
    return st.lists(THRESHOLDS, min_size=size, max_size=size).map(np.asarray)


@st.composite
def acceptance_and_epsilon(draw: st.DrawFn) -> tuple[float, float]:
    """Z from near 0 to 1, and a guardrail from 0 to just below it."""
    z = draw(ACCEPTANCES)
    epsilon = draw(
        st.one_of(
            st.sampled_from([0.0, 1e-4 * z, float(np.nextafter(z, 0.0))]),
            st.floats(0, z, exclude_max=True),
        )
    )
    return z, epsilon


def cast(array: np.ndarray, dtype: str) -> jnp.ndarray:
    """As an array of a type whose x64 mode is on; T beyond it is infinite there."""
    with np.errstate(over="ignore"):
        return jnp.asarray(np.asarray(array).astype(dtype))


class Traced(NamedTuple):
    """Stands for a value that JAX is tracing, by ``jit`` or by ``vmap``."""

    dtype: str
    mapped: bool

    def call(self, function: Callable[[Any], Any]) -> None:
        """Call a function of it."""

        def trace(value):
            function(value)
            return value

        if self.mapped:
            jax.vmap(trace)(jnp.ones(2, self.dtype))
        else:
            jax.eval_shape(trace, jax.ShapeDtypeStruct((), self.dtype))


class Drawn:
    """Any value, even one that cannot be printed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        try:
            return repr(self.value)
        except Exception:
            return f"a value of type {type(self.value).__name__}"


class Unprintable:
    """As of a class with a bug, which no message may fall over."""

    def __repr__(self) -> str:
        raise RuntimeError


_UNPRINTABLE = Unprintable()
_PLAIN = (
    *(None, True, False, "", "2", "0.5", "auto", "no such word", "x" * 10_000, b"2"),
    *((), (1,), (0,), (-1, 2), (2.5,), [], [1, 2], [[1], [1, 2]], {}, {"a": 1}, {1: 2}, {3}),
    *(0, -1, 1, 2, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400), 10**5000),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 2.0, 1e300, math.nan, math.inf, -math.inf, 1j),
    *(Fraction(1, 2), Decimal("0.5"), object(), _UNPRINTABLE, int, len, range(3), slice(1)),
    *(np.float64(0.5), np.float64("nan"), np.float32(0.5), np.int64(2), np.bool_(True)),
    *(np.array(2), np.array(0.5), np.array([1, 2]), np.zeros(0), np.zeros((2, 3))),
    *(np.array("text"), np.array([None, 1]), np.datetime64("2020-01-01"), np.ma.masked),
    *(Traced(d, m) for d in ("int32", "float32", "bool") for m in (True, False)),
)


@functools.cache
def _arrays() -> tuple[Any, ...]:
    # Made once they are needed, since the first array starts JAX.
    kinds = ("int32", "float32", "bfloat16", "float16", "bool", "complex64")
    arrays = [jnp.ones(shape, kind) for kind in kinds for shape in ((), 2)]
    return (*arrays, jax.random.key(0), jax.random.split(jax.random.key(0)), jnp.zeros(0))


def odd() -> tuple[Drawn, ...]:
    """Values of every kind that somebody might pass."""
    return tuple(map(Drawn, (*_PLAIN, *_arrays())))


def other_than(legal: Callable[[Any], bool]) -> st.SearchStrategy[Drawn]:
    """Values of every kind but those that are legal; a traced one is never a setting."""
    numbers = st.one_of(st.integers(), st.floats(), st.text(max_size=5)).map(Drawn)
    return st.one_of(st.deferred(lambda: st.sampled_from(odd())), numbers).filter(
        lambda drawn: isinstance(drawn.value, Traced) or not legal(drawn.value)
    )
