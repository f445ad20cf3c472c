r"""Where to start a proposal: a point of high density, and the curvature there.

Models come in all units: a posterior may sit 100 standard deviations from the initial point, with
standard deviations from 1e-3 to 1e3 side by side, and gradient descent in those units gets
nowhere. L-BFGS does, when it works in units of the curvature along each coordinate.

A mode is not always a good place, though: the density of a hierarchical model may grow without
bound where its scale shrinks to nothing. So every run leaves a trail of points, each of which is
judged by the ELBO of the normal distribution that its curvature suggests, and the best one wins
(the idea of Pathfinder, Zhang et al. 2022, here with the exact curvature).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from rvrs.core.problem import PRNGKey

LogDensity = Callable[[jax.Array], jax.Array]
Shape = Literal["diagonal", "triangular"]
Call = Callable[..., Any]
"""``call(function, static, dynamic)``: ``function(*static, *dynamic, log_density)``, compiled."""


class Start(NamedTuple):
    """A normal distribution to start from."""

    location: jax.Array
    """``(d,)``."""
    scale: jax.Array
    """Standard deviations ``(d,)``, or a Cholesky factor ``(d, d)``."""
    elbo: jax.Array
    """A rough estimate of its ELBO."""


# Initial points are drawn uniformly within these distances of zero: the usual one first, smaller
# ones for models that overflow there.
_RADII = (2.0, 2.0, 0.5, 0.0)
_DRAWS_PER_RADIUS = 8
# Rounds of L-BFGS, each in the units of the curvature where the last one ended.
_ROUNDS = 6
_ITERATIONS_PER_ROUND = 60
# Points of a trail that are judged: the last ones of every round.
_JUDGED_PER_ROUND = 4
# Draws that an ELBO is judged by.
_ELBO_DRAWS = 200
# Beyond this dimension the diagonal of the curvature is estimated from random probes.
_EXACT_CURVATURE = 300
_PROBES = 100
# Standard deviations in units of 1, where there is no curvature to tell them.
_SHALLOWEST, _STEEPEST = 1e-8, 1e16


def find_start(
    rng_key: PRNGKey, call: Call, dimension: int, shape: Shape, given: jax.Array | None = None
) -> Start:
    """The best start that was found.

    Parameters
    ----------
    call
        Runs functions of the log density; see :data:`Call`.
    shape
        Whether the scale is a vector or a triangular matrix.
    given
        A point to start the search from, instead of random ones.
    """
    point_key, curvature_key, elbo_key = jax.random.split(rng_key, 3)
    random = given is None
    points = call(_initial_points, (dimension,), (point_key,)) if random else given[None]
    best = None
    for point in points:
        for judged in _trail(call, np.asarray(point), curvature_key):
            start = call(_approximate, (shape,), (jnp.asarray(judged), curvature_key, elbo_key))
            if best is None or float(start.elbo) > float(best.elbo):
                best = start
    assert best is not None
    return best


def _initial_points(dimension: int, rng_key: PRNGKey, log_density: LogDensity) -> jax.Array:
    """One point per radius, of those drawn the one with the median finite density."""
    uniform = partial(jax.random.uniform, minval=-1.0, maxval=1.0)
    draws = uniform(rng_key, (len(_RADII), _DRAWS_PER_RADIUS, dimension))
    points = draws * jnp.asarray(_RADII)[:, None, None]
    value = jax.vmap(jax.vmap(log_density))(points)
    usable = jnp.isfinite(value)
    order = jnp.argsort(jnp.where(usable, value, -jnp.inf), axis=1, descending=True)
    middle = jnp.take_along_axis(order, jnp.sum(usable, axis=1, keepdims=True) // 2, axis=1)
    return jnp.take_along_axis(points, middle[..., None], axis=1)[:, 0]


def _trail(call: Call, point: np.ndarray, rng_key: PRNGKey) -> list[np.ndarray]:
    """Points on the way of L-BFGS to higher density."""
    trail = []
    for _ in range(_ROUNDS):
        curvature = np.asarray(call(_diagonal_curvature, (), (jnp.asarray(point), rng_key)), float)
        units = 1 / np.sqrt(np.clip(np.abs(curvature), _SHALLOWEST, _STEEPEST))
        visited: list[np.ndarray] = []

        def loss(u: np.ndarray, origin=point, units=units) -> tuple[float, np.ndarray]:
            at = jnp.asarray((origin + units * u).astype(origin.dtype))
            value, gradient = call(_value_and_gradient, (), (at,))
            gradient = np.asarray(gradient, float) * units
            if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
                # Far below anything seen: the line search turns back.
                return 1e30, np.zeros_like(gradient)
            return -float(value), -gradient

        result = minimize(
            loss,
            np.zeros(point.size),
            jac=True,
            method="L-BFGS-B",
            callback=lambda u, visited=visited, origin=point, units=units: visited.append(
                (origin + units * u).astype(origin.dtype)
            ),
            options={"maxiter": _ITERATIONS_PER_ROUND, "maxcor": 20},
        )
        if not visited:
            break
        # Denser towards the end of the round.
        last = len(visited) - 1
        picked = {last - last // 2**k for k in range(_JUDGED_PER_ROUND)} | {last}
        trail += [visited[index] for index in sorted(picked)]
        moved = np.max(np.abs(result.x))
        point = visited[-1]
        if moved < 0.1:
            break
    return trail or [point]


def _value_and_gradient(x: jax.Array, log_density: LogDensity) -> tuple[jax.Array, jax.Array]:
    return jax.value_and_grad(log_density)(x)


def _hessian_product(log_density: LogDensity, x: jax.Array, v: jax.Array) -> jax.Array:
    """The Hessian of ``-log p`` times a vector."""
    return -jax.jvp(jax.grad(log_density), (x,), (v,))[1]


def _diagonal_curvature(x: jax.Array, rng_key: PRNGKey, log_density: LogDensity) -> jax.Array:
    """The diagonal of the Hessian of ``-log p``."""
    product = jax.vmap(partial(_hessian_product, log_density, x))
    if x.size <= _EXACT_CURVATURE:
        return jnp.diag(product(jnp.eye(x.size, dtype=x.dtype)))
    # Hutchinson's estimate: E[v * H v] with random signs v.
    signs = jax.random.rademacher(rng_key, (_PROBES, x.size), x.dtype)
    return jnp.mean(signs * jax.lax.map(partial(_hessian_product, log_density, x), signs), axis=0)


def _approximate(
    shape: Shape, x: jax.Array, curvature_key: PRNGKey, elbo_key: PRNGKey, log_density: LogDensity
) -> Start:
    """The normal distribution at ``x`` with the curvature of the density, and its ELBO."""
    curvature = jnp.abs(_diagonal_curvature(x, curvature_key, log_density))
    units = jax.lax.rsqrt(jnp.clip(curvature, _SHALLOWEST, _STEEPEST))
    noise = jax.random.normal(elbo_key, (_ELBO_DRAWS, x.size), x.dtype)
    if shape == "diagonal":
        scale, steps, log_det = units, noise * units, jnp.sum(jnp.log(units))
    else:
        product = jax.vmap(partial(_hessian_product, log_density, x))
        hessian = units * product(jnp.diag(units))
        hessian = jnp.where(jnp.isfinite(hessian), hessian, 0.0)
        values, vectors = jnp.linalg.eigh((hessian + hessian.T) / 2)
        # A direction in which the density curves upwards gets a scale all the same.
        spread = jax.lax.rsqrt(jnp.clip(jnp.abs(values), 1e-4, 1e8))
        # The triangular factor of the covariance, by a QR factorisation of any of its roots.
        root = units[:, None] * vectors * spread
        triangular = jnp.linalg.qr(root.T, mode="r").T
        scale = triangular * jnp.sign(jnp.diag(triangular))
        steps, log_det = noise @ scale.T, jnp.sum(jnp.log(jnp.diag(scale)))
    log_p = jax.vmap(log_density)(x + steps)
    log_q = -0.5 * jnp.sum(noise**2, axis=-1) - log_det - 0.5 * x.size * math.log(2 * math.pi)
    elbo = jnp.mean(log_p - log_q)
    usable = jnp.isfinite(elbo) & jnp.all(jnp.isfinite(scale))
    return Start(x, scale, jnp.where(usable, elbo, -jnp.inf))
