"""How many examples hypothesis draws, and where the draws come from."""

import contextlib

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck, given

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


def effort(quick, long):
    """A parameter ``effort``: few examples in each run, and many by ``make test-slow``."""
    parameters = [quick, pytest.param(long, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("effort", parameters, ids=["quick", "long"])


EFFORT = effort(QUICK, LONG)


def checked(effort, **drawn):
    """Run the decorated function on examples, as many as the effort says."""
    return lambda function: effort(given(**drawn)(function))()


@contextlib.contextmanager
def precision(dtype):
    """Strict, so that no operation changes the type of what it was given."""
    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def quick_compilation():
    """Programs here run once or twice: compiling them is what takes the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
