"""How long a training step of a variational autoencoder takes, by method (Table 1 of the paper).

A step is a gradient of the method's loss on one batch and an update by Adam. Every method trains
for one epoch; they take turns of a few steps in one process, so that whatever else the machine does
slows all of them down alike. Ratios can be compared between machines; milliseconds cannot. The
first thresholds of RVRS, which belong to no step, are found before each turn and timed apart.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from rvrs.core.arguments import check_count
from rvrs.vae_training import Method, first_train_state, train_step

BATCH_SIZE = 100
NUM_STEPS = 20
"""Steps per turn, in one compiled loop: enough that the call itself costs nothing."""
LEARNING_RATE = 1e-4

REFERENCE = "standard"
"""The method that the others are compared with."""


class StepTime(NamedTuple):
    """How long a step of a method takes."""

    name: str
    milliseconds: float
    """Median over the turns."""
    ratio: float
    """To that of the reference."""
    sight: float
    """Milliseconds per batch for what a method finds out about images that it has never seen."""


def measure(
    methods: Mapping[str, Method],
    images: Any,
    *,
    batch_size: int = BATCH_SIZE,
    num_steps: int = NUM_STEPS,
) -> list[StepTime]:
    """Time the steps of an epoch of all methods, which take turns.

    Parameters
    ----------
    methods
        By name; ``"standard"`` must be among them.
    images
        ``(n, num_pixels)``.
    num_steps
        Steps per turn.
    """
    check_count("num_steps", num_steps)
    check_count("batch_size", batch_size)
    if REFERENCE not in methods:
        raise ValueError(
            f"methods must have {REFERENCE!r}, which the others are compared with; got "
            f"{', '.join(methods) or 'none'}."
        )
    num_turns = len(images) // (batch_size * num_steps)
    if num_turns < 1:
        raise ValueError(
            f"images: {len(images)} are not enough for a turn of {num_steps} batches of "
            f"{batch_size}; pass more, or lower num_steps."
        )
    order = np.random.default_rng(0).permutation(len(images))
    order = order[: num_turns * num_steps * batch_size].reshape(num_turns, num_steps, batch_size)
    trainers = {name: _trainer(method, len(images)) for name, method in methods.items()}
    for train in trainers.values():
        train(jax.random.key(0), order[0], images)  # compiles
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for turn, index in enumerate(order):
        for name, train in trainers.items():
            seconds = train(jax.random.key(turn), index, images)
            times[name].append((seconds[0] / num_steps * 1e3, seconds[1] / num_steps * 1e3))
    medians = {
        name: [statistics.median(part) for part in zip(*record, strict=True)]
        for name, record in times.items()
    }
    reference = medians[REFERENCE][1]
    return [StepTime(name, ms, ms / reference, sight) for name, (sight, ms) in medians.items()]


def _trainer(
    method: Method, num_images: int
) -> Callable[[jax.Array, np.ndarray, np.ndarray], tuple[float, float]]:
    """A function of a key, numbers of images and images: trains on from where it stopped.

    Returns the seconds for the first sight of the images, and for the steps.
    """
    optimizer = optax.adam(LEARNING_RATE)
    params = method.init(jax.random.key(0))
    state = first_train_state(method, optimizer, params, num_images)

    @partial(jax.jit, donate_argnums=0)
    def loop(state: Any, rng_key: jax.Array, index: jax.Array, images: jax.Array) -> Any:
        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            key, index, images = batch
            return train_step(method, optimizer, key, state, index, images)

        return lax.scan(step, state, (jax.random.split(rng_key, len(index)), index, images))

    @jax.jit
    def see(state: Any, rng_key: jax.Array, index: jax.Array, images: jax.Array) -> Any:
        def step(memory: Any, batch: Any) -> tuple[Any, None]:
            key, index, images = batch
            assert method.see is not None
            return method.see(key, state.params, memory, index, images), None

        keys = jax.random.split(rng_key, len(index))
        return lax.scan(step, state.memory, (keys, index, images))[0]

    def train(rng_key: jax.Array, index: np.ndarray, images: np.ndarray) -> tuple[float, float]:
        nonlocal state
        rows, numbers = jnp.asarray(images[index]), jnp.asarray(index)
        times = [time.perf_counter()]
        if method.see is not None:
            seen = see(state, rng_key, numbers, rows)
            state = state._replace(memory=jax.block_until_ready(seen))
        times.append(time.perf_counter())
        state, _ = jax.block_until_ready(loop(state, rng_key, numbers, rows))
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1]

    return train
