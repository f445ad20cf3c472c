"""A Gaussian process for binary labels, and gradients by its kernel's parameters.

The process comes twice: as a NumPyro model, and as a log density for the core.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import lax
from numpyro.distributions import constraints

from rvrs import datasets
from rvrs.core import rejection, threshold
from rvrs.core.objectives import ModelGradient, elbo_surrogate
from rvrs.core.problem import PRNGKey, Problem, Targets, log_weights
from rvrs.experiments.experiment import DivergedError
from rvrs.proposals import FullRankNormal, full_rank_normal

Parameters = dict[str, Any]
"""Arrays: the kernel's ``amplitude`` and ``length_scales``."""

# Added to the diagonal of the kernel matrix: far below what the likelihood can tell, and far above
# the rounding errors of double precision.
_JITTER = 1e-6


class Data(NamedTuple):
    """What the process is learnt from."""

    inputs: np.ndarray
    """``(N, D)``, standardised; without an intercept, which no stationary kernel would notice."""
    labels: np.ndarray
    """``(N,)``, 0 or 1."""


def load(name: str, num_rows: int) -> Data:
    """Rows of a data set, always the same."""
    dataset = datasets.load(name, num_rows=num_rows)
    covariates = [column != "intercept" for column in dataset.covariate_names]
    return Data(dataset.covariates[:, covariates].astype(float), dataset.responses.astype(float))


def initial_parameters(num_inputs: int) -> Parameters:
    """Where training starts."""
    return {
        "amplitude": jnp.ones(()),
        "length_scales": jnp.full(num_inputs, math.sqrt(num_inputs), float),
    }


def kernel_factor(parameters: Parameters, inputs: jax.typing.ArrayLike) -> jax.Array:
    """The Cholesky factor of the kernel matrix."""
    scaled = jnp.asarray(inputs) / parameters["length_scales"]
    # By a product of matrices: an array (N, N, D) of differences would cost more than the factor.
    squares = jnp.sum(scaled**2, axis=1)
    distances = squares[:, None] + squares - 2 * scaled @ scaled.T
    kernel = parameters["amplitude"] ** 2 * jnp.exp(-0.5 * distances)
    return jnp.linalg.cholesky(kernel + _JITTER * jnp.eye(len(scaled)))


def gaussian_process(data: Data) -> Callable[[], None]:
    """The NumPyro model, with its data."""

    def model() -> None:
        parameters: Any = {
            name: numpyro.param(name, start, constraint=constraints.positive)
            for name, start in initial_parameters(data.inputs.shape[1]).items()
        }
        prior = dist.Normal(0.0, 1.0).expand([len(data.labels)]).to_event(1)
        v: Any = numpyro.sample("v", prior)
        logits = kernel_factor(parameters, data.inputs) @ v
        numpyro.sample("labels", dist.Bernoulli(logits=logits).to_event(1), obs=data.labels)

    return model


def log_joint(parameters: Parameters, data: Data, v: jax.Array) -> jax.Array:
    """``log p(labels, v)`` of the same model."""
    logits = kernel_factor(parameters, data.inputs) @ v
    prior = -0.5 * jnp.sum(v**2) - 0.5 * v.size * math.log(2 * math.pi)
    return prior + jnp.sum(data.labels * logits - jax.nn.softplus(logits))


ACCEPTANCE = 0.1
"""The target acceptance that gradients are measured at."""
_EPSILON = 1e-6
# The gradient of the Cholesky factor costs as much for many draws as for one.
_DRAWS_PER_GRADIENT = 100
_CALIBRATION_PROPOSALS = 20_000


class ModelGradients(NamedTuple):
    """Estimates of the ELBO's gradient by the logarithms of the kernel's parameters.

    T is fixed. Arrays are ``(n, 1 + D)``, the amplitude first.
    """

    unbiased: np.ndarray
    covariance: np.ndarray
    """What the truncated estimate lacks; both are of the same draws."""


def model_gradients(
    rng_key: PRNGKey, data: Data, proposal: FullRankNormal, parameters: Parameters, number: int
) -> ModelGradients:
    """Estimate the gradient so many times, at the T that accepts a tenth of the proposals."""
    *found, complete = _model_gradients(rng_key, data, proposal, parameters, number)
    if not np.all(complete) or not np.all(np.isfinite(found)):
        raise DivergedError("gradients of the kernel's parameters are missing or not finite")
    return ModelGradients(*map(np.asarray, found))


@partial(jax.jit, static_argnames="number")
def _model_gradients(
    rng_key: PRNGKey, data: Data, proposal: FullRankNormal, parameters: Parameters, number: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    family = full_rank_normal()
    problem = Problem(
        sample_noise=lambda key, shape: family.sample_noise(key, shape, proposal),
        propose=family.propose,
        log_proposal=family.log_density,
        log_joint=lambda parameters, _, v: log_joint(parameters, data, v),
    )
    row = jax.tree.map(lambda leaf: leaf[None], proposal)
    threshold_key, draw_key = jax.random.split(rng_key)
    noise = problem.sample_noise(threshold_key, (_CALIBRATION_PROPOSALS, 1))
    lw = log_weights(problem, Targets(row, parameters), noise)
    t = threshold.calibrate(lw, ACCEPTANCE, _EPSILON)
    block = rejection.block_size(_DRAWS_PER_GRADIENT, ACCEPTANCE)

    def one(key: PRNGKey) -> tuple[jax.Array, jax.Array, jax.Array]:
        draws = rejection.draw_exact(
            key,
            problem,
            Targets(row, parameters),
            t,
            num_samples=_DRAWS_PER_GRADIENT,
            epsilon=_EPSILON,
            block_size=block,
            max_proposals=50 * block,
        )

        def surrogate(logs: Parameters, kind: ModelGradient) -> jax.Array:
            targets = Targets(row, jax.tree.map(jnp.exp, logs))
            return elbo_surrogate(
                problem, targets, draws, t, epsilon=_EPSILON, model_gradient=kind
            ).surrogate[0]

        def gradient(kind: ModelGradient) -> jax.Array:
            by_name = jax.grad(surrogate)(jax.tree.map(jnp.log, parameters), kind)
            return jnp.append(by_name["amplitude"], by_name["length_scales"])

        unbiased = gradient("unbiased")
        return unbiased, unbiased - gradient("truncated"), draws.complete[0]

    return lax.map(one, jax.random.split(draw_key, number))


class Norm(NamedTuple):
    """The norm of a mean of vectors."""

    value: float
    error: float
    """The norm that the noise alone would have, root mean square."""


def norm_of_mean(vectors: np.ndarray) -> Norm:
    """Of vectors ``(n, d)``."""
    variance = np.var(vectors, axis=0, ddof=1).sum() / len(vectors)
    return Norm(float(np.linalg.norm(vectors.mean(axis=0))), math.sqrt(variance))
