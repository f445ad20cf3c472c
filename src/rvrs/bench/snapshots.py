"""Parameters along the way of a training, and the seconds that it took to get there.

Compilation does not count: all programs are compiled when a run begins. Nor does what a snapshot
costs, which is looked at afterwards.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from rvrs import run as running
from rvrs import training, warmstart
from rvrs.bench.peers import Estimate, Trainer
from rvrs.core.problem import PyTree
from rvrs.guides import AutoRVRS
from rvrs.guides._numpyro import Arguments
from rvrs.training import Stage, Trainable, TrainState

# Steps of a stage of rvrs.fit after which there is a snapshot: all of the multiples of the last.
_EARLY_STEPS = (25, 50, 100, 200, 350, 500)
# Draws that one estimate of the ELBO of rvrs.fit is made of.
_DRAWS = 4_000


class Snapshot(NamedTuple):
    """A state of a training."""

    seconds: float
    label: str
    parameters: Any


class Curve(NamedTuple):
    """A training, and how to judge its parameters."""

    snapshots: list[Snapshot]
    bound: Callable[[jax.Array, Any], Estimate]


class _Clock:
    """Seconds spent in its context, all in all."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time that this context takes."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def of_fit(rng_key: jax.Array, guide: AutoRVRS, arguments: Arguments, num_steps: int) -> Curve:
    """What :func:`rvrs.fit` does from its first line to the last training step.

    The guide is that of a fit, of a model without parameters of its own; its proposal is one of
    those that have a name.
    """
    _FitRun(guide, arguments, num_steps).run(rng_key)
    # Once more, now that all is compiled.
    snapshots = _FitRun(guide, arguments, num_steps).run(rng_key)
    args, kwargs = arguments

    def bound(rng_key: jax.Array, parameters: dict[str, Any]) -> Estimate:
        found = guide.evaluate(rng_key, parameters, *args, num_draws=_DRAWS, **kwargs)
        return Estimate(float(found.elbo), float(found.elbo_error))

    return Curve(snapshots, bound)


class _FitRun:
    """The stages of :func:`rvrs.run.start` and :func:`rvrs.run.train`, taken apart."""

    def __init__(self, guide: AutoRVRS, arguments: Arguments, num_steps: int) -> None:
        self._guide, self._arguments = guide, arguments
        self._num_steps: dict[Stage, int] = {
            "warm-up": running._WARM_UP_STEPS,
            "training": num_steps,
        }
        # Those of the programs that rvrs.fit has compiled.
        self._chunk_sizes: dict[Stage, int] = {
            "warm-up": running._WARM_UP_STEPS,
            "training": running.CHUNK,
        }
        self._clock, self._calibration = _Clock(), _Clock()
        self._snapshots: list[Snapshot] = []

    def run(self, rng_key: jax.Array) -> list[Snapshot]:
        """All stages, with the random keys of a fit."""
        guide = self._guide
        start_key, warm_key, train_key, _ = jax.random.split(rng_key, 4)
        with self._clock.running():
            shape = guide.settings.proposal.closed_under
            found = warmstart.find_start(start_key, self._call, guide.latent_dim, shape)
            trainable, frame = training.first_trainable(guide, {}, found.location, found.scale)
        state = self._calibrated(trainable, frame)
        self._snap("start", state, frame)
        state = self._train("warm-up", warm_key, state, frame)
        with self._clock.running():
            proposal, frame = guide.proposal.reframe(state.trainable.proposal, frame)
            trainable = state.trainable._replace(proposal=proposal)
        state = self._calibrated(trainable, frame)
        self._train("training", train_key, state, frame)
        return self._snapshots

    def _call(self, function: Callable, static: tuple, dynamic: tuple) -> Any:
        return self._guide.with_log_density(function, static, dynamic, {}, self._arguments)

    def _calibrated(self, trainable: Trainable, frame: PyTree) -> TrainState:
        with self._clock.running(), self._calibration.running():
            state = training.first_state(self._guide, trainable, frame, self._arguments)
            return jax.block_until_ready(state)

    def _train(self, stage: Stage, key: jax.Array, state: TrainState, frame: PyTree) -> TrainState:
        total, size = self._num_steps[stage], self._chunk_sizes[stage]
        done = 0
        while done < total:
            end = next((step for step in _EARLY_STEPS if step > done), done + _EARLY_STEPS[-1])
            length = min(end, total) - done
            counts = (done, length, total, size)
            with self._clock.running():
                state, _ = jax.block_until_ready(
                    training.run_chunk(
                        self._guide, stage, key, state, frame, *counts, self._arguments
                    )
                )
            done += length
            self._snap(f"{stage} {done}", state, frame)
        return state

    def _snap(self, label: str, state: TrainState, frame: PyTree) -> None:
        phi, theta = training.parameters(self._guide, state.trainable, frame)
        seconds = self._clock.seconds
        if label.startswith("warm-up"):
            # Whoever stops here has T to solve for.
            seconds += self._calibration.seconds
        parameters = self._guide.proposal.sites(phi) | theta
        self._snapshots.append(Snapshot(seconds, label, parameters))


def of_peer(
    rng_key: jax.Array,
    peer: Trainer,
    num_steps: int,
    *,
    learning_rate: float,
    decays: bool,
    num_snapshots: int = 30,
) -> Curve:
    """A peer's training from its own initial state, with a constant rate or one that decays."""
    state = peer.start(
        rng_key, learning_rate=learning_rate, horizon=num_steps if decays else math.inf
    )
    pace = f"{learning_rate:g} {'cosine' if decays else 'constant'}"
    clock, snapshots, done = _Clock(), [], 0
    jax.block_until_ready(peer.advance(state, 1))  # compiled
    # Denser at the beginning, where the bound moves fast.
    first = max(1, num_steps // 1000)
    for step in np.unique(np.geomspace(first, num_steps, num_snapshots).astype(int)).tolist():
        with clock.running():
            state = jax.block_until_ready(peer.advance(state, step - done))
        done = step
        label = f"{pace} {done}/{num_steps}"
        snapshots.append(Snapshot(clock.seconds, label, peer.parameters(state)))
    return Curve(snapshots, peer.bound)


def affordable_steps(peer: Trainer, seconds: float, most: int) -> int:
    """How many steps of a peer fit into so many seconds."""
    state = peer.start(jax.random.key(0), learning_rate=1e-3)
    state = jax.block_until_ready(peer.advance(state, 1))
    trial = 200
    began = time.perf_counter()
    jax.block_until_ready(peer.advance(state, trial))
    per_step = (time.perf_counter() - began) / trial
    return max(1, min(most, int(seconds / per_step)))
