"""Data points spread over the devices of a mesh, of one process or of several.

Every device holds the rows of its own points: their data, thresholds, parameters and what the
optimizer remembers of these. Shares differ by one point at most; the shorter ones are padded.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rvrs.core.arguments import shown
from rvrs.core.problem import PyTree


class Shard(NamedTuple):
    """The data points of one device, among those of its process."""

    number: int
    """Which of all devices it is."""
    start: int
    size: int


class Spread(NamedTuple):
    """Where the data points are; hashable."""

    mesh: Mesh
    axis: str
    shards: tuple[Shard, ...]
    """Those of this process."""
    smallest: int
    """Points of the device that has the fewest, in any process."""
    largest: int
    num_points: int
    """In all processes."""
    weights_of_all: tuple[float, ...]
    """By which a point of every device counts in a batch, which takes as many points from each of
    them, whatever it holds."""

    @property
    def num_devices(self) -> int:
        """In all processes."""
        return self.mesh.devices.size

    def specs(self, row_axes: PyTree) -> PyTree:
        """How arrays lie on the devices; ``row_axes`` has their axis of rows, -1 for none."""
        return jax.tree.map(self._spec, row_axes)

    def _spec(self, row_axis: int) -> PartitionSpec:
        return PartitionSpec(*[None] * row_axis, *[self.axis] * (row_axis >= 0))

    def place(self, tree: PyTree, row_axes: PyTree) -> PyTree:
        """Arrays with the rows of this process, or the same in all processes, to the devices."""
        return jax.tree.map(self._place, tree, row_axes)

    def _place(self, leaf: Any, row_axis: int) -> jax.Array:
        rows = np.asarray(leaf)
        if row_axis < 0:
            return self.put(rows, row_axis)
        parts = []
        for shard in self.shards:
            part = rows.take(np.arange(shard.start, shard.start + shard.size), axis=row_axis)
            padding = [(0, 0)] * rows.ndim
            padding[row_axis] = (0, self.largest - shard.size)
            parts.append(np.pad(part, padding, mode="edge"))
        return self.put(np.concatenate(parts, row_axis), row_axis)

    def put(self, array: np.ndarray, row_axis: int) -> jax.Array:
        """The part of this process of an array whose rows are spread evenly, to its devices."""
        shape = list(array.shape)
        if row_axis >= 0:
            shape[row_axis] = shape[row_axis] // len(self.shards) * self.num_devices
        sharding = NamedSharding(self.mesh, self._spec(row_axis))
        return jax.make_array_from_process_local_data(sharding, array, tuple(shape))

    def fetch(self, tree: PyTree, row_axes: PyTree) -> PyTree:
        """What :meth:`place` has placed, back as NumPy arrays with the rows of this process."""
        return jax.tree.map(self._fetch, tree, row_axes)

    def _fetch(self, leaf: jax.Array, row_axis: int) -> np.ndarray:
        local = sorted(leaf.addressable_shards, key=partial(_begin, row_axis=row_axis))
        if row_axis < 0:
            return np.asarray(local[0].data)
        parts = [
            np.asarray(part.data).take(np.arange(shard.size), axis=row_axis)
            for part, shard in zip(local, self.shards, strict=True)
        ]
        return np.concatenate(parts, row_axis)


def _begin(part: Any, row_axis: int) -> int:
    return 0 if row_axis < 0 else part.index[row_axis].start or 0


def replicate(mesh: Mesh, tree: PyTree) -> PyTree:
    """Arrays on every device; they must be the same in all processes. Other leaves stay."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            impl = jax.random.key_impl(leaf)
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)), impl=impl)
        rows = np.asarray(leaf)
        return jax.make_array_from_process_local_data(sharding, rows, rows.shape)

    return jax.tree.map(put, tree)


def fetch(tree: PyTree) -> PyTree:
    """What :func:`replicate` has placed, and what came of it, back as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), tree)


def check(mesh: Any) -> Mesh:
    """The mesh, with one axis that programs can be spread over by hand."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh must be a jax.sharding.Mesh, e.g. jax.make_mesh((8,), ('data',)), got "
            f"{shown(mesh)}."
        )
    if mesh.devices.ndim != 1:
        raise ValueError(
            f"mesh must have one axis, got {mesh.axis_names}; make one of all devices, e.g. "
            "jax.make_mesh((jax.device_count(),), ('data',))."
        )
    if not any(d.process_index == jax.process_index() for d in mesh.devices.flat):
        raise ValueError(
            f"mesh has no device of process {jax.process_index()}; make it of jax.devices() of all "
            "processes, in every one of them."
        )
    return Mesh(mesh.devices, mesh.axis_names)


def over(mesh: Mesh, num_rows: int, batch_size: int) -> Spread:
    """Spread the data points of this process over its devices.

    Parameters
    ----------
    num_rows
        Data points of this process.
    batch_size
        Points of a batch, over all devices.
    """
    devices = list(mesh.devices.flat)
    own = [n for n, device in enumerate(devices) if device.process_index == jax.process_index()]
    about = np.array([num_rows, batch_size, len(own)])
    everywhere = np.reshape(multihost_utils.process_allgather(about), (-1, len(about)))
    if len({tuple(row) for row in everywhere[:, 1:].tolist()}) > 1:
        raise ValueError(
            "the processes disagree about batch_size or the number of their devices; call rvrs.fit "
            "in the same way in all of them."
        )
    if batch_size % len(devices):
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of the {len(devices)} devices of the mesh; "
            f"use e.g. batch_size={len(devices) * max(1, round(batch_size / len(devices)))}."
        )
    sizes_in = [_divide(rows, len(own)) for rows in everywhere[:, 0].tolist()]
    # Devices of a mesh need not be in the order of their processes.
    remaining = {n: list(sizes) for n, sizes in enumerate(sizes_in)}
    sizes_of_all = [remaining[device.process_index].pop(0) for device in devices]
    num_points, smallest = sum(sizes_of_all), min(sizes_of_all)
    if batch_size // len(devices) > smallest:
        raise ValueError(
            f"batch_size={batch_size} takes {batch_size // len(devices)} data points from every "
            f"device of the mesh, but one has only {smallest}; use a smaller one, or fewer devices."
        )
    sizes = [sizes_of_all[n] for n in own]
    shards = tuple(map(Shard, own, np.cumsum([0, *sizes[:-1]]).tolist(), sizes))
    weights = tuple(size * len(sizes_of_all) / num_points for size in sizes_of_all)
    largest = max(sizes_of_all)
    return Spread(mesh, mesh.axis_names[0], shards, smallest, largest, num_points, weights)


def _divide(count: int, parts: int) -> list[int]:
    """A whole number in parts that differ by one at most."""
    size, more = divmod(count, parts)
    return [size + (place < more) for place in range(parts)]


def of_all_processes(tree: PyTree, row_axes: PyTree) -> list[PyTree]:
    """The trees of all processes, in each of them; these may have different numbers of rows.

    ``row_axes`` are 0 for leaves with rows, -1 for others, as in :meth:`Spread.specs`.
    """
    if jax.process_count() == 1:
        return [tree]
    leaves, structure = jax.tree.flatten(tree)
    gathered = [
        _gather(np.asarray(leaf), row_axis)
        for leaf, row_axis in zip(leaves, jax.tree.leaves(row_axes), strict=True)
    ]
    return [jax.tree.unflatten(structure, list(parts)) for parts in zip(*gathered, strict=True)]


def _gather(leaf: np.ndarray, row_axis: int) -> list[np.ndarray]:
    if row_axis < 0:
        return list(multihost_utils.process_allgather(leaf))
    sizes = multihost_utils.process_allgather(np.array(len(leaf))).tolist()
    # What is sent has to be of the same shape everywhere.
    padding = [(0, max(sizes) - len(leaf))] + [(0, 0)] * (leaf.ndim - 1)
    padded = multihost_utils.process_allgather(np.pad(leaf, padding))
    return [part[:size] for part, size in zip(padded, sizes, strict=True)]
