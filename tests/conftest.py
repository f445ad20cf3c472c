import gc

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """Forget what a file of tests has compiled.

    Every program is mapped into memory in several pieces, and Linux ends a process with more than
    65,530 of these: a thousand tests get there.
    """
    yield
    jax.clear_caches()
    gc.collect()
