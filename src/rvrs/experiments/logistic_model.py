"""Bayesian logistic regression with standard normal coefficients, for several experiments.

It comes twice: as a NumPyro model, and as a problem of the core, for experiments that look at what
is inside a training step.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from rvrs import datasets
from rvrs.core import evidence
from rvrs.core.evidence import Evidence
from rvrs.core.problem import PRNGKey, Problem, Targets
from rvrs.proposals import DiagonalNormal, diagonal_normal

SITE = "coefficients"
"""The model's latent site."""


class Data(NamedTuple):
    """What the coefficients are learnt from."""

    covariates: np.ndarray
    """``(N, D)``; the last column is the intercept's."""
    responses: np.ndarray
    """``(N,)``, 0 or 1."""


def load(name: str, *, num_rows: int, dimension: int | None = None, seed: int = 0) -> Data:
    """Rows of a data set with ``dimension`` columns; the rows are the same whatever the seed.

    Parameters
    ----------
    dimension
        None for the columns that the data have. Fewer are a random subset, of which the intercept
        is always one; for more, columns of independent standard normals are added.
    seed
        Of the subset and of the columns that are added. The columns of a small dimension are
        among those of a larger one.
    """
    dataset = datasets.load(name, num_rows=num_rows)
    features, intercept = dataset.covariates[:, :-1], dataset.covariates[:, -1:]
    if dimension is None:
        return Data(dataset.covariates, dataset.responses)
    random = np.random.RandomState(seed)
    order = random.permutation(features.shape[1])
    missing = max(0, dimension - 1 - len(order))
    made_up = random.standard_normal((missing, num_rows)).T.astype(np.float32)
    # All columns in the data's own order, so that D = D of the data is the data.
    kept = np.sort(order[: dimension - 1])
    return Data(np.hstack([features[:, kept], made_up, intercept]), dataset.responses)


def logistic_model(covariates: Any, responses: Any) -> None:
    """The NumPyro model."""
    standard = dist.Normal(0.0, 1.0).expand([covariates.shape[1]]).to_event(1)
    coefficients = jnp.asarray(numpyro.sample(SITE, standard))
    numpyro.sample("y", dist.Bernoulli(logits=covariates @ coefficients), obs=responses)


def log_joint(data: Data, z: jax.Array) -> jax.Array:
    """``log p(y, z)`` of the same model, at coefficients ``z``."""
    logits = data.covariates @ z
    prior = -0.5 * jnp.sum(z**2) - 0.5 * z.size * math.log(2 * math.pi)
    return prior + jnp.sum(data.responses * logits - jax.nn.softplus(logits))


def mean_field_problem(dimension: int) -> Problem:
    """The model with a mean-field proposal; the :class:`Data` are ``Targets.model``."""
    family = diagonal_normal()
    return Problem(
        sample_noise=lambda key, shape: jax.random.normal(key, (*shape, dimension)),
        propose=family.propose,
        log_proposal=family.log_density,
        log_joint=lambda data, _, z: log_joint(data, z),
    )


@partial(jax.jit, static_argnames=("num_proposals", "epsilon"))
def evaluate(
    rng_key: PRNGKey,
    data: Data,
    parameters: DiagonalNormal,
    threshold: jax.typing.ArrayLike,
    *,
    num_proposals: int,
    epsilon: float,
) -> Evidence:
    """ELBO and Z at the given T, which is infinite where all is accepted, by fresh proposals."""
    targets = Targets(jax.tree.map(lambda leaf: leaf[None], parameters), data)
    t = jnp.asarray(threshold, parameters.loc.dtype).reshape(1)
    problem = mean_field_problem(parameters.loc.size)
    estimates = evidence.estimate(
        rng_key, problem, targets, t, num_proposals=num_proposals, epsilon=epsilon
    )
    return jax.tree.map(lambda leaf: leaf[0], estimates)
