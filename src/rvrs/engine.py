"""Using a trained proposal: calibrate T to it, draw from ``r`` and estimate its ELBO.

Shared by everything that trains proposals. All of it is done in chunks, so that memory does not
grow with the number of proposals.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rvrs.core import acceptance, evidence, rejection, threshold
from rvrs.core.evidence import Evidence
from rvrs.core.problem import PRNGKey, Problem, PyTree, Targets, log_weights
from rvrs.core.randomness import unrolled
from rvrs.core.rejection import Tally
from rvrs.core.threshold import ThresholdState
from rvrs.settings import Settings

# Proposals, over all targets, that are evaluated at once.
_CHUNK = 2_000
# T is solved from as many proposals as give this many accepted draws: then Z is within about 1.4 %
# (one standard deviation) of its target.
_CALIBRATION_DRAWS = 5_000
# However small the target acceptance, no more proposals than this.
_MOST_CALIBRATION_PROPOSALS = 200_000


def calibrate(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    settings: Settings,
    num_draws: int = _CALIBRATION_DRAWS,
) -> jax.Array:
    """T of every target, solved from fresh proposals; or as the settings fix it."""
    if settings.threshold is not None or settings.target_acceptance == 1:
        lw = jnp.zeros((1, targets.num_targets), jnp.result_type(*jax.tree.leaves(targets[0])))
    else:
        lw = calibration_weights(rng_key, problem, targets, settings, num_draws)
    return solve_threshold(lw, settings)


def calibration_weights(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    settings: Settings,
    num_draws: int = _CALIBRATION_DRAWS,
) -> jax.Array:
    """Log weights ``(n, B)`` of fresh proposals, enough of them to solve for T."""
    return fresh_weights(rng_key, problem, targets, _num_calibration(settings, num_draws))


def evaluation_weights(
    rng_key: PRNGKey, problem: Problem, targets: Targets, settings: Settings, num_draws: int
) -> jax.Array:
    """Log weights ``(n, B)`` of fresh proposals for :func:`evaluate_weights`."""
    wanted = math.ceil(num_draws / settings.target_acceptance)
    return fresh_weights(rng_key, problem, targets, wanted + _num_calibration(settings))


def _num_calibration(settings: Settings, num_draws: int = _CALIBRATION_DRAWS) -> int:
    return math.ceil(min(num_draws / settings.target_acceptance, _MOST_CALIBRATION_PROPOSALS))


def fresh_weights(
    rng_key: PRNGKey, problem: Problem, targets: Targets, wanted: int, at_once: int = _CHUNK
) -> jax.Array:
    """Log weights ``(wanted, B)`` of proposals, of which ``at_once`` are in memory at a time."""
    per_chunk = min(wanted, max(1, at_once // targets.num_targets))

    def chunk(key: PRNGKey) -> jax.Array:
        noise = problem.sample_noise(key, (per_chunk, targets.num_targets))
        return log_weights(problem, targets, noise)

    keys = jax.random.split(unrolled(rng_key), math.ceil(wanted / per_chunk))
    return lax.map(chunk, keys).reshape(-1, targets.num_targets)[:wanted]


def solve_threshold(lw: jax.Array, settings: Settings) -> jax.Array:
    """T from log weights ``(n, B)``, unless the settings fix it."""
    if settings.threshold is not None:
        return jnp.full(lw.shape[1:], settings.threshold, lw.dtype)
    return threshold.calibrate(lw, settings.target_acceptance, settings.epsilon)


def first_threshold(lw: jax.Array, settings: Settings, memory: float = 0.0) -> ThresholdState:
    """T solved from log weights ``(n, B)``, and what else they tell the first step.

    ``memory`` is the number of steps that they count for.
    """
    state = threshold.init(solve_threshold(lw, settings), memory)
    return threshold.observe_weights(state, lw, settings.epsilon, settings.block_size)


def follow(
    state: ThresholdState, tally: Tally, settings: Settings, block_size: int
) -> ThresholdState:
    """What is known of T after a step with these proposals; T itself, unless it is fixed."""
    observed = threshold.observe(state, tally)
    if settings.threshold is None:
        observed = threshold.adapt(
            observed,
            tally,
            settings.target_acceptance,
            block_size=block_size,
            rule=settings.threshold_rule,
        )
    # Whatever happens, T stays a number.
    return jax.tree.map(lambda new, old: jnp.where(jnp.isnan(new), old, new), observed, state)


def centring(state: ThresholdState, settings: Settings) -> dict[str, Any]:
    """What the objective subtracts from ``A``, as its keyword arguments."""
    running = multiplier = None
    if settings.baseline == "running":
        running = threshold.mean_log_ratio(state)
    if settings.follows_target:
        multiplier = threshold.multiplier(state)
        if running is not None:
            # While the proposal is on its way A grows fast, and a mean over past steps lags so far
            # behind that it would stop the proposal.
            running = jnp.where(threshold.is_settled(state), running, jnp.nan)
    return {"running_log_ratio": running, "multiplier": multiplier}


class Evaluation(NamedTuple):
    """A trained proposal at its T, judged by many proposals."""

    evidence: Evidence
    log_ratio: np.ndarray
    """``A`` of the proposals that were accepted: log weights of draws against the posterior."""


def evaluate_weights(rng_key: PRNGKey, lw: jax.Array, settings: Settings) -> Evaluation:
    """Judge one target by log weights ``(n,)`` of proposals.

    The first of them serve to solve for T, the others to estimate, so that the estimates are
    not biased by the choice of T.
    """
    first = _num_calibration(settings)
    estimates, log_ratio, accepted = _evaluate_weights(rng_key, lw[:first], lw[first:], settings)
    return Evaluation(estimates, np.asarray(log_ratio)[np.asarray(accepted)])


@partial(jax.jit, static_argnames="settings")
def _evaluate_weights(
    rng_key: PRNGKey, first: jax.Array, lw: jax.Array, settings: Settings
) -> tuple[Evidence, jax.Array, jax.Array]:
    t = solve_threshold(first[:, None], settings)
    estimates = evidence.from_log_weights(lw[:, None], t, epsilon=settings.epsilon)
    a = acceptance.evaluate(lw, t, settings.epsilon)
    accepted = rejection.accept(rng_key, a.probability)
    return jax.tree.map(lambda leaf: leaf[0], estimates), a.log_ratio, accepted


def draw(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    t: jax.Array,
    settings: Settings,
    num_samples: int,
    finish: Callable[[PyTree, jax.Array, jax.Array], PyTree],
) -> PyTree:
    """``num_samples`` accepted draws of every target, as ``finish`` makes them of a chunk.

    It is given their noise, leaves ``(n, B, ...)``, their log weights ``(n, B)``, and flags
    ``(n, B)`` that are False where ``max_proposals`` was hit and there is no draw. Only what it
    returns is kept of a chunk, so that memory beyond the result does not grow with the draws.
    """
    num_targets = targets.num_targets
    per_chunk = max(1, int(_CHUNK * settings.target_acceptance) // num_targets)
    per_chunk = min(num_samples, per_chunk)
    # Three standard deviations more than the average need, so that one block nearly always does.
    block = rejection.block_size(per_chunk + 3 * math.isqrt(per_chunk), settings.target_acceptance)

    def draw_chunk(key: PRNGKey) -> PyTree:
        draws = rejection.draw_exact(
            key,
            problem,
            targets,
            t,
            num_samples=per_chunk,
            epsilon=settings.epsilon,
            block_size=block,
            max_proposals=math.ceil(settings.max_proposals / settings.num_samples) * per_chunk,
        )
        complete = jnp.broadcast_to(draws.complete, (per_chunk, num_targets))
        return finish(draws.noise, draws.log_weight, complete)

    keys = jax.random.split(rng_key, math.ceil(num_samples / per_chunk))
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:num_samples], lax.map(draw_chunk, keys)
    )


def evaluate(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    t: jax.Array,
    settings: Settings,
    num_proposals: int,
) -> Evidence:
    """ELBO, log Z and log evidence of every target from ``num_proposals`` proposals each."""
    return evidence.estimate(
        rng_key,
        problem,
        targets,
        t,
        num_proposals=num_proposals,
        epsilon=settings.epsilon,
        chunk_size=_CHUNK,
    )
