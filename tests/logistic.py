"""A Bayesian logistic regression in 51 dimensions, with a normal proposal near its posterior."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rvrs.core.problem import Problem, Targets
from rvrs.proposals import DiagonalNormal, diagonal_normal


def logistic_regression(size=100, dimension=51):
    """A problem of one target: mean-field proposal at the mode, a little wider than Laplace's."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, dimension))
    x[:, -1] = 1.0
    y = rng.random(size) < 1 / (1 + np.exp(-0.7 * x @ rng.standard_normal(dimension)))
    mode = np.zeros(dimension)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ mode))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(dimension)
        mode += np.linalg.solve(hessian, x.T @ (y - p) - mode)
    parameters = DiagonalNormal(
        jnp.asarray(mode, jnp.float32),
        jnp.asarray(np.log(1.1) - 0.5 * np.log(np.diag(hessian)), jnp.float32),
    )
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def log_joint(model, data, z):
        logits = x @ z
        prior = -0.5 * jnp.sum(z**2) - 0.5 * dimension * math.log(2 * math.pi)
        return prior + jnp.sum(y * logits - jax.nn.softplus(logits))

    family = diagonal_normal()
    problem = Problem(
        lambda key, shape: family.sample_noise(key, shape, parameters),
        family.propose,
        family.log_density,
        log_joint,
    )
    return problem, Targets(jax.tree.map(lambda leaf: leaf[None], parameters))
