"""Minibatches of a model's arguments, drawn without replacement in every epoch."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from rvrs.core.arguments import shown
from rvrs.spread import Shard

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
    shards: tuple[Shard, ...] = ()
    """Data points of several devices, each of which has as many in a batch; none if all are on
    one."""
    per_epoch_of_all: int = 0
    """With shards: batches of an epoch, the same for devices with more and with fewer points."""

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; points that are left over have their turn in another one."""
        return self.per_epoch_of_all or self.num_points // self.batch_size

    def indices(self, start: int, length: int) -> np.ndarray:
        """Points ``(length, batch_size)`` of the batches from ``start`` on.

        They depend on the seed and the batch's number alone.
        """
        first, last = start // self.per_epoch, (start + length - 1) // self.per_epoch
        order = (self.seed, self.num_points, self.batch_size, self.per_epoch, self.shards)
        epochs = [_epoch(number, *order) for number in range(first, last + 1)]
        offset = start - first * self.per_epoch
        return np.concatenate(epochs)[offset : offset + length]

    def places(self, index: np.ndarray) -> np.ndarray:
        """Rows on their own device of the points that :meth:`indices` gave."""
        if not self.shards:
            return index
        starts = np.array([shard.start for shard in self.shards], index.dtype)
        return index - np.repeat(starts, self.batch_size // len(self.shards))

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


# Those of the current epoch and of the one that a chunk of steps may reach into.
@lru_cache(maxsize=2)
def _epoch(
    number: int,
    seed: tuple[int, ...],
    num_points: int,
    batch_size: int,
    per_epoch: int,
    shards: tuple[Shard, ...],
) -> np.ndarray:
    """The points of all batches of an epoch, those of each device side by side."""
    if not shards:
        order = np.random.default_rng([*seed, number]).permutation(num_points)
        return order[: per_epoch * batch_size].reshape(per_epoch, batch_size).astype(np.int32)
    size, parts = batch_size // len(shards), []
    for shard in shards:
        order = np.random.default_rng([*seed, number, shard.number]).permutation(shard.size)
        used = shard.start + order[: per_epoch * size]
        parts.append(used.reshape(per_epoch, size).astype(np.int32))
    return np.concatenate(parts, axis=1)
