"""How many examples hypothesis draws, and where the draws come from."""

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck

# The same examples in every run, and no limit on their time, most of which is compilation. There
# is no database of failures: with fixed examples it would hold what the next run finds anyway.
_COMMON = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    "print_blob": False,
}
QUICK = hypothesis.settings(max_examples=30, **_COMMON)
LONG = hypothesis.settings(QUICK, max_examples=500)


@pytest.fixture(autouse=True)
def quick_compilation():
    """Programs here run once or twice: compiling them is what takes the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
