"""What hypothesis draws: legal values over their whole range, and wrong ones of every kind."""

import math

import hypothesis.strategies as st
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
