"""Training of a guide's proposal in compiled chunks of steps."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from rvrs import loop, spread
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.guides import AutoRVRS
from rvrs.guides._numpyro import Arguments, constraint_transforms

Stage = Literal["warm-up", "training"]

# Adam's steps are of this size at first, in units of the frame, and fall to zero along a cosine,
# which averages out the noise of the gradient. The noise of all parameters adds up in the ELBO, so
# that with many of them steps have to be smaller: the rate is the second number over their count,
# within the first and the last.
_LEARNING_RATES = {"warm-up": (0.005, 16.0, 0.05), "training": (0.001, 6.5, 0.02)}
# Second moments are averaged over about a hundred steps: gradients shrink fast at the beginning.
_OPTIMIZER = optax.scale_by_adam(b2=0.99)
# Draws per step without rejection; with it, the guide's own number.
_WARM_UP_SAMPLES = 8
# Steps of the model's own parameters, which have no frame. They do not shrink with the number of
# the proposal's: a kernel's amplitude has as far to go whatever the dimension of the latents.
_MODEL_RATES = {"warm-up": 0.005, "training": 0.001}


class Trainable(NamedTuple):
    """What the optimizer changes."""

    proposal: PyTree
    """Parameters of the proposal, in units of the frame."""
    model: dict[str, Any]
    """Values of the model's ``numpyro.param`` sites, unconstrained."""


class TrainState(NamedTuple):
    """Everything that changes while training; all of it arrays."""

    trainable: Trainable
    opt_state: PyTree
    guide_state: dict[str, jax.Array]
    """T and what comes with it."""


class TrainInfo(NamedTuple):
    """What every step tells about itself."""

    elbo: jax.Array
    """An unbiased estimate of the ELBO before the step; NaN if ``max_proposals`` was hit."""
    acceptance: jax.Array
    threshold: jax.Array
    num_proposals: jax.Array
    capped: jax.Array
    skipped: jax.Array
    """Whether the step moved T alone: it was capped, or had no finite gradient."""


def first_trainable(
    guide: AutoRVRS, theta: dict[str, Any], location: jax.Array, scale: jax.Array
) -> tuple[Trainable, PyTree]:
    """What to train from a normal distribution, and the frame that the proposal is in."""
    proposal, frame = guide.proposal.start(location, scale)
    transforms = constraint_transforms(guide.prototype_trace)
    model = {name: transforms[name].inv(value) for name, value in theta.items()}
    return Trainable(proposal, model), frame


def parameters(
    guide: AutoRVRS, trainable: Trainable, frame: PyTree
) -> tuple[PyTree, dict[str, Any]]:
    """Parameters of the proposal and of the model, in plain units and constrained."""
    transforms = constraint_transforms(guide.prototype_trace)
    theta = {name: transforms[name](value) for name, value in trainable.model.items()}
    return guide.proposal.in_plain_units(trainable.proposal, frame), theta


def first_state(
    guide: AutoRVRS, trainable: Trainable, frame: PyTree, arguments: Arguments
) -> TrainState:
    """The state that a stage starts with, T calibrated to the parameters."""
    state = guide.programs.call(_first_guide_state, (guide,), (trainable, frame), arguments)
    return TrainState(trainable, _OPTIMIZER.init(trainable), state)


def _first_guide_state(
    guide: AutoRVRS, trainable: Trainable, frame: PyTree, arguments: Arguments
) -> dict[str, jax.Array]:
    return guide.first_state(*parameters(guide, trainable, frame), arguments)


def run_chunk(
    guide: AutoRVRS,
    stage: Stage,
    rng_key: PRNGKey,
    state: TrainState,
    frame: PyTree,
    start: int,
    length: int,
    num_steps: int,
    chunk_size: int,
    arguments: Arguments,
    mesh: Mesh | None = None,
) -> tuple[TrainState, TrainInfo]:
    """Steps ``start`` to ``start + length`` of a stage of ``num_steps`` steps.

    With a ``mesh``, proposals are spread over its devices; all arrays are on each of them.
    """
    counts = np.array([start, length, num_steps], np.int32)
    static, dynamic = (guide, stage, chunk_size), (rng_key, state, frame, counts)
    if mesh is None:
        state, info = guide.programs.call(_run_chunk, (None, *static), dynamic, arguments)
    else:
        dynamic = spread.replicate(mesh, dynamic)
        state, info = guide.programs.call(_run_chunk_on, (mesh, *static), dynamic, arguments)
    return state, jax.tree.map(lambda leaf: leaf[:length], info)


def _run_chunk_on(
    mesh: Mesh,
    guide: AutoRVRS,
    stage: Stage,
    chunk_size: int,
    rng_key: PRNGKey,
    state: TrainState,
    frame: PyTree,
    counts: jax.Array,
    arguments: Arguments,
) -> tuple[TrainState, TrainInfo]:
    """What :func:`_run_chunk` does, on all devices of a mesh."""
    leaves, structure = jax.tree.flatten(arguments)
    arrays = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

    def run(
        dynamic: tuple[PRNGKey, TrainState, PyTree, jax.Array], arrays: dict[int, jax.Array]
    ) -> tuple[TrainState, TrainInfo]:
        whole = [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
        given = jax.tree.unflatten(structure, whole)
        return _run_chunk(mesh.axis_names[0], guide, stage, chunk_size, *dynamic, given)

    everywhere = PartitionSpec()
    # The core does not say of its arrays whether they differ between devices.
    run = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return run((rng_key, state, frame, counts), arrays)


def _run_chunk(
    axis: str | None,
    guide: AutoRVRS,
    stage: Stage,
    chunk_size: int,
    rng_key: PRNGKey,
    state: TrainState,
    frame: PyTree,
    counts: jax.Array,
    arguments: Arguments,
) -> tuple[TrainState, TrainInfo]:
    start, length, num_steps = counts
    lowest, per_parameter, highest = _LEARNING_RATES[stage]
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state.trainable.proposal))
    first_rate = min(max(per_parameter / num_parameters, lowest), highest)

    def step(
        key: PRNGKey, carry: tuple[TrainState, jax.Array]
    ) -> tuple[tuple[TrainState, jax.Array], TrainInfo]:
        state, index = carry
        fall = 0.5 + 0.5 * jnp.cos(jnp.pi * index / num_steps)
        rates = (first_rate * fall, _MODEL_RATES[stage] * fall)
        state, info = _step(axis, guide, stage, rates, key, state, frame, arguments)
        return (state, index + 1), info

    (state, _), info = loop.steps(step, rng_key, (state, start), start, length, chunk_size)
    return state, info


def _step(
    axis: str | None,
    guide: AutoRVRS,
    stage: Stage,
    rates: tuple[jax.Array, jax.Array],
    rng_key: PRNGKey,
    state: TrainState,
    frame: PyTree,
    arguments: Arguments,
) -> tuple[TrainState, TrainInfo]:
    """``rates`` are those of the proposal's and of the model's parameters."""

    def loss(trainable: Trainable) -> tuple[jax.Array, dict[str, jax.Array]]:
        phi, theta = parameters(guide, trainable, frame)
        if stage == "warm-up":
            surrogate = guide.plain_surrogate(_WARM_UP_SAMPLES, rng_key, phi, theta, arguments)
            return -surrogate, state.guide_state
        now = (rng_key, phi, theta, state.guide_state, arguments)
        _, _, surrogate, guide_state = guide.surrogate_step(*now, axis=axis)
        return -surrogate, guide_state

    (negative, guide_state), gradient = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    updates: Any
    updates, opt_state = _OPTIMIZER.update(gradient, state.opt_state)
    moved = Trainable(
        *(
            jax.tree.map(lambda old, step, rate=rate: old - rate * step, *pair)
            for rate, *pair in zip(rates, state.trainable, updates, strict=True)
        )
    )
    # A step without its draws, or with a density that has no finite gradient there, is skipped.
    checked = (negative, gradient)
    trainable, opt_state = loop.if_finite(
        checked, (moved, opt_state), (state.trainable, state.opt_state)
    )
    info = TrainInfo(
        elbo=-negative,
        acceptance=guide_state["acceptance"],
        threshold=state.guide_state["value"][0],
        num_proposals=guide_state["num_proposals"],
        capped=guide_state["num_capped"] > state.guide_state["num_capped"],
        skipped=~loop.all_finite(checked),
    )
    return TrainState(trainable, opt_state, guide_state), info
