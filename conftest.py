"""What holds for the tests and for the examples in docstrings."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def same_precision():
    """Leave JAX's precision as it was: PyTensor's bridge to JAX sets it for the whole process."""
    x64 = jax.config.read("jax_enable_x64")
    yield
    jax.config.update("jax_enable_x64", x64)
