"""Compiled programs of functions that take a model's arguments."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from rvrs.core.arguments import NEEDS_VALUES, needs_values


class Programs:
    """Calls functions compiled, and finds the program again when only array values differ."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Callable] = {}

    def call(
        self,
        function: Callable,
        static: tuple[Hashable, ...],
        dynamic: tuple[Any, ...],
        arguments: Any,
    ) -> Any:
        """``function(*static, *dynamic, arguments)``.

        Arrays in ``arguments`` are inputs of the program; anything else in it (sizes, flags,
        functions) is part of the program. A model that computes shapes from the values of its
        arrays cannot be traced like that: it gets a program of its own at every call.
        """
        leaves, structure = jax.tree.flatten(arguments)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        rest = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
        key = (function, static, structure, rest)
        try:
            program = self._compiled.get(key)
        except TypeError:  # an argument without a hash
            key, program = None, None
        if program is None:
            program = jax.jit(_with_arrays(function, static, structure, rest))
        try:
            result = program(dynamic, arrays)
        except NEEDS_VALUES:
            pass
        else:
            if key is not None:
                self._compiled[key] = program
            return result
        try:
            return jax.jit(lambda dynamic: function(*static, *dynamic, arguments))(dynamic)
        except NEEDS_VALUES as error:
            # Not those of its arguments, then, but of its latent variables.
            raise needs_values("model") from error


def _with_arrays(
    function: Callable, static: tuple, structure: Any, rest: tuple[Any, ...]
) -> Callable:
    def call(dynamic: tuple[Any, ...], arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is None else leaf for leaf in rest]
        return function(*static, *dynamic, jax.tree.unflatten(structure, leaves))

    return call


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)
