from pathlib import Path

import jax
import pytest

CORE = Path(__file__).parent / "core"


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Compile for little time where that is what a test spends: anywhere but in the core.

    The core's tests draw millions of proposals, for which optimised code pays.
    """
    quick = CORE not in request.path.parents
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
