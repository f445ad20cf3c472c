"""Training of a guide with local latents on minibatches, in compiled chunks of steps."""

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rvrs import batches, loop
from rvrs.batches import Batches
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.guides import AutoSemiRVRS
from rvrs.guides._numpyro import Arguments
from rvrs.guides._plate import Plate

Stage = Literal["warm-up", "training"]

# Adam's steps are of this size at first and fall to zero along a cosine, which averages out the
# noise of the gradient. Weights of networks, told by their number, take smaller ones.
_LEARNING_RATE = 0.02
_NETWORK_LEARNING_RATE = 1e-3
_NETWORK_SIZE = 1000
# Adam averages squares of gradients over the latest fifth of all steps, since large gradients of a
# bad start make every step small for as long as they are remembered; but over not fewer and not
# more than so many steps of a parameter. One that belongs to a data point takes a step only when
# the point is in the batch; averaged over so few of these that the average follows single
# gradients, skewed ones would be biased.
_SECOND_MOMENT_SHARE = 0.2
_SECOND_MOMENT_STEPS = 10, 1000
# Rows of a chunk of steps that are on the device at once, and the most steps of a chunk.
_CHUNK_BYTES = 64_000_000
_LONGEST_CHUNK = 500


class SemiTrainState(NamedTuple):
    """Everything that changes while training; all of it arrays."""

    trainable: dict[str, PyTree]
    """Parameters by the names of their sites, unconstrained."""
    opt_state: PyTree
    guide_state: dict[str, jax.Array]
    """T of every data point and what comes with it."""


class SemiTrainInfo(NamedTuple):
    """What every step tells about itself."""

    elbo: jax.Array
    """An estimate of the ELBO before the step; NaN if no point of the batch got its draws."""
    acceptance: jax.Array
    """Averaged over all proposals of the batch."""
    num_proposals: jax.Array
    """Over all points of the batch."""
    num_dropped: jax.Array
    """Points of the batch that did not get their draws."""
    skipped: jax.Array
    """Whether the step moved T alone, for want of a finite loss and gradient."""


class Trainer(NamedTuple):
    """What a training needs to know besides its state; hashable but for the data."""

    guide: AutoSemiRVRS
    plate: Plate
    transforms: dict[str, Any]
    data: Batches
    learning_rate: float | None

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam, with a longer memory for parameters of single data points."""
        kinds: dict[Hashable, optax.GradientTransformation] = {
            "shared": _scale_by_adam(steps_between=1),
            "point": _scale_by_adam(self.data.num_points / self.data.batch_size),
        }
        return optax.partition(
            kinds,
            lambda trainable: {
                name: "point" if self.of_points(value) else "shared"
                for name, value in trainable.items()
            },
        )

    def of_points(self, value: PyTree) -> bool:
        """Whether a parameter has one row per data point."""
        leaves = jax.tree.leaves(value)
        return len(leaves) == 1 and leaves[0].shape[:1] == (self.data.num_points,)

    def rate(self, value: PyTree) -> float:
        """The first learning rate of a parameter."""
        if self.learning_rate is not None:
            return self.learning_rate
        size = sum(leaf.size for leaf in jax.tree.leaves(value))
        is_network = size > _NETWORK_SIZE and not self.of_points(value)
        return _NETWORK_LEARNING_RATE if is_network else _LEARNING_RATE

    @property
    def chunk_size(self) -> int:
        """Steps of a chunk: not more than what fits."""
        per_step = max(1, self.data.row_bytes * self.data.batch_size)
        return max(1, min(_LONGEST_CHUNK, _CHUNK_BYTES // per_step))

    def constrain(self, trainable: dict[str, PyTree]) -> dict[str, PyTree]:
        """Parameters as the guide takes them."""
        return {name: self.transforms[name](value) for name, value in trainable.items()}

    def first_state(self, params: dict[str, PyTree]) -> SemiTrainState:
        """The state that training starts with."""
        trainable = {name: self.transforms[name].inv(value) for name, value in params.items()}
        # Of the types that they will have after a step, so that this compiles nothing anew.
        trainable = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), trainable)
        state = self.guide.first_state(self.data.num_points)
        return SemiTrainState(trainable, self.optimizer.init(trainable), state)

    def run_chunk(
        self,
        stage: Stage,
        rng_key: PRNGKey,
        state: SemiTrainState,
        start: int,
        length: int,
        num_steps: int,
    ) -> tuple[SemiTrainState, SemiTrainInfo]:
        """Steps ``start`` to ``start + length`` of a stage of ``num_steps`` steps."""
        index = self.data.indices(start, length)
        # The last rows again, so that a shorter last chunk is no new program.
        filled = np.concatenate([index, np.repeat(index[-1:], self.chunk_size - length, axis=0)])
        arguments = self.data.take(filled)
        counts = np.array([start, length, num_steps], np.int32)
        state, info = self.guide.programs.call(
            _run_chunk,
            (_Static(self), stage, self.chunk_size, self.data.row_leaves),
            (rng_key, state, filled, counts),
            arguments,
        )
        return state, jax.tree.map(lambda leaf: leaf[:length], info)


def _scale_by_adam(steps_between: float) -> optax.GradientTransformation:
    """Adam for parameters that have a gradient every so many steps."""
    shortest, longest = (steps_between * number for number in _SECOND_MOMENT_STEPS)

    def second_decay(count: Any) -> jax.Array:
        return 1 - 1 / jnp.clip(_SECOND_MOMENT_SHARE * count, shortest, longest)

    return optax.inject_hyperparams(optax.scale_by_adam)(b2=second_decay)


class _Static:
    """A trainer as a part of a program: the same one as long as the guide and its plate are."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        data = trainer.data
        shape = (data.num_points, data.batch_size, data.row_leaves)
        self._key = (id(trainer.guide), trainer.plate, trainer.learning_rate, shape)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key


def _run_chunk(
    static: _Static,
    stage: Stage,
    chunk_size: int,
    row_leaves: tuple[int, ...],
    rng_key: PRNGKey,
    state: SemiTrainState,
    index: jax.Array,
    counts: jax.Array,
    arguments: Arguments,
) -> tuple[SemiTrainState, SemiTrainInfo]:
    trainer = static.trainer
    start, length, num_steps = counts

    def step(
        key: PRNGKey, carry: tuple[SemiTrainState, jax.Array]
    ) -> tuple[tuple[SemiTrainState, jax.Array], SemiTrainInfo]:
        state, number = carry
        progress = (start + number) / num_steps
        decay = 0.5 + 0.5 * jnp.cos(jnp.pi * progress)
        batch = batches.pick(row_leaves, arguments, number)
        state, info = _step(trainer, stage, decay, key, state, index[number], batch)
        return (state, number + 1), info

    carry = (state, jnp.int32(0))
    (state, _), info = loop.steps(step, rng_key, carry, start, length, chunk_size)
    return state, info


def _step(
    trainer: Trainer,
    stage: Stage,
    decay: jax.Array,
    rng_key: PRNGKey,
    state: SemiTrainState,
    index: jax.Array,
    arguments: Arguments,
) -> tuple[SemiTrainState, SemiTrainInfo]:
    guide, num_points = trainer.guide, state.guide_state["value"].shape[0]

    def loss(trainable: dict[str, PyTree]) -> tuple[jax.Array, dict[str, jax.Array]]:
        params = trainer.constrain(trainable)
        now = (rng_key, params, index, state.guide_state, arguments)
        elbo, guide_state = guide.objective(trainer.plate, stage == "training", *now)
        # Per data point, so that the size of the data does not change that of the gradient.
        return -elbo / num_points, guide_state

    (negative, guide_state), gradient = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    updates: Any
    updates, opt_state = trainer.optimizer.update(gradient, state.opt_state)
    moved = {}
    for name, value in state.trainable.items():
        rate = decay * trainer.rate(value)
        moved[name] = optax.apply_updates(value, optax.tree.scale(-rate, updates[name]))
    # A step without draws, or with a density that has no finite gradient there, is skipped.
    checked = (negative, gradient)
    trainable, opt_state = loop.if_finite(
        checked, (moved, opt_state), (state.trainable, state.opt_state)
    )
    info = SemiTrainInfo(
        elbo=-negative * num_points,
        acceptance=guide_state["acceptance"],
        num_proposals=guide_state["num_proposals"],
        num_dropped=guide_state["num_dropped"] - state.guide_state["num_dropped"],
        skipped=~loop.all_finite(checked),
    )
    return SemiTrainState(trainable, opt_state, guide_state), info
