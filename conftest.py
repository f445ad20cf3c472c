"""What holds for the tests and for the examples in docstrings."""

from pathlib import Path

import jax
import pytest

CORE = Path(__file__).parent / "tests" / "core"


@pytest.fixture(autouse=True, scope="module")
def same_precision():
    """Leave JAX's precision as it was: PyTensor's bridge to JAX sets it for the whole process."""
    x64 = jax.config.read("jax_enable_x64")
    yield
    jax.config.update("jax_enable_x64", x64)


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Compile for little time where that is what a test spends: anywhere but in the core.

    The core's tests draw millions of proposals, for which optimised code pays.
    """
    quick = CORE not in request.path.parents
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
