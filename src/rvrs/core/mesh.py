"""Computing on several devices at once: the axis of devices that a program is spread over.

Functions of the core that can be spread take the name of this axis, or None on a single device.
Inside of :func:`jax.shard_map` every device then runs the same program on its part of the data
points or proposals, and the few numbers that all of them need are added up here.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from rvrs.core.problem import PRNGKey, PyTree


def size(axis: str | None) -> int:
    """The number of devices."""
    return 1 if axis is None else lax.axis_size(axis)


def total(tree: PyTree, axis: str | None) -> PyTree:
    """The sum over all devices, on every device."""
    return tree if size(axis) == 1 else lax.psum(tree, axis)


def own_key(rng_key: PRNGKey, axis: str | None) -> PRNGKey:
    """A key of this device alone; that of a single device is the key itself."""
    if size(axis) == 1:
        return rng_key
    return jax.random.fold_in(rng_key, lax.axis_index(axis))


def place(axis: str | None) -> Array | int:
    """Which of the devices this is, from 0 up."""
    return 0 if axis is None else lax.axis_index(axis)


def before(count: Array, axis: str | None) -> Array:
    """The sum over the devices before this one."""
    if size(axis) == 1:
        return jnp.zeros_like(count)
    earlier = jnp.arange(size(axis)) < place(axis)
    return jnp.tensordot(earlier.astype(count.dtype), lax.all_gather(count, axis), 1)
