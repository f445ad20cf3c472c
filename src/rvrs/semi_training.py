"""Training of a guide with local latents on minibatches, in compiled chunks of steps."""

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from rvrs import batches, loop, row_adam
from rvrs.batches import Batches
from rvrs.core import mesh
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.core.threshold import ThresholdState
from rvrs.guides import AutoSemiRVRS
from rvrs.guides._numpyro import Arguments
from rvrs.guides._plate import Plate
from rvrs.guides._semi_target import Points, Visit, next_state, points_of
from rvrs.row_adam import Moments
from rvrs.spread import Spread

Stage = Literal["warm-up", "training"]

# Adam's steps are of this size at first and fall to zero along a cosine, which averages out the
# noise of the gradient. Weights of networks, told by their number, take smaller ones.
_LEARNING_RATE = 0.02
_NETWORK_LEARNING_RATE = 1e-3
_NETWORK_SIZE = 1000
# Squares of gradients are averaged as row_adam does. A parameter of a user's guide that seems to
# belong to data points takes a step only when its point is in the batch, and is averaged over as
# many more steps.
# Rows of a chunk of steps that are on the device at once, and the most steps of a chunk.
_CHUNK_BYTES = 64_000_000
_LONGEST_CHUNK = 500


class OptState(NamedTuple):
    """What the optimizer remembers."""

    shared: PyTree
    rows: dict[str, Moments]
    """Of the tables with one row of parameters per data point."""


class SemiTrainState(NamedTuple):
    """Everything that changes while training; all of it arrays."""

    trainable: dict[str, PyTree]
    """Parameters by the names of their sites, unconstrained."""
    opt_state: OptState
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
    spread: Spread | None = None
    """Where the data points are, if not all on one device."""

    @property
    def num_points(self) -> int:
        """The number of data points, N, in all processes."""
        return self.data.num_points if self.spread is None else self.spread.num_points

    @property
    def batch_size(self) -> int:
        """Points of a batch, on all devices."""
        if self.spread is None:
            return self.data.batch_size
        return self.data.batch_size // len(self.spread.shards) * self.spread.num_devices

    @property
    def steps_between(self) -> float:
        """Steps from one visit of a data point to the next, on average."""
        return self.num_points / self.batch_size

    @property
    def tables(self) -> tuple[str, ...]:
        """Parameters with one row per data point, of which a step changes those of its batch."""
        return self.guide.local_proposal.tables(self.plate)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam for the other parameters."""
        kinds: dict[Hashable, optax.GradientTransformation] = {
            "shared": _scale_by_adam(steps_between=1),
            "point": _scale_by_adam(self.steps_between),
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
        """The state that training starts with, of the data points of this process."""
        trainable = {name: self.transforms[name].inv(value) for name, value in params.items()}
        # Of the types that they will have after a step, so that this compiles nothing anew.
        trainable = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), trainable)
        tables, shared = self.split(trainable)
        rows = {name: row_adam.init(table) for name, table in tables.items()}
        state = self.guide.first_state(self.data.num_points)
        return SemiTrainState(trainable, OptState(self.optimizer.init(shared), rows), state)

    def split(self, trainable: dict[str, PyTree]) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
        """Tables of single data points, and the other parameters."""
        tables = {name: trainable[name] for name in self.tables}
        return tables, {name: v for name, v in trainable.items() if name not in tables}

    def place(self, state: SemiTrainState) -> SemiTrainState:
        """The state on the devices that it is spread over."""
        return state if self.spread is None else self.spread.place(state, self.row_axes(state))

    def fetch(self, state: SemiTrainState) -> SemiTrainState:
        """What :meth:`place` has placed, as it was; whole, whatever the devices."""
        return state if self.spread is None else self.spread.fetch(state, self.row_axes(state))

    def row_axes(self, state: SemiTrainState) -> PyTree:
        """Which axes of the arrays of a state are those of data points; -1 for none."""

        def mark(tree: PyTree, axis: int) -> PyTree:
            return jax.tree.map(lambda _: axis, tree)

        tables, shared = self.split(state.trainable)
        opt_state = OptState(mark(state.opt_state.shared, -1), mark(state.opt_state.rows, 0))
        thresholds: Any = {
            name: leaf.ndim - 1 if name in ThresholdState._fields else -1
            for name, leaf in state.guide_state.items()
        }
        return SemiTrainState(mark(shared, -1) | mark(tables, 0), opt_state, thresholds)

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
        index, place = filled, self.data.places(filled)
        if self.spread is not None:
            put = self.spread.put
            index, place, counts = put(index, 1), put(place, 1), put(counts, -1)
            rng_key = jax.random.wrap_key_data(put(np.asarray(jax.random.key_data(rng_key)), -1))
            arguments = self._put(arguments)
        state, info = self.guide.programs.call(
            _run_chunk,
            (_Static(self), stage, self.chunk_size, self.data.row_leaves),
            (rng_key, state, index, place, counts),
            arguments,
        )
        return state, jax.tree.map(lambda leaf: leaf[:length], info)

    def _put(self, arguments: Arguments) -> Arguments:
        """The batches of a chunk on the devices; what all points share on each of them."""
        assert self.spread is not None
        leaves, structure = jax.tree.flatten(arguments)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array | np.ndarray):
                rows = 1 if place in self.data.row_leaves else -1
                leaves[place] = self.spread.put(np.asarray(leaf), rows)
        return jax.tree.unflatten(structure, leaves)


def _scale_by_adam(steps_between: float) -> optax.GradientTransformation:
    """Adam for parameters that have a gradient every so many steps."""
    shortest, longest = (steps_between * number for number in row_adam.SECOND_MOMENT_STEPS)

    def second_decay(count: Any) -> jax.Array:
        return 1 - 1 / jnp.clip(row_adam.SECOND_MOMENT_SHARE * count, shortest, longest)

    return optax.inject_hyperparams(optax.scale_by_adam)(b2=second_decay)


class _Static:
    """A trainer as a part of a program: the same one as long as the guide and its plate are."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        data = trainer.data
        shape = (data.num_points, data.batch_size, data.row_leaves)
        self._key = (id(trainer.guide), trainer.plate, trainer.learning_rate, shape, trainer.spread)

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
    place: jax.Array,
    counts: jax.Array,
    arguments: Arguments,
) -> tuple[SemiTrainState, SemiTrainInfo]:
    trainer = static.trainer
    leaves, structure = jax.tree.flatten(arguments)
    arrays = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

    def run(
        state: SemiTrainState,
        rows: tuple[jax.Array, jax.Array],
        arrays: dict[int, jax.Array],
        others: tuple[PRNGKey, jax.Array, jax.Array],
    ) -> tuple[SemiTrainState, SemiTrainInfo]:
        (index, place), (rng_key, counts, weights) = rows, others
        whole = [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
        given = jax.tree.unflatten(structure, whole)
        start, length, num_steps = counts

        def step(
            key: PRNGKey, carry: tuple[SemiTrainState, jax.Array]
        ) -> tuple[tuple[SemiTrainState, jax.Array], SemiTrainInfo]:
            state, number = carry
            progress = (start + number) / num_steps
            decay = 0.5 + 0.5 * jnp.cos(jnp.pi * progress)
            batch = batches.pick(row_leaves, given, number)
            points = (index[number], place[number], weights[0])
            state, info = _step(trainer, stage, decay, key, state, points, batch)
            return (state, number + 1), info

        carry = (state, jnp.int32(0))
        (state, _), info = loop.steps(step, rng_key, carry, start, length, chunk_size)
        return state, info

    spread = trainer.spread
    if spread is None:
        return run(state, (index, place), arrays, (rng_key, counts, jnp.ones(1)))
    row_axes = trainer.row_axes(state)
    axes_of_arrays = {number: 1 if number in row_leaves else -1 for number in arrays}
    weights = jnp.asarray(spread.weights_of_all)
    run = jax.shard_map(
        run,
        mesh=spread.mesh,
        in_specs=spread.specs((row_axes, (1, 1), axes_of_arrays, (-1, -1, 0))),
        out_specs=(spread.specs(row_axes), PartitionSpec()),
        # The core does not say of its arrays whether they differ between devices.
        check_vma=False,
    )
    return run(state, (index, place), arrays, (rng_key, counts, weights))


def _step(
    trainer: Trainer,
    stage: Stage,
    decay: jax.Array,
    rng_key: PRNGKey,
    state: SemiTrainState,
    batch: tuple[jax.Array, jax.Array, jax.Array],
    arguments: Arguments,
) -> tuple[SemiTrainState, SemiTrainInfo]:
    """One step; on several devices, what each of them does."""
    guide, num_points = trainer.guide, trainer.num_points
    axis = None if trainer.spread is None else trainer.spread.axis
    index, place, weight = batch
    tables, shared = trainer.split(state.trainable)
    # Gradients are those of the rows of the batch: a step costs nothing for the other points.
    rows = {name: table[place] for name, table in tables.items()}
    known = points_of(state.guide_state, place)
    own = jnp.arange(len(index))
    points = Points(index, own, known.thresholds, num_points, weight)

    def loss(shared: dict[str, PyTree], rows: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        params = trainer.constrain(shared | rows)
        now = (rng_key, params, points, arguments)
        elbo, visit = guide.objective(trainer.plate, stage == "training", axis, *now)
        # Per data point, so that the size of the data does not change that of the gradient.
        return -elbo / num_points, visit

    found = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(shared, rows)
    (negative, visit), (shared_gradient, row_gradient) = found
    negative, shared_gradient = mesh.total((negative, shared_gradient), axis)
    # A step without draws, or with a density that has no finite gradient there, is skipped.
    broken = ~loop.all_finite((negative, shared_gradient, row_gradient))
    finite = mesh.total(broken.astype(jnp.int32), axis) == 0

    optimizer = trainer.optimizer
    updates: Any
    updates, opt_state = optimizer.update(shared_gradient, state.opt_state.shared)
    moved = {}
    for name, value in shared.items():
        rate = decay * trainer.rate(value)
        moved[name] = optax.apply_updates(value, optax.tree.scale(-rate, updates[name]))
    old = (shared, state.opt_state.shared)
    shared, opt_state = loop.choose(finite, (moved, opt_state), old)
    moments = dict(state.opt_state.rows)
    for name, table in tables.items():
        found = (rows[name], row_gradient[name], moments[name])
        some = _row_step(trainer, decay * trainer.rate(table), finite, place, *found)
        tables[name], moments[name] = jax.tree.map(
            lambda all_, some: all_.at[place].set(some, unique_indices=True),
            (table, moments[name]),
            some,
        )
    guide_state = state.guide_state
    if visit is not None:
        counts = (visit.acceptance, visit.num_proposals, visit.num_dropped)
        visit = visit._replace(
            **dict(zip(Visit._fields[1:], mesh.total(counts, axis), strict=True))
        )
        guide_state = next_state(guide_state, place, visit)
    info = SemiTrainInfo(
        elbo=-negative * num_points,
        acceptance=guide_state["acceptance"],
        num_proposals=guide_state["num_proposals"],
        num_dropped=guide_state["num_dropped"] - state.guide_state["num_dropped"],
        skipped=~finite,
    )
    moved_state = SemiTrainState(shared | tables, OptState(opt_state, moments), guide_state)
    return moved_state, info


def _row_step(
    trainer: Trainer,
    rate: jax.Array,
    finite: jax.Array,
    place: jax.Array,
    rows: jax.Array,
    gradient: jax.Array,
    moments: Moments,
) -> tuple[jax.Array, Moments]:
    """The rows of a batch, and what is remembered of their gradients, after a step."""
    before = jax.tree.map(lambda leaf: leaf[place], moments)
    step, after = row_adam.update(gradient, before, trainer.steps_between)
    return loop.choose(finite, (rows - rate * step, after), (rows, before))
