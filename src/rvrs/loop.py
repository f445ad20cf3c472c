"""The interface of an algorithm, and many of its steps in one compiled loop."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rvrs.core import arguments
from rvrs.core.evidence import Evidence
from rvrs.core.problem import PRNGKey, PyTree

_USUAL_CHUNK = 1000
State = Any
Info = Any


class VIAlgorithm(NamedTuple):
    """BlackJAX's interface (``init``, ``step``, ``sample``), and ``evaluate``.

    >>> import optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> algorithm._fields
    ('init', 'step', 'sample', 'evaluate')
    """

    init: Callable[[PyTree], State]
    """``(position) -> state``."""
    step: Callable[[PRNGKey, State], tuple[State, Info]]
    """``(rng_key, state) -> (state, info)``."""
    sample: Callable[..., PyTree]
    """``(rng_key, state, num_samples) -> positions`` with a leading axis."""
    evaluate: Callable[..., Evidence]
    """``(rng_key, state, num_proposals=100_000) -> Evidence``."""


def run(
    rng_key: PRNGKey,
    algorithm: VIAlgorithm,
    state: State,
    num_steps: int,
    *,
    chunk_size: int = _USUAL_CHUNK,
    callback: Callable[[int, State, Info], None] | None = None,
) -> tuple[State, Info]:
    """Take ``num_steps`` steps and return the last state and the infos of all steps.

    Steps run in compiled chunks of ``chunk_size``; the program is compiled once, whatever
    the number of steps, and the result does not depend on ``chunk_size``. After each chunk
    ``callback(steps_done, state, infos_of_chunk)`` may report progress.

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> state = algorithm.init(jax.numpy.ones(2))
    >>> state, info = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps=300)
    >>> bool(info.elbo[-100:].mean() > info.elbo[:100].mean())
    True
    """
    arguments.check_key("rng_key", rng_key)
    arguments.check_callable(
        "algorithm.step", getattr(algorithm, "step", None), "that of rvrs.vi.as_top_level_api(...)"
    )
    arguments.check_count("num_steps", num_steps)
    arguments.check_count("chunk_size", chunk_size)
    if callback is not None:
        arguments.check_callable("callback", callback, "a function or None")
    arguments.check_arrays("state", state, "what algorithm.init or run returned")
    # Room for the infos of steps that are not taken would be wasted; but below the usual number
    # it serves to have one program for all numbers of steps.
    chunk_size = min(chunk_size, max(num_steps, _USUAL_CHUNK))
    infos = []
    for start in range(0, num_steps, chunk_size):
        length = min(chunk_size, num_steps - start)
        state, chunk = _run_chunk(rng_key, algorithm.step, state, start, length, chunk_size)
        infos.append(jax.tree.map(lambda leaf, length=length: leaf[:length], chunk))
        if callback is not None:
            callback(start + length, state, infos[-1])
    return state, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *infos)


def steps(
    step: Callable[[PRNGKey, State], tuple[State, Info]],
    rng_key: PRNGKey,
    state: State,
    start: jax.typing.ArrayLike,
    length: jax.typing.ArrayLike,
    chunk_size: int,
) -> tuple[State, Info]:
    """Steps ``start`` to ``start + length`` of a run in one loop, for use inside of ``jit``.

    The key of a step depends on ``rng_key`` and the step's number alone. The infos have room for
    ``chunk_size`` steps, the largest possible ``length``.
    """
    # A loop to a traced length, not a scan, so that a shorter last chunk is no new program.
    shapes = jax.eval_shape(step, rng_key, state)[1]
    infos = jax.tree.map(lambda leaf: jnp.zeros((chunk_size, *leaf.shape), leaf.dtype), shapes)

    # All keys of the chunk at once: cheaper than one at a time in the loop.
    keys = jax.vmap(partial(jax.random.fold_in, rng_key))(start + jnp.arange(chunk_size))

    def body(index: jax.Array, carry: tuple[State, Info]) -> tuple[State, Info]:
        state, infos = carry
        state, info = step(keys[index], state)
        return state, jax.tree.map(lambda all_, one: all_.at[index].set(one), infos, info)

    return lax.fori_loop(0, length, body, (state, infos))


@partial(jax.jit, static_argnames=("step", "chunk_size"))
def _run_chunk(
    rng_key: PRNGKey,
    step: Callable[[PRNGKey, State], tuple[State, Info]],
    state: State,
    start: int,
    length: int,
    chunk_size: int,
) -> tuple[State, Info]:
    return steps(step, rng_key, state, start, length, chunk_size)


def if_finite(checked: PyTree, new: PyTree, old: PyTree) -> Any:
    """What a step has changed, if all that it rests on is finite; what was there otherwise."""
    return choose(all_finite(checked), new, old)


def all_finite(tree: PyTree) -> jax.Array:
    """Whether there are only finite numbers in it."""
    return jax.tree.reduce(lambda ok, leaf: ok & jnp.all(jnp.isfinite(leaf)), tree, jnp.array(True))


def choose(condition: jax.Array, new: PyTree, old: PyTree) -> Any:
    """One of two trees."""
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)
