"""One call from a model with local latents to a fit: minibatches, warm-up, training, evaluation."""

import time
import warnings
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from rvrs import processes, storage
from rvrs import spread as spreading
from rvrs.batches import Batches
from rvrs.core import arguments as checks
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.guides import AutoSemiRVRS
from rvrs.guides import _semi_posterior as posterior
from rvrs.guides._numpyro import Arguments
from rvrs.semi_result import SemiFit
from rvrs.semi_training import SemiTrainInfo, SemiTrainState, Trainer
from rvrs.storage import Checkpoint

# Steps without rejection before the others, in units of these.
_WARM_UP = 0.5
# The evaluation at the end: global draws, proposals per point, and the most points.
_EVALUATION_GLOBALS = 20
_EVALUATION_PROPOSALS = 1000
_EVALUATION_POINTS = 5000
# Points of an evaluation whose rows are read at once.
_ROWS_AT_ONCE = 2500

Callback = Callable[[int, SemiTrainInfo], None]


class _Keys(NamedTuple):
    """The keys of a fit."""

    batches: PRNGKey
    initial: PRNGKey
    warm_up: PRNGKey
    training: PRNGKey
    evaluation: PRNGKey


class SemiRun(NamedTuple):
    """A fit under way."""

    rng_key: PRNGKey
    """The key that all others, those of the batches among them, derive from; of the typed kind."""
    state: SemiTrainState
    history: SemiTrainInfo
    """Of all training steps so far, as NumPy arrays."""

    @property
    def keys(self) -> _Keys:
        """The keys of its parts."""
        return _Keys(*jax.random.split(self.rng_key, len(_Keys._fields)))

    @property
    def steps_done(self) -> int:
        """Training steps so far."""
        return len(self.history.elbo)

    def to_checkpoint(self, header: dict[str, Any]) -> Checkpoint:
        """As it is stored; the header says what is fitted."""
        key = storage.to_arrays("key", jax.random.key_data(self.rng_key))
        arrays = key | storage.to_arrays("run", self[1:])
        about = {"steps_done": self.steps_done, "versions": storage.versions()}
        return Checkpoint(header | about, arrays)

    @staticmethod
    def from_checkpoint(stored: Checkpoint, state: SemiTrainState) -> "SemiRun":
        """As it was when it was stored; ``state`` is one of the same shape."""
        history = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((stored.header["steps_done"],), leaf.dtype),
            no_history(state),
        )
        state, history = storage.from_arrays("run", stored.arrays, (state, history))
        return SemiRun(stored_key(stored), state, jax.tree.map(np.asarray, history))


def stored_key(stored: Checkpoint) -> PRNGKey:
    """The key of a stored fit."""
    like = jax.random.key_data(jax.random.key(0))
    return jax.random.wrap_key_data(storage.from_arrays("key", stored.arrays, like))


def first_run(rng_key: PRNGKey, state: SemiTrainState) -> SemiRun:
    """A run of no steps yet, with a key of the typed kind."""
    return SemiRun(rng_key, state, no_history(state))


def no_history(state: SemiTrainState) -> SemiTrainInfo:
    """The history of no steps."""
    dtype = state.guide_state["value"].dtype
    kinds: Any = (dtype, dtype, np.int32, np.int32, bool)
    return SemiTrainInfo(*[np.zeros(0, kind) for kind in kinds])  # pyright: ignore


def fit(
    rng_key: PRNGKey,
    guide: AutoSemiRVRS,
    arguments: Arguments,
    *,
    batch_size: int | None,
    num_steps: int,
    learning_rate: float | None,
    progress: bool,
    callback: Callback | None,
    checkpoint: str | PathLike[str] | None,
    resume: str | PathLike[str] | None,
    mesh: Mesh | None,
) -> SemiFit:
    """Train a guide with local latents; see :func:`rvrs.fit`."""
    began = time.perf_counter()
    if learning_rate is not None:
        checks.check_positive("learning_rate", learning_rate)
    if checkpoint is not None:
        storage.check_writable(checkpoint)
    stored = None if resume is None else processes.read(Path(resume))
    # Of the typed kind from here on, so that a stored key is enough to go on.
    rng_key = jax.random.wrap_key_data(jax.random.key_data(rng_key))
    rng_key = rng_key if stored is None else stored_key(stored)
    trainer, params = prepare(rng_key, guide, arguments, batch_size, learning_rate, mesh)
    devices = 1 if trainer.spread is None else trainer.spread.num_devices
    plan = {"num_steps": num_steps, "devices": devices} | _describe(trainer, params, arguments)
    state = trainer.first_state(params)
    if stored is None:
        run = warm_up(first_run(rng_key, state), trainer, num_steps, progress)
    else:
        storage.refuse_differences(cast(str, resume), stored.header, plan)
        run = SemiRun.from_checkpoint(stored, state)
        checkpoint = resume if checkpoint is None else checkpoint
    run = train(run, trainer, num_steps, progress, callback, checkpoint, plan)
    return _evaluate(run, trainer, plan, began)


def load(
    path: str | PathLike[str], stored: Checkpoint, guide: AutoSemiRVRS, arguments: Arguments
) -> SemiFit:
    """A finished fit from its file; see :func:`rvrs.load`."""
    header = stored.header
    trainer, params = prepare(
        stored_key(stored), guide, arguments, header["batch_size"], header["learning_rate"]
    )
    storage.refuse_differences(path, header, _describe(trainer, params, arguments))
    run = SemiRun.from_checkpoint(stored, trainer.first_state(params))
    return _result(run, trainer, header)


def _describe(trainer: Trainer, params: dict[str, PyTree], arguments: Arguments) -> dict[str, Any]:
    """What a stored fit is told by."""
    return {
        "guide": "AutoSemiRVRS",
        "batch_size": trainer.batch_size,
        "num_points": trainer.data.num_points,
        "learning_rate": trainer.learning_rate,
        "settings": vars(trainer.guide.settings) | {"prefix": trainer.guide.prefix},
        "parameters": {name: str(jax.tree.map(jnp.shape, v)) for name, v in params.items()},
        "arguments": storage.describe_arguments(arguments),
    }


def prepare(
    rng_key: PRNGKey,
    guide: AutoSemiRVRS,
    arguments: Arguments,
    batch_size: int | None,
    learning_rate: float | None,
    mesh: Mesh | None = None,
) -> tuple[Trainer, dict[str, PyTree]]:
    """What trains on batches of the data, and the first parameters."""
    whole = guide.plate_of(arguments)
    num_points = whole.size
    size = whole.num_rows if batch_size is None else batch_size
    checks.check_count("batch_size", size)
    spread, shards, per_epoch = None, (), 0
    if mesh is not None and mesh.devices.size > 1:
        spread = spreading.over(mesh, num_points, size)
        shards = spread.shards
        per_epoch = spread.smallest // (size // spread.num_devices)
        size = size // spread.num_devices * len(shards)
    if size > num_points:
        raise ValueError(
            f"batch_size={size} is more than the {num_points} data points of plate {whole.name!r}."
        )
    leaves = jax.tree.leaves(arguments)
    row_leaves = ()
    if whole.row_leaves:
        if whole.num_rows < num_points:
            raise ValueError(
                f"the arguments hold {whole.num_rows} of the {num_points} data points of plate "
                f"{whole.name!r}; pass all of the data, and batch_size={whole.num_rows}."
            )
        row_leaves = tuple(
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array | np.ndarray) and leaf.shape[:1] == (num_points,)
        )
    else:
        # The model finds its rows by index, so all of the data is on the device; once.
        arguments = jax.tree.map(_on_device, arguments)
    keys = _Keys(*jax.random.split(rng_key, len(_Keys._fields)))
    seed = tuple(int(word) for word in np.asarray(jax.random.key_data(keys.batches)).ravel())
    data = Batches(arguments, row_leaves, num_points, size, seed, shards, per_epoch)
    first = data.take(data.indices(0, 1)[0])
    plate = guide.plate_of(first)
    params, transforms = guide.initial_parameters(keys.initial, first, num_points)
    trainer = Trainer(guide, plate, transforms, data, learning_rate, spread)
    if spread is not None and spread.num_devices > len(shards):
        _refuse_tables_of_guides(trainer, params)
    return trainer, params


def _refuse_tables_of_guides(trainer: Trainer, params: dict[str, PyTree]) -> None:
    """Parameters of a user's guide are the same in all processes, which these could not be."""
    for name, value in trainer.split(params)[1].items():
        if trainer.of_points(value):
            raise ValueError(
                f"the parameter {name!r} of local_guide seems to have one row per data point, and "
                "these are not the same in all processes; leave local_guide out, or use one that "
                "computes its parameters from the data (an encoder)."
            )


def _on_device(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def warm_up(run: SemiRun, trainer: Trainer, num_steps: int, progress: bool) -> SemiRun:
    """Start a run of ``num_steps`` steps by some without rejection."""
    state, key = trainer.place(run.state), run.keys.warm_up
    total = int(_WARM_UP * num_steps)
    with _bar(trainer, total, 0, "warm-up", progress, leave=False) as bar:
        for start in range(0, total, trainer.chunk_size):
            length = min(trainer.chunk_size, total - start)
            state, info = trainer.run_chunk("warm-up", key, state, start, length, total)
            bar.set_postfix_str(f"ELBO {_mean(info.elbo):.3f}", refresh=False)
            bar.update(length / trainer.data.per_epoch)
    # What was learned without rejection is the start; the optimizer's memory of it is not.
    params = trainer.constrain(trainer.fetch(state).trainable)
    return run._replace(state=trainer.first_state(params))


def train(
    run: SemiRun,
    trainer: Trainer,
    num_steps: int,
    progress: bool,
    callback: Callback | None,
    checkpoint: str | PathLike[str] | None,
    header: dict[str, Any],
) -> SemiRun:
    """Take the steps of a run that are left."""
    key, run = run.keys.training, run._replace(state=trainer.place(run.state))
    with _bar(trainer, num_steps, run.steps_done, "RVRS", progress) as bar:
        while run.steps_done < num_steps:
            length = min(trainer.chunk_size, num_steps - run.steps_done)
            state, info = trainer.run_chunk(
                "training", key, run.state, run.steps_done, length, num_steps
            )
            info = jax.tree.map(np.asarray, info)
            history = jax.tree.map(lambda *parts: np.concatenate(parts), run.history, info)
            run = run._replace(state=state, history=history)
            bar.set_postfix_str(_status(trainer, info), refresh=False)
            bar.update(length / trainer.data.per_epoch)
            if checkpoint is not None:
                whole = run._replace(state=trainer.fetch(run.state))
                processes.write(Path(checkpoint), whole.to_checkpoint(header))
            if callback is not None:
                callback(run.steps_done, info)
    return run._replace(state=trainer.fetch(run.state))


def _bar(
    trainer: Trainer, num_steps: int, done: int, title: str, progress: bool, leave: bool = True
) -> Any:
    epochs = trainer.data.per_epoch
    return tqdm(
        total=round(num_steps / epochs, 2),
        initial=round(done / epochs, 2),
        desc=title,
        unit="epoch",
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n:.1f}/{total:.1f} epochs "
        "[{elapsed}<{remaining}{postfix}]",
        disable=not progress,
        leave=leave,
    )


def _status(trainer: Trainer, info: SemiTrainInfo) -> str:
    draws = trainer.guide.settings.num_samples * trainer.batch_size
    dropped = info.num_dropped.mean() / trainer.batch_size
    return (
        f"ELBO {_mean(info.elbo):.3f}, acceptance {info.acceptance.mean():.3f}, "
        f"{info.num_proposals.mean() / draws:.1f} proposals per draw"
        + (f", {100 * dropped:.1f} % of points dropped" if dropped else "")
    )


def _mean(values: Any) -> float:
    with warnings.catch_warnings():
        # There may be nothing but NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(np.nanmean(values))


def _evaluate(run: SemiRun, trainer: Trainer, plan: dict[str, Any], began: float) -> SemiFit:
    found = evaluate(run.keys.evaluation, trainer, trainer.constrain(run.state.trainable))
    acceptances = np.exp(np.asarray(found.log_normalizer, float))
    figures: dict[str, Any] = {
        name: float(getattr(found, name))
        for name in ("elbo", "elbo_error", "elbo_bias", "marginal_elbo", "marginal_elbo_error")
    } | {
        "acceptance": float(acceptances.mean()),
        "acceptance_range": np.quantile(acceptances, [0.05, 0.95]).tolist(),
        "warnings": _concerns(trainer, run.history, found),
        "seconds": time.perf_counter() - began,
    }
    for concern in figures["warnings"]:
        warnings.warn(concern, stacklevel=4)
    return _result(run, trainer, plan | {"figures": figures})


def _result(run: SemiRun, trainer: Trainer, header: dict[str, Any]) -> SemiFit:
    history, data, figures = run.history, trainer.data, header["figures"]
    draws = trainer.guide.settings.num_samples * trainer.batch_size
    lists = {name: tuple(figures[name]) for name in ("warnings", "acceptance_range")}
    return SemiFit(
        guide=trainer.guide,
        params=trainer.constrain(run.state.trainable),
        losses=np.asarray(-history.elbo),
        acceptances=np.asarray(history.acceptance),
        proposals_per_draw=np.asarray(history.num_proposals) / draws,
        dropped=np.asarray(history.num_dropped) / trainer.batch_size,
        thresholds=np.asarray(run.state.guide_state["value"]),
        data=data,
        checkpoint=run.to_checkpoint(header),
        **figures | lists,
    )


def evaluate(
    rng_key: PRNGKey, trainer: Trainer, params: dict[str, PyTree]
) -> posterior.SemiEvidence:
    """The ELBO of all data from a sample of its points."""
    guide, data = trainer.guide, trainer.data
    num_global = 1 if guide.global_guide is None else _EVALUATION_GLOBALS
    chosen = np.random.default_rng([*data.seed, 0, 0]).permutation(data.num_points)
    chosen = np.sort(chosen[:_EVALUATION_POINTS]).astype(np.int32)
    parts = []
    for start in range(0, len(chosen), _ROWS_AT_ONCE):
        index = chosen[start : start + _ROWS_AT_ONCE]
        arguments = data.take(index)
        static = (guide, guide.plate_of(arguments), num_global, _EVALUATION_PROPOSALS)
        dynamic = (rng_key, params, jnp.asarray(index))
        parts.append(guide.programs.call(posterior.evaluate, static, dynamic, arguments))
    own = posterior.together(parts)
    rows = jax.tree.map(lambda _: -1, own)._replace(elbo=0, log_normalizer=0, threshold=0)
    return posterior.summarize(spreading.of_all_processes(own, rows), trainer.num_points)


# Share of points beyond which a fit is doubtful, and of the target acceptance below which one of
# them is.
_DROPPED_LIMIT = 0.2
_ACCEPTANCE_LIMIT = 0.2


def _concerns(trainer: Trainer, history: SemiTrainInfo, found: posterior.SemiEvidence) -> list[str]:
    concerns = []
    last = history.num_dropped[-trainer.data.per_epoch :].mean() / trainer.batch_size
    if last > _DROPPED_LIMIT:
        concerns.append(
            f"{100 * last:.0f} % of the data points of a batch did not get their draws and were "
            "left out, which biases the fit; raise num_proposals (or max_proposals), or use "
            "sampler='exact'."
        )
    skipped = np.mean(history.skipped)
    if skipped > 0:
        concerns.append(
            f"{100 * skipped:.2g} % of the steps had no finite loss or gradient and were skipped; "
            "check the data and the model's density."
        )
    if trainer.guide.settings.threshold is None:
        acceptances = np.exp(np.asarray(found.log_normalizer, float))
        target = trainer.guide.settings.target_acceptance
        num_low = int(np.sum(acceptances < _ACCEPTANCE_LIMIT * target))
        if num_low:
            concerns.append(
                f"{num_low} of {acceptances.size} data points accept less than "
                f"{_ACCEPTANCE_LIMIT:g} of the target {target:g} whatever their threshold: their "
                "density may be non-finite over most of the proposal; check the model's support "
                "and the data there."
            )
    # The bias has been taken away; what is left is of the order of its square, for each point.
    if found.elbo_bias**2 / trainer.num_points > found.elbo_error:
        concerns.append(
            f"the bias of the ELBO ({float(found.elbo_bias):.3g} before it was taken away) is so "
            "large that what is left of it may exceed the error; evaluate with more proposals: "
            "fit.guide.evaluate(..., num_local=...)."
        )
    return concerns
