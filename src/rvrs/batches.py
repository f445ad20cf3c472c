"""Minibatches of a model's arguments, drawn without replacement in every epoch."""

from typing import Any, NamedTuple

import jax
import numpy as np

from rvrs.core.arguments import shown

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Batches(NamedTuple):
    """Data points, and how to make batches of them."""

    arguments: Arguments
    """All of the data; arrays may be memory maps, of which rows are read as they are needed."""
    row_leaves: tuple[int, ...]
    """Leaves of the arguments that are to be cut into batches; none if the model takes its rows
    by index."""
    num_points: int
    batch_size: int
    seed: tuple[int, ...]

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; points that are left over have their turn in another one."""
        return self.num_points // self.batch_size

    def indices(self, start: int, length: int) -> np.ndarray:
        """Points ``(length, batch_size)`` of the batches from ``start`` on.

        They depend on the seed and the batch's number alone.
        """
        first, last = start // self.per_epoch, (start + length - 1) // self.per_epoch
        epochs = [self._epoch(number) for number in range(first, last + 1)]
        offset = start - first * self.per_epoch
        return np.concatenate(epochs)[offset : offset + length]

    def _epoch(self, number: int) -> np.ndarray:
        order = np.random.default_rng([*self.seed, number]).permutation(self.num_points)
        used = order[: self.per_epoch * self.batch_size]
        return used.reshape(self.per_epoch, self.batch_size).astype(np.int32)

    def check_index(self, name: str, indices: Any) -> np.ndarray:
        """Indices of data points, by default of all; refused where there are no such points."""
        try:
            index = np.arange(self.num_points) if indices is None else np.asarray(indices)
        except ValueError:  # lists of different lengths
            index = np.zeros((0, 0))
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer) or not index.size:
            raise ValueError(f"{name} must be a list of whole numbers, got {shown(indices)}.")
        if index.min() < 0 or index.max() >= self.num_points:
            raise ValueError(
                f"{name} must be from 0 to {self.num_points - 1}, got {index.min()} to "
                f"{index.max()}."
            )
        return index.astype(np.int32)

    def take(self, index: np.ndarray) -> Arguments:
        """The arguments with the rows at ``index``, of any shape, in place of all rows."""
        leaves, structure = jax.tree.flatten(self.arguments)
        for place in self.row_leaves:
            leaves[place] = np.asarray(leaves[place][index.ravel()]).reshape(
                *index.shape, *leaves[place].shape[1:]
            )
        return jax.tree.unflatten(structure, leaves)

    @property
    def row_bytes(self) -> int:
        """Bytes of one data point."""
        leaves = jax.tree.leaves(self.arguments)
        return sum(leaves[place].nbytes for place in self.row_leaves) // self.num_points


def pick(row_leaves: tuple[int, ...], arguments: Arguments, number: jax.Array) -> Arguments:
    """One batch of the arguments that :meth:`Batches.take` gave for several; may be traced."""
    leaves, structure = jax.tree.flatten(arguments)
    for place in row_leaves:
        leaves[place] = leaves[place][number]
    return jax.tree.unflatten(structure, leaves)
