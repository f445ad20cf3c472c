"""The works that product and peers are given: models, their data and their densities."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.constraints import positive

from rvrs import datasets

LOGISTIC = ("adult", "bank", "mushroom", "spambase", "thyroid")
"""Data sets of :func:`logistic`."""
NUM_ROWS = 100


class Work(NamedTuple):
    """A posterior that any method can be given."""

    name: str
    model: Callable[..., Any]
    """NumPyro model with one latent site, a vector."""
    args: tuple[Any, ...]
    """Arguments of the model."""
    log_density: Callable[[jax.Array], jax.Array]
    """The model's log joint density as a function of the latent vector."""
    dimension: int
    """Length of that vector."""
    parameters: Any = None
    """Parameters of the model that are learned as well, unconstrained, where they start."""
    log_joint: Callable[[Any, jax.Array], jax.Array] | None = None
    """``(parameters, z)``: the log joint density at other parameters, if there are any."""


def logistic(name: str) -> Work:
    """Bayesian logistic regression on 100 rows of a data set, one of :data:`LOGISTIC`.

    Raises ``FileNotFoundError``, which says what to do, if the data set is not there.
    """
    dataset = datasets.load(name, num_rows=NUM_ROWS)
    return _logistic(name, dataset.covariates, dataset.responses)


def made_up_logistic(num_data: int, dimension: int) -> Work:
    """Bayesian logistic regression on made-up data, always the same."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((num_data, dimension))
    coefficients = rng.standard_normal(dimension)
    labels = rng.random(num_data) < 1 / (1 + np.exp(-features @ coefficients))
    return _logistic(f"logistic N={num_data} D={dimension}", features, labels)


def _logistic(name: str, features: np.ndarray, labels: np.ndarray) -> Work:
    x, y = jnp.asarray(features, jnp.float32), jnp.asarray(labels, jnp.float32)
    dimension = x.shape[1]

    def log_density(z: jax.Array) -> jax.Array:
        logits = x @ z
        return jnp.sum(y * logits - jax.nn.softplus(logits)) + _log_standard_normal(z)

    return Work(name, _logistic_model, (x, y), log_density, dimension)


def _logistic_model(features: jax.Array, labels: jax.Array) -> None:
    prior = dist.Normal(0.0, 1.0).expand([features.shape[1]]).to_event(1)
    weights = cast(jax.Array, numpyro.sample("weights", prior))
    with numpyro.plate("data", len(labels)):
        numpyro.sample("labels", dist.Bernoulli(logits=features @ weights), obs=labels)


_NUM_INPUTS = 5
# Added to the diagonal of the kernel matrix, whose Cholesky factor single precision could not find
# otherwise.
_JITTER = 1e-4


def gaussian_process(num_data: int = 256) -> Work:
    """Classification by a Gaussian process on made-up data, always the same.

    The latent values are ``f = L v``, with ``L`` the Cholesky factor of an RBF kernel and standard
    normal ``v``. The kernel's amplitude and its length scales, one per input, are parameters of
    the model.
    """
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.standard_normal((num_data, _NUM_INPUTS)), jnp.float32)
    chance = 1 / (1 + np.exp(-3 * np.sin(np.asarray(inputs)[:, 0] * 2)))
    labels = jnp.asarray(rng.random(num_data) < chance, jnp.float32)
    parameters = {"amplitude": jnp.zeros(()), "length_scales": jnp.zeros(_NUM_INPUTS)}

    def log_likelihood(factor: jax.Array, v: jax.Array) -> jax.Array:
        logits = factor @ v
        return jnp.sum(labels * logits - jax.nn.softplus(logits)) + _log_standard_normal(v)

    def log_joint(parameters: dict[str, jax.Array], v: jax.Array) -> jax.Array:
        # NumPyro's transform of positive parameters.
        kernel = {name: jnp.exp(value) for name, value in parameters.items()}
        return log_likelihood(_kernel_factor(inputs, **kernel), v)

    factor = _kernel_factor(inputs, jnp.ones(()), jnp.ones(_NUM_INPUTS))
    return Work(
        name=f"Gaussian process N={num_data}",
        model=_process_model,
        args=(inputs, labels),
        log_density=partial(log_likelihood, factor),
        dimension=num_data,
        parameters=parameters,
        log_joint=log_joint,
    )


def _process_model(inputs: jax.Array, labels: jax.Array) -> None:
    num_data, num_inputs = inputs.shape
    amplitude, length_scales = (
        cast(jax.Array, numpyro.param(name, start, constraint=positive))
        for name, start in (("amplitude", jnp.ones(())), ("length_scales", jnp.ones(num_inputs)))
    )
    prior = dist.Normal(0.0, 1.0).expand([num_data]).to_event(1)
    v = cast(jax.Array, numpyro.sample("v", prior))
    logits = _kernel_factor(inputs, amplitude, length_scales) @ v
    with numpyro.plate("data", num_data):
        numpyro.sample("labels", dist.Bernoulli(logits=logits), obs=labels)


def _kernel_factor(inputs: jax.Array, amplitude: jax.Array, length_scales: jax.Array) -> jax.Array:
    scaled = inputs / length_scales
    squares = jnp.sum((scaled[:, None] - scaled) ** 2, axis=-1)
    kernel = amplitude**2 * jnp.exp(-0.5 * squares)
    return jnp.linalg.cholesky(kernel + _JITTER * jnp.eye(len(inputs), dtype=inputs.dtype))


def _log_standard_normal(z: jax.Array) -> jax.Array:
    return -0.5 * jnp.sum(z**2) - 0.5 * len(z) * jnp.log(2 * jnp.pi)
