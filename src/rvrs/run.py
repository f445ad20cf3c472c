"""A fit under way: find a start, warm up, train; stored and taken up again."""

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

from rvrs import processes, spread, storage, training, warmstart
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.guides import AutoRVRS
from rvrs.guides._numpyro import Arguments, named_arguments
from rvrs.storage import Checkpoint
from rvrs.training import TrainInfo, TrainState

# Steps without rejection that bring the proposal from the mode to the posterior's mass.
_WARM_UP_STEPS = 2_000
# Progress is shown, and stored, after so many steps.
CHUNK = 500

Callback = Callable[[int, TrainInfo], None]


class Run(NamedTuple):
    """A fit under way."""

    rng_key: PRNGKey
    """Key of the evaluation; those of the steps derive from the other one."""
    train_key: PRNGKey
    state: TrainState
    frame: PyTree
    history: TrainInfo
    """Of all training steps so far, as NumPy arrays."""

    @property
    def steps_done(self) -> int:
        """Training steps so far."""
        return len(self.history.elbo)

    def to_checkpoint(self, header: dict[str, Any]) -> Checkpoint:
        """As it is stored; the header says what is fitted."""
        keys = [jax.random.key_data(key) for key in (self.rng_key, self.train_key)]
        arrays = storage.to_arrays("keys", keys) | storage.to_arrays("run", self[2:])
        about = {"steps_done": self.steps_done, "versions": storage.versions()}
        return Checkpoint(header | about, arrays)

    @staticmethod
    def from_checkpoint(stored: Checkpoint, guide: AutoRVRS, arguments: Arguments) -> "Run":
        """As it was when it was stored."""
        keys = [jax.random.key_data(jax.random.key(0))] * 2
        keys = storage.from_arrays("keys", stored.arrays, keys)
        state, frame = jax.eval_shape(lambda: _first(guide, arguments, _trivial_start(guide)))
        steps = stored.header["steps_done"]
        history = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((steps,), leaf.dtype), _no_history(state)
        )
        state, frame, history = storage.from_arrays("run", stored.arrays, (state, frame, history))
        history = jax.tree.map(np.asarray, history)
        rng_key, train_key = (jax.random.wrap_key_data(key) for key in keys)
        return Run(rng_key, train_key, state, frame, history)


def params(run: Run, guide: AutoRVRS) -> dict[str, Any]:
    """Parameters of guide and model, by the names of their sites."""
    phi, theta = training.parameters(guide, run.state.trainable, run.frame)
    return guide.proposal.sites(phi) | theta


def _theta(guide: AutoRVRS) -> dict[str, Any]:
    """Initial values of the model's parameters."""
    return {
        name: site["value"]
        for name, site in guide.prototype_trace.items()
        if site["type"] == "param"
    }


def _trivial_start(guide: AutoRVRS) -> tuple[jax.Array, jax.Array]:
    """Around the point that NumPyro found, where nothing better was."""
    scale = jnp.full_like(guide._init_latent, guide.settings.init_scale)
    triangular = guide.settings.proposal.closed_under == "triangular"
    return guide._init_latent, jnp.diag(scale) if triangular else scale


def _first(
    guide: AutoRVRS, arguments: Arguments, start: tuple[jax.Array, jax.Array]
) -> tuple[TrainState, PyTree]:
    trainable, frame = training.first_trainable(guide, _theta(guide), *start)
    return training.first_state(guide, trainable, frame, arguments), frame


def _no_history(state: TrainState) -> TrainInfo:
    dtype = state.guide_state["value"].dtype
    kinds: Any = (dtype, dtype, dtype, np.int32, bool, bool)
    return TrainInfo(*[cast(Any, np.zeros(0, kind)) for kind in kinds])


def start(
    rng_key: PRNGKey, guide: AutoRVRS, arguments: Arguments, *, given: bool, progress: bool
) -> Run:
    """Find a start, warm up, and calibrate T.

    ``given`` is whether to search from the guide's own initial point instead of random ones.
    """
    # Of the typed kind from here on, so that a stored key is enough to go on.
    rng_key = jax.random.wrap_key_data(jax.random.key_data(rng_key))
    start_key, warm_key, train_key, rng_key = jax.random.split(rng_key, 4)

    def call(function: Callable, static: tuple, dynamic: tuple) -> Any:
        return guide.with_log_density(function, static, dynamic, _theta(guide), arguments)

    with tqdm(total=_WARM_UP_STEPS, desc="warm-up", disable=not progress, leave=False) as bar:
        found = warmstart.find_start(
            start_key,
            call,
            guide.latent_dim,
            guide.settings.proposal.closed_under,
            given=guide._init_latent if given else None,
        )
        if jnp.isfinite(found.elbo):
            place = (found.location, found.scale)
        else:
            _refuse_infinite_density(call, guide, arguments)
            place = _trivial_start(guide)
        state, frame = _first(guide, arguments, place)
        steps = (0, _WARM_UP_STEPS, _WARM_UP_STEPS, _WARM_UP_STEPS)
        state, _ = training.run_chunk(guide, "warm-up", warm_key, state, frame, *steps, arguments)
        bar.update(_WARM_UP_STEPS)
    proposal, frame = guide.proposal.reframe(state.trainable.proposal, frame)
    trainable = state.trainable._replace(proposal=proposal)
    state = training.first_state(guide, trainable, frame, arguments)
    return Run(rng_key, train_key, state, frame, _no_history(state))


def _refuse_infinite_density(call: Callable, guide: AutoRVRS, arguments: Arguments) -> None:
    value = call(_log_density_at, (), (guide._init_latent,))
    if jnp.isfinite(value):
        return
    named = named_arguments(guide.model, arguments)
    broken = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, leaf in jax.tree_util.tree_leaves_with_path(named)
        if isinstance(leaf, jax.Array | np.ndarray)
        and np.issubdtype(leaf.dtype, np.inexact)
        and not np.all(np.isfinite(leaf))
    ]
    cause = f" (there are NaN or infinities in the arguments {', '.join(broken)})" if broken else ""
    raise ValueError(
        f"the model's log density is {value} at the initial point{cause}; check the data, or "
        "start inside the support with a guide of your own and its init_loc_fn."
    )


def _log_density_at(z: jax.Array, log_density: Callable) -> jax.Array:
    return log_density(z)


def train(
    run: Run,
    guide: AutoRVRS,
    arguments: Arguments,
    num_steps: int,
    progress: bool,
    callback: Callback | None,
    checkpoint: str | PathLike[str] | None,
    header: dict[str, Any],
    mesh: Mesh | None = None,
) -> Run:
    """Take the steps that are left, in chunks; show and store the progress after each."""
    if mesh is not None:
        # Once, not for every chunk.
        arguments = spread.replicate(mesh, arguments)
    with tqdm(total=num_steps, initial=run.steps_done, desc="RVRS", disable=not progress) as bar:
        while run.steps_done < num_steps:
            length = min(CHUNK, num_steps - run.steps_done)
            state, info = training.run_chunk(
                guide,
                "training",
                run.train_key,
                run.state,
                run.frame,
                run.steps_done,
                length,
                num_steps,
                CHUNK,
                arguments,
                mesh,
            )
            if mesh is not None:
                state, info = spread.fetch((state, info))
            info = jax.tree.map(np.asarray, info)
            history = jax.tree.map(lambda *parts: np.concatenate(parts), run.history, info)
            run = run._replace(state=state, history=history)
            bar.set_postfix_str(_status(info, guide.settings.num_samples), refresh=False)
            bar.update(length)
            if checkpoint is not None:
                processes.write(Path(checkpoint), run.to_checkpoint(header))
            if callback is not None:
                callback(run.steps_done, info)
    return run


def _status(info: TrainInfo, num_samples: int) -> str:
    """Means over the latest steps, and the latest T."""
    with warnings.catch_warnings():
        # All steps may have been capped.
        warnings.simplefilter("ignore", RuntimeWarning)
        elbo = np.nanmean(info.elbo)
    return (
        f"ELBO {elbo:.3f}, acceptance {info.acceptance.mean():.3f}, "
        f"T {info.threshold[-1]:.2f}, "
        f"{info.num_proposals.mean() / num_samples:.1f} proposals per draw"
    )
