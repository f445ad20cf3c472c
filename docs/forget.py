"""What the site's build does between pages that run code."""

import gc
from typing import Any

import jax


def compiled_programs(*_: Any) -> None:
    """Forget what a page has compiled, which would otherwise take gigabytes by the last one."""
    jax.clear_caches()
    gc.collect()
