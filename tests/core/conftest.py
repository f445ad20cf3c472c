import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Mixing dtypes silently is how a float32 program turns into a float64 one, or the reverse."""
    with jax.numpy_dtype_promotion("strict"):
        yield
