"""Small targets whose ELBO and its gradients are known by quadrature, in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rvrs.core.problem import Problem, Targets
from rvrs.proposals import DiagonalNormal, diagonal_normal

THETA = np.array([0.4, 0.3])


class Case(NamedTuple):
    """A target ``log p(theta, z)`` and a normal proposal beside its optimum."""

    log_joint: Callable[[Any, Any], jax.Array]
    loc: np.ndarray
    log_scale: np.ndarray
    half_width: float
    points: int

    def parameters(self, dtype: Any = None) -> DiagonalNormal:
        return DiagonalNormal(jnp.asarray(self.loc, dtype), jnp.asarray(self.log_scale, dtype))


def _quartic(theta, z):
    # Light tails, skewed, not normalised.
    return 0.7 - 0.25 * (z[0] - theta[0]) ** 4 + theta[1] * z[0] + 0.3 * jnp.sin(2 * z[0])


def _banana(theta, z):
    return (
        -0.4 - 0.5 * z[0] ** 2 / 1.2 - 0.5 * ((z[1] - theta[0] * z[0] ** 2 - theta[1]) / 0.6) ** 2
    )


CASES = {
    "quartic": Case(_quartic, np.array([-0.5]), np.array([0.35]), 9.0, 4001),
    "banana": Case(_banana, np.array([0.4, -0.2]), np.array([-0.1, 0.2]), 9.0, 501),
}


def problem(case: Case) -> Problem:
    """The case as B targets; each has its own theta (as data), so gradients come per target."""
    family = diagonal_normal()
    parameters = case.parameters(jnp.result_type(float))
    return Problem(
        sample_noise=lambda key, shape: family.sample_noise(key, shape, parameters),
        propose=family.propose,
        log_proposal=family.log_density,
        log_joint=lambda model, data, z: case.log_joint(data, z),
    )


def targets(case: Case, count: int, dtype: Any = None) -> Targets:
    rows = lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape))  # noqa: E731
    theta = jnp.asarray(THETA, dtype)
    return Targets(jax.tree.map(rows, case.parameters(dtype)), None, rows(theta))


class Grid(NamedTuple):
    """Quadrature nodes in noise space ``(n, d)``, with log weights that include the normal."""

    nodes: jax.Array
    log_mass: jax.Array


def noise_grid(case: Case) -> Grid:
    axis = np.linspace(-case.half_width, case.half_width, case.points)
    mesh = np.meshgrid(*[axis] * case.loc.size, indexing="ij")
    nodes = np.stack([m.ravel() for m in mesh], -1)
    cell = (axis[1] - axis[0]) ** case.loc.size
    log_mass = -0.5 * (nodes**2).sum(-1) - 0.5 * case.loc.size * np.log(2 * np.pi) + np.log(cell)
    return Grid(jnp.asarray(nodes), jnp.asarray(log_mass))


def log_weight(case: Case, parameters: DiagonalNormal, theta, z):
    """``lw`` at ``z``, written without the package."""
    standard = (z - parameters.loc) * jnp.exp(-parameters.log_scale)
    log_q = -0.5 * jnp.sum(standard**2) - jnp.sum(parameters.log_scale)
    return case.log_joint(theta, z) - log_q + 0.5 * z.size * jnp.log(2 * jnp.pi)


def log_weights_at(case: Case, noise):
    """``lw`` at the draws that noise ``(n, d)`` stands for."""
    p = case.parameters()
    z = p.loc + jnp.exp(p.log_scale) * noise
    return jax.vmap(lambda z: log_weight(case, p, jnp.asarray(THETA), z))(z)


def acceptance(lw, threshold, epsilon):
    """``a_e``, written without the package."""
    return epsilon + (1 - epsilon) * jax.nn.sigmoid(lw + threshold)


def log_acceptance(lw, threshold, epsilon):
    """``log a_e``, which for epsilon = 0 must not be the log of an underflow."""
    if epsilon == 0:
        return jax.nn.log_sigmoid(lw + threshold)
    return jnp.log(acceptance(lw, threshold, epsilon))


class Exact(NamedTuple):
    elbo: jax.Array
    normalizer: jax.Array
    log_evidence: jax.Array


def quadrature(case: Case, parameters: DiagonalNormal, theta, threshold, epsilon) -> Exact:
    """ELBO, Z and log evidence on a z-grid that does not move with the parameters."""
    grid = noise_grid(case)
    fixed = case.parameters()
    z = jnp.asarray(fixed.loc) + jnp.exp(jnp.asarray(fixed.log_scale)) * grid.nodes
    # Volume element of the fixed grid.
    spacing = 2 * case.half_width / (case.points - 1)
    log_cell = case.loc.size * jnp.log(spacing) + jnp.sum(jnp.asarray(fixed.log_scale))
    log_p = jax.vmap(lambda z: case.log_joint(theta, z))(z)
    lw = jax.vmap(lambda z: log_weight(case, parameters, theta, z))(z)
    a_e = acceptance(lw, threshold, epsilon)
    q = jnp.exp(log_p - lw + log_cell)
    normalizer = jnp.sum(q * a_e)
    log_ratio = lw - log_acceptance(lw, threshold, epsilon)
    elbo = jnp.sum(q * a_e * log_ratio) / normalizer + jnp.log(normalizer)
    return Exact(elbo, normalizer, jax.nn.logsumexp(log_p + log_cell))


def threshold_for(case: Case, sigmoid_mean: float) -> float:
    """T at which ``E_q[a]`` (without the guardrail) has the given value."""
    grid = noise_grid(case)
    lw = np.asarray(log_weights_at(case, grid.nodes))
    mass = np.exp(np.asarray(grid.log_mass))
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = np.sum(mass / (1 + np.exp(-np.clip(lw + middle, -700, 700))))
        low, high = (middle, high) if mean < sigmoid_mean else (low, middle)
    return low
