"""Checks of user arguments: each raises a ValueError that names the argument and the remedy."""

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# Proposals are counted by 32-bit integers.
LARGEST_COUNT = 2**31 - 1

# What tracing raises where a function needs the values of arrays.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_target_acceptance(target_acceptance: Any, epsilon: float) -> None:
    """``epsilon < target_acceptance <= 1``."""
    if not _is_number(target_acceptance) or not 0 < target_acceptance <= 1:
        raise ValueError(
            f"target_acceptance must be a number in (0, 1], got {shown(target_acceptance)}; 1 is "
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
            f"epsilon must be a number in [0, 1), got {shown(epsilon)}; use 0 for no guardrail or "
            "a small number such as 1e-4."
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
            "threshold must be None (adapted to target_acceptance) or a number, got "
            f"{shown(threshold)}."
        )


def check_positive(name: str, value: Any) -> None:
    """A finite number above zero."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {shown(value)}.")


def check_count(name: str, value: Any) -> None:
    """A whole number from 1 up."""
    if not _is_integer(value) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {shown(value)}.")
    if value > LARGEST_COUNT:
        raise ValueError(f"{name} must be {LARGEST_COUNT} at most, got {shown(value)}.")


def check_block(num_samples: int, target_acceptance: float, name: str = "num_samples") -> None:
    """The proposals that ``num_samples`` draws need on average can be counted."""
    if num_samples > LARGEST_COUNT * target_acceptance:
        raise ValueError(
            f"target_acceptance={target_acceptance} takes more than {LARGEST_COUNT} proposals for "
            f"{name}={num_samples} draws; raise target_acceptance or lower {name}."
        )


def check_key(name: str, value: Any) -> None:
    """One random key, of the typed or of the old kind."""
    try:
        # By shapes alone: nothing is compiled or, where JAX is tracing, added to the program.
        one = jax.eval_shape(jax.random.split, value).shape[0] == 2
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError):
        one = False
    if not one:
        raise ValueError(
            f"{name} must be one JAX random key, e.g. jax.random.key(0), got {shown(value)}."
        )


def check_shape(name: str, value: Any) -> None:
    """A tuple of whole numbers from 1 up, possibly empty."""
    if not isinstance(value, tuple) or not all(_is_integer(n) and n >= 1 for n in value):
        raise ValueError(f"{name} must be a tuple such as () or (1000,), got {shown(value)}.")
    check_count(f"the product of {name}", math.prod(value))


def check_quantiles(quantiles: Any) -> jax.Array:
    """One number between 0 and 1, or several; where JAX is tracing their values are not seen."""
    try:
        # By NumPy, unless they are traced, so that nothing is compiled to look at them.
        given = np.asarray(quantiles)
    except jax.errors.TracerArrayConversionError:
        given = jnp.asarray(quantiles)
    except (TypeError, ValueError):  # of a random key, or lists of different lengths
        given = np.zeros(0)
    real = jnp.issubdtype(given.dtype, jnp.floating) or jnp.issubdtype(given.dtype, jnp.integer)
    ordered = real and (isinstance(given, Tracer) or np.all((given >= 0) & (given <= 1)))
    if not (ordered and given.ndim <= 1 and given.size):
        raise ValueError(
            f"quantiles must be numbers between 0 and 1, got {shown(quantiles)}; pass one number "
            "or a list of them."
        )
    return jnp.asarray(given, float)


def check_numbers(name: str, value: Any) -> np.ndarray:
    """Real numbers, as an array of NumPy."""
    try:
        given = np.asarray(value)
        # By JAX, which knows its own small floats.
        real = jnp.issubdtype(given.dtype, jnp.floating) or jnp.issubdtype(given.dtype, jnp.integer)
    except (TypeError, ValueError):  # of tracers, random keys, or lists of different lengths
        real, given = False, np.zeros(0)
    if not real:
        raise ValueError(f"{name} must be an array of numbers, got {shown(value)}.")
    return given.astype(np.float64)


def check_flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}.")


def check_callable(name: str, value: Any, what: str = "a function") -> None:
    """A function, or anything that can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be {what}, got {shown(value)}.")


def check_kind(name: str, value: Any, kind: type, what: str) -> None:
    """An object of a class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, got {shown(value)}.")


def check_word(name: str, value: Any) -> None:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a word, got {shown(value)}.")


def check_file(name: str, value: Any) -> None:
    """The path of a file."""
    if not (isinstance(value, str) or hasattr(value, "__fspath__")) or not str(value):
        raise ValueError(f"{name} must be the path of a file, got {shown(value)}.")


def check_optional_file(name: str, value: Any) -> None:
    """The path of a file, or None."""
    if value is not None:
        check_file(name, value)


def check_seed(name: str, value: Any) -> None:
    """A seed of NumPy's generators of old and new."""
    if not _is_integer(value) or not 0 <= value < 2**32:
        raise ValueError(f"{name} must be a whole number from 0 to 2**32 - 1, got {shown(value)}.")


def check_reporting(progress: Any, callback: Any, checkpoint: Any, resume: Any) -> None:
    """What a training shows, calls and stores while it runs."""
    check_flag("progress", progress)
    if callback is not None:
        check_callable("callback", callback, "a function or None")
    check_optional_file("checkpoint", checkpoint)
    check_optional_file("resume", resume)


def check_arrays(name: str, tree: Any, what: str) -> None:
    """A pytree of arrays and of numbers that JAX makes arrays of."""
    for leaf in jax.tree.leaves(tree):
        counted = isinstance(leaf, int) and abs(leaf) <= LARGEST_COUNT
        array = isinstance(leaf, jax.Array | np.ndarray | np.generic) and not _is_masked(leaf)
        if not (array or counted or isinstance(leaf, float)):
            raise ValueError(f"{name} must be {what}, got {shown(leaf)} in it.")


def check_floats(name: str, tree: Any) -> None:
    """A pytree of float32 and float64 arrays, not all of them empty."""
    leaves = jax.tree.leaves(tree)
    kinds = [_kind(leaf) for leaf in leaves]
    if not leaves or not set(kinds) <= _PRECISIONS:
        # Log densities of half precision are off by more than what acceptance depends on.
        raise ValueError(
            f"{name} must be a pytree of floating-point arrays of type float32 or float64, got "
            f"{_listed(kinds) or 'no arrays'}; convert it, e.g. with jnp.asarray(x, float)."
        )
    if not any(jnp.size(leaf) for leaf in leaves):
        raise ValueError(f"{name} has no elements; there is nothing to infer.")


def needs_values(name: str) -> ValueError:
    """The error for a user's function that raised one of ``NEEDS_VALUES``."""
    return ValueError(
        f"{name} cannot be compiled by JAX, since it needs the values of arrays; write it with "
        "jax.numpy: jnp.where in place of if, no float(), int() or NumPy on what it is given."
    )


def check_like(name: str, given: Any, wanted: Any, advice: str) -> None:
    """A pytree of arrays of the same shapes, with floats where these are wanted."""
    shapes = [jax.tree.map(_shape, tree) for tree in (given, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{name} has the shape {shown(shapes[0])}, but with these arguments it is "
            f"{shown(shapes[1])}. {advice}."
        )
    for leaf, like in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        if _kind(like) in _PRECISIONS and _kind(leaf) not in _PRECISIONS:
            raise ValueError(f"{name} must be of type {_kind(like)}, got {_kind(leaf)}.")


def _shape(leaf: Any) -> Any:
    """The shape of an array or number; of anything else, what it is."""
    if isinstance(leaf, bool | int | float):
        return ()
    return getattr(leaf, "shape", f"of a {type(leaf).__name__}")


_PRECISIONS = {"float32", "float64"}
# Python's numbers take the default type.
_PYTHON = {float: "float32", bool: "bool", int: "int32", complex: "complex64"}


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, np.ma.MaskedArray)


def _kind(leaf: Any) -> str:
    # JAX takes no masked arrays, whatever is in them.
    dtype = None if _is_masked(leaf) else getattr(leaf, "dtype", None)
    return _PYTHON.get(type(leaf), type(leaf).__name__) if dtype is None else str(dtype)


def _listed(words: list[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def evaluated_shape(name: str, function: Callable, *args: Any) -> Any:
    """Shapes and types of what a user's function returns, which JAX has to be able to trace.

    What the function itself raises passes, with a note that says whose it is.
    """
    try:
        return jax.eval_shape(function, *args)
    except NEEDS_VALUES as error:
        raise needs_values(name) from error
    except Exception as error:
        error.add_note(f"This was raised while rvrs called {name} with arrays of shapes only.")
        raise


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {known}, got {shown(value)}.")


_LONGEST = 200


def shown(value: Any) -> str:
    """A value as messages show it, and how to make a setting of it where it nearly is one."""
    if isinstance(value, Tracer):
        return (
            f"a value that JAX is tracing ({value.aval.str_short()}); settings decide how programs "
            "are made, so pass a Python number, or make it a static argument of jit"
        )
    try:
        text = repr(value)
    except Exception:  # of an int with too many digits, or of a class with a bug
        text = f"a value of type {type(value).__name__}"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    if getattr(value, "shape", None) == () and getattr(value, "dtype", None) is not None:
        text += f" of type {value.dtype}, not a number of Python's (convert it: float(x), int(x))"
    return text


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # Larger whole numbers than this are not numbers of any float.
    return (_is_integer(value) and abs(value) < 2**1000) or isinstance(value, float)
