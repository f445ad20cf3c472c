"""Many gradients at one proposal, by the estimators of RVRS and VRS, and their variances.

A program of the core with B targets that all have the same parameters gives B independent
gradients at once. Both estimators are given the same accepted draws, which leaves the variance of
each as it is and takes some noise off their ratio.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from rvrs.core import rejection
from rvrs.core.objectives import Estimator, elbo_surrogate
from rvrs.core.problem import PRNGKey, Targets
from rvrs.experiments import logistic_model
from rvrs.experiments.experiment import DivergedError, Report
from rvrs.experiments.logistic_model import Data
from rvrs.proposals import DiagonalNormal, diagonal_normal

Part = Literal["mean", "scale"]
"""The parameters of a mean-field normal."""

_ESTIMATORS: dict[str, Estimator] = {"rvrs": "reparameterized", "vrs": "score"}

# Gradients at once, and how often so many between two reports.
_NUM_TARGETS = 500
_CHUNKS_PER_CALL = 50
# Blocks of chunks that the standard error of a ratio comes from.
_NUM_BLOCKS = 50
# No target ever needs as many on average.
_MAX_PROPOSALS_PER_DRAW = 10_000
# Adam's first rate, which falls to zero along a cosine: of 0.01, 0.03 and 0.1, with and without the
# cosine, this had the highest ELBO after 1000 steps at D = 20, 51 and 62 (one seed).
_LEARNING_RATE = 0.03
_INIT_SCALE = 0.1


class Moments(NamedTuple):
    """Gradients of one estimator, summed up for every chunk: arrays ``(chunks, 2 D)``.

    The first D columns are derivatives with respect to means, the others to scales.
    """

    mean: np.ndarray
    square: np.ndarray
    """Sum of squared deviations from the chunk's own mean."""


class Variances(NamedTuple):
    """Variances of the gradients, summed over coordinates, and their ratio."""

    vrs: float
    rvrs: float
    ratio: float
    ratio_error: float
    """Standard error, by a jackknife over blocks of gradients."""


@partial(jax.jit, static_argnames=("num_steps", "num_samples"))
def mean_field(rng_key: PRNGKey, data: Data, *, num_steps: int, num_samples: int) -> DiagonalNormal:
    """Train a mean-field proposal by the conventional ELBO, from around the origin."""
    # Not by rvrs.vi, whose programs have the data built in, so that each seed would compile.
    problem = logistic_model.mean_field_problem(data.covariates.shape[1])
    optimizer = optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, num_steps))
    start = diagonal_normal().init(jnp.zeros(data.covariates.shape[1]), _INIT_SCALE)

    def loss(parameters: DiagonalNormal, key: PRNGKey) -> jax.Array:
        z, log_q = jax.vmap(problem.propose, in_axes=(None, 0))(
            parameters, problem.sample_noise(key, (num_samples,))
        )
        return jnp.mean(log_q - jax.vmap(problem.log_joint, in_axes=(None, None, 0))(data, None, z))

    def step(carry: Any, key: PRNGKey) -> tuple[Any, None]:
        parameters, opt_state = carry
        updates, opt_state = optimizer.update(jax.grad(loss)(parameters, key), opt_state)
        return (optax.apply_updates(parameters, updates), opt_state), None

    keys = jax.random.split(rng_key, num_steps)
    return lax.scan(step, (start, optimizer.init(start)), keys)[0][0]


class _Chunk(NamedTuple):
    """What is kept of B gradients by each estimator."""

    moments: dict[str, Any]
    acceptance: jax.Array
    num_proposals: jax.Array
    complete: jax.Array


@partial(jax.jit, static_argnames=("num_samples", "epsilon"))
def _chunks(
    keys: PRNGKey,
    data: Data,
    parameters: DiagonalNormal,
    threshold: jax.Array,
    *,
    num_samples: int,
    epsilon: float,
) -> _Chunk:
    """One chunk for every key."""
    problem = logistic_model.mean_field_problem(parameters.loc.size)
    rows = jax.tree.map(lambda leaf: jnp.tile(leaf, (_NUM_TARGETS, 1)), parameters)
    t = jnp.full(_NUM_TARGETS, threshold)

    def chunk(key: PRNGKey) -> _Chunk:
        draws = rejection.draw_exact(
            key,
            problem,
            Targets(rows, data),
            t,
            num_samples=num_samples,
            epsilon=epsilon,
            # T of minus the ELBO accepts about one half.
            block_size=rejection.block_size(num_samples, 0.5),
            max_proposals=_MAX_PROPOSALS_PER_DRAW * num_samples,
            reallocate=True,
        )

        def total(rows: DiagonalNormal, estimator: Estimator) -> jax.Array:
            objective = elbo_surrogate(
                problem, Targets(rows, data), draws, t, epsilon=epsilon, estimator=estimator
            )
            return jnp.sum(objective.surrogate)

        def moments(estimator: Estimator) -> tuple[jax.Array, jax.Array]:
            gradient = jax.grad(total)(rows, estimator)
            # d/d sigma = d/d log(sigma) / sigma.
            by_scale = gradient.log_scale * jnp.exp(-rows.log_scale)
            flat = jnp.concatenate([gradient.loc, by_scale], axis=1)
            mean = jnp.mean(flat, axis=0)
            return mean, jnp.sum((flat - mean) ** 2, axis=0)

        tally = draws.tally
        return _Chunk(
            {name: moments(estimator) for name, estimator in _ESTIMATORS.items()},
            jnp.sum(tally.acceptance),
            jnp.sum(tally.num_proposals),
            jnp.all(draws.complete),
        )

    return lax.map(chunk, keys)


class Gradients(NamedTuple):
    """Many gradients at one proposal and T."""

    moments: dict[str, Moments]
    """By ``"vrs"`` and ``"rvrs"``."""
    acceptance: float


def sample(
    rng_key: PRNGKey,
    data: Data,
    parameters: DiagonalNormal,
    threshold: float,
    *,
    num_gradients: int,
    num_samples: int = 2,
    epsilon: float = 1e-4,
    report: Report = lambda share, words: None,
) -> Gradients:
    """Draw gradients of the ELBO at fixed T by both estimators.

    Their number is rounded up to a whole number of calls of the compiled program. Chunks are
    single precision, which loses nothing: what is added over chunks is double precision.
    """
    calls = math.ceil(num_gradients / (_NUM_TARGETS * _CHUNKS_PER_CALL))
    found = []
    for call in range(calls):
        keys = jax.random.split(jax.random.fold_in(rng_key, call), _CHUNKS_PER_CALL)
        chunks = _chunks(
            keys, data, parameters, jnp.float32(threshold), num_samples=num_samples, epsilon=epsilon
        )
        found.append(jax.tree.map(lambda leaf: np.asarray(leaf, float), chunks))
        report((call + 1) / calls, f"{(call + 1) * _CHUNKS_PER_CALL * _NUM_TARGETS} gradients")
    every = jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
    moments = {name: Moments(*pair) for name, pair in every.moments.items()}
    if not every.complete.all() or not all(
        np.isfinite(each.square).all() for each in moments.values()
    ):
        raise DivergedError("some gradients are not there: nearly everything is rejected")
    # The number of proposals is a stopping time: by Wald's identity this is Z.
    return Gradients(moments, every.acceptance.sum() / every.num_proposals.sum())


def variances(gradients: Gradients, part: Part) -> Variances:
    """Variances with respect to the means or the scales."""
    total, without = {}, {}
    for name, moments in gradients.moments.items():
        columns = np.split(np.arange(moments.mean.shape[1]), 2)[get_args(Part).index(part)]
        total[name], without[name] = _variance(moments.mean[:, columns], moments.square[:, columns])
    ratios = without["vrs"] / without["rvrs"]
    error = math.sqrt((len(ratios) - 1) * np.var(ratios))
    return Variances(total["vrs"], total["rvrs"], total["vrs"] / total["rvrs"], error)


def _variance(mean: np.ndarray, square: np.ndarray) -> tuple[float, np.ndarray]:
    """The summed variance of all gradients, and of those without each block of chunks."""
    deviation = mean - mean.mean(axis=0)
    per_chunk = square + _NUM_TARGETS * deviation**2
    blocks = np.array_split(np.arange(len(mean)), min(_NUM_BLOCKS, len(mean)))
    counts = np.array([_NUM_TARGETS * len(block) for block in blocks])
    # Sums of deviations from the mean of all, which add up to zero, and of their squares.
    first = np.stack([_NUM_TARGETS * deviation[block].sum(axis=0) for block in blocks])
    second = np.stack([per_chunk[block].sum(axis=0) for block in blocks])
    rest = (counts.sum() - counts)[:, None]
    without = (second.sum(axis=0) - second - first**2 / rest) / (rest - 1)
    return float(np.sum(second) / (counts.sum() - 1)), without.sum(axis=1)
