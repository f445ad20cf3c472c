"""Checks of user arguments: each raises a ValueError that names the argument and the remedy."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp


def check_target_acceptance(target_acceptance: Any, epsilon: float) -> None:
    """``epsilon < target_acceptance <= 1``."""
    if not _is_number(target_acceptance) or not 0 < target_acceptance <= 1:
        raise ValueError(
            f"target_acceptance must be a number in (0, 1], got {target_acceptance!r}; 1 is "
            "ordinary variational inference, 0.1 makes ten proposals per draw."
        )
    if target_acceptance <= epsilon:
        raise ValueError(
            f"target_acceptance={target_acceptance} cannot be reached with epsilon={epsilon}, "
            "which is the least acceptance probability of any proposal; lower epsilon below it."
        )


def check_epsilon(epsilon: Any) -> None:
    """``0 <= epsilon < 1``."""
    if not _is_number(epsilon) or not 0 <= epsilon < 1:
        raise ValueError(
            f"epsilon must be a number in [0, 1), got {epsilon!r}; use 0 for no guardrail or a "
            "small number such as 1e-4."
        )


def check_num_samples(num_samples: Any, baseline: str) -> None:
    """``num_samples >= 1``, and at least 2 where the draws centre each other."""
    check_count("num_samples", num_samples)
    if num_samples == 1 and baseline == "leave_one_out":
        raise ValueError(
            "num_samples=1 leaves no other draw to centre the gradient with; use "
            'num_samples=2 or more, or baseline="running".'
        )


def check_max_proposals(max_proposals: Any, num_samples: int) -> None:
    """``max_proposals >= num_samples``."""
    check_count("max_proposals", max_proposals)
    if max_proposals < num_samples:
        raise ValueError(
            f"max_proposals={max_proposals} is less than num_samples={num_samples}, so that no "
            "call could ever finish; raise it to several times num_samples / target_acceptance."
        )


def check_threshold(threshold: Any) -> None:
    """None or a number other than NaN."""
    if threshold is not None and (not _is_number(threshold) or math.isnan(threshold)):
        raise ValueError(
            f"threshold must be None (adapted to target_acceptance) or a number, got {threshold!r}."
        )


def check_positive(name: str, value: Any) -> None:
    """A finite number above zero."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def check_count(name: str, value: Any) -> None:
    """A whole number from 1 up."""
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def check_key(name: str, value: Any) -> None:
    """One random key, of the typed or of the old kind."""
    try:
        one = jax.random.split(value).shape[0] == 2
    except (TypeError, ValueError, IndexError):
        one = False
    if not one:
        raise ValueError(
            f"{name} must be one JAX random key, e.g. jax.random.key(0), got {value!r}."
        )


def check_shape(name: str, value: Any) -> None:
    """A tuple of whole numbers from 1 up, possibly empty."""
    if not isinstance(value, tuple) or not all(_is_integer(n) and n >= 1 for n in value):
        raise ValueError(f"{name} must be a tuple such as () or (1000,), got {value!r}.")


def check_quantiles(quantiles: Any) -> jax.Array:
    """One number between 0 and 1, or several."""
    try:
        levels = jnp.asarray(quantiles, float)
    except (TypeError, ValueError):
        levels = jnp.asarray(jnp.nan)
    if not bool(jnp.all((levels >= 0) & (levels <= 1))):
        raise ValueError(f"quantiles must be numbers between 0 and 1, got {quantiles!r}.")
    return levels


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {known}, got {value!r}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)
