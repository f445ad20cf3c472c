import gc
from pathlib import Path

import jax
import pytest

CORE = Path(__file__).parent / "core"


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """Forget what a file of tests has compiled.

    Every program is mapped into memory in several pieces, and Linux ends a process with more than
    65,530 of these: a thousand tests get there.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Compile for little time where that is what a test spends: anywhere but in the core.

    The core's tests draw millions of proposals, for which optimised code pays.
    """
    quick = CORE not in request.path.parents
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
