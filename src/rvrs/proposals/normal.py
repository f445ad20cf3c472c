"""Normal proposals, parameterised so that every real value of every parameter is valid."""

import math
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular
from jaxtyping import Array

from rvrs.core.arguments import check_count, check_floats, check_positive, shown
from rvrs.proposals.family import Proposal, Vector


class DiagonalNormal(NamedTuple):
    """Parameters of :func:`diagonal_normal`.

    >>> import jax.numpy as jnp, rvrs
    >>> rvrs.proposals.DiagonalNormal(loc=jnp.zeros(2), log_scale=jnp.zeros(2)).loc.shape
    (2,)
    """

    loc: Array
    log_scale: Array


class FullRankNormal(NamedTuple):
    """Parameters of :func:`full_rank_normal`.

    >>> import jax.numpy as jnp, rvrs
    >>> rvrs.proposals.full_rank_normal().init(jnp.zeros(3), 1.0)._fields
    ('loc', 'log_diagonal', 'lower')
    """

    loc: Array
    log_diagonal: Array
    """Logarithm of the Cholesky factor's diagonal."""
    lower: Array
    """``(d, d)``, in units of the row's diagonal entry; only entries below the diagonal count."""


class LowRankNormal(NamedTuple):
    """Parameters of :func:`low_rank_normal`.

    >>> import jax.numpy as jnp, rvrs
    >>> rvrs.proposals.low_rank_normal(2).init(jnp.zeros(5), 1.0).factor.shape
    (5, 2)
    """

    loc: Array
    log_scale: Array
    factor: Array
    """``(d, rank)``, in units of the diagonal's scale."""


@cache
def diagonal_normal() -> Proposal:
    """The mean-field family: independent normals.

    >>> import jax.numpy as jnp, rvrs
    >>> family = rvrs.proposals.diagonal_normal()
    >>> parameters = family.init(jnp.zeros(2), 1.0)
    >>> z, log_q = family.propose(parameters, jnp.array([0.5, -1.0]))
    >>> bool(jnp.allclose(log_q, family.log_density(parameters, z)))
    True
    """

    def init(location: Vector, scale: float) -> DiagonalNormal:
        check_start(location, scale)
        return DiagonalNormal(location, jnp.full_like(location, math.log(scale)))

    def propose(parameters: DiagonalNormal, noise: Array) -> tuple[Array, Array]:
        z = parameters.loc + jnp.exp(parameters.log_scale) * noise
        return z, _standard_normal(noise) - jnp.sum(parameters.log_scale)

    def log_density(parameters: DiagonalNormal, z: Array) -> Array:
        noise = (z - parameters.loc) * jnp.exp(-parameters.log_scale)
        return _standard_normal(noise) - jnp.sum(parameters.log_scale)

    def push_forward(parameters: DiagonalNormal, location: Vector, scale: Vector) -> DiagonalNormal:
        loc = location + scale * parameters.loc
        return DiagonalNormal(loc, parameters.log_scale + jnp.log(scale))

    def standardize(parameters: DiagonalNormal) -> tuple[DiagonalNormal, Vector, Vector]:
        zeros = jnp.zeros_like(parameters.loc)
        return DiagonalNormal(zeros, zeros), parameters.loc, jnp.exp(parameters.log_scale)

    return Proposal(
        init, _noise_like_loc, propose, log_density, push_forward, standardize, "diagonal"
    )


@cache
def full_rank_normal() -> Proposal:
    """Normals with any covariance, through its Cholesky factor.

    >>> import jax.numpy as jnp, rvrs
    >>> family = rvrs.proposals.full_rank_normal()
    >>> family is rvrs.proposals.full_rank_normal()  # programs are compiled once
    True
    >>> z, log_q = family.propose(family.init(jnp.zeros(2), 0.1), jnp.array([1.0, 2.0]))
    >>> print(z.round(3))
    [0.1 0.2]
    """

    def init(location: Vector, scale: float) -> FullRankNormal:
        check_start(location, scale)
        size = location.shape[0]
        return FullRankNormal(
            location,
            jnp.full_like(location, math.log(scale)),
            jnp.zeros((size, size), location.dtype),
        )

    def propose(parameters: FullRankNormal, noise: Array) -> tuple[Array, Array]:
        z = parameters.loc + cholesky(parameters) @ noise
        return z, _standard_normal(noise) - jnp.sum(parameters.log_diagonal)

    def log_density(parameters: FullRankNormal, z: Array) -> Array:
        noise = solve_triangular(cholesky(parameters), z - parameters.loc, lower=True)
        return _standard_normal(noise) - jnp.sum(parameters.log_diagonal)

    def push_forward(parameters: FullRankNormal, location: Vector, scale: Array) -> FullRankNormal:
        loc = location + scale @ parameters.loc
        log_diagonal = parameters.log_diagonal + jnp.log(jnp.diag(scale))
        rows = jnp.exp(-log_diagonal)[:, None]
        return FullRankNormal(
            loc, log_diagonal, jnp.tril(rows * (scale @ cholesky(parameters)), -1)
        )

    def standardize(parameters: FullRankNormal) -> tuple[FullRankNormal, Vector, Array]:
        standard = jax.tree.map(jnp.zeros_like, parameters)
        return standard, parameters.loc, cholesky(parameters)

    return Proposal(
        init, _noise_like_loc, propose, log_density, push_forward, standardize, "triangular"
    )


def cholesky(parameters: FullRankNormal) -> Array:
    """The Cholesky factor of the covariance."""
    unit = jnp.tril(parameters.lower, -1) + jnp.eye(
        parameters.lower.shape[-1], dtype=parameters.lower.dtype
    )
    return jnp.exp(parameters.log_diagonal)[:, None] * unit


def low_rank_normal(rank: int) -> Proposal:
    """Normals with covariance ``diag(s) (I + F F^T) diag(s)``, ``F`` of ``rank`` columns.

    Costs ``O(d rank)`` per draw, so that it reaches dimensions where a full covariance does not.

    >>> import jax.numpy as jnp, rvrs
    >>> family = rvrs.proposals.low_rank_normal(2)
    >>> family.init(jnp.zeros(1000), 0.1).factor.shape
    (1000, 2)
    """
    check_count("rank", rank)
    return _low_rank_normal(rank)


@cache
def _low_rank_normal(rank: int) -> Proposal:
    def init(location: Vector, scale: float) -> LowRankNormal:
        check_start(location, scale)
        # The gradient with respect to F vanishes at F = 0, so start beside it: each column
        # gets a small value on its own share of the coordinates.
        size = location.shape[0]
        rows, columns = jnp.arange(size)[:, None], jnp.arange(rank)
        factor = jnp.where(rows % rank == columns, 0.1, 0.0).astype(location.dtype)
        return LowRankNormal(location, jnp.full_like(location, math.log(scale)), factor)

    def sample_noise(rng_key: Any, shape: tuple[int, ...], parameters: LowRankNormal) -> Array:
        loc = parameters.loc
        return jax.random.normal(rng_key, (*shape, loc.shape[-1] + rank), loc.dtype)

    def capacitance(parameters: LowRankNormal) -> tuple[Array, Array]:
        factor = parameters.factor
        cho, _ = cho_factor(jnp.eye(rank, dtype=factor.dtype) + factor.T @ factor, lower=True)
        return cho, 2 * jnp.sum(jnp.log(jnp.diag(cho)))

    def log_density_of(parameters: LowRankNormal, x: Array) -> Array:
        """``log q`` of ``x = (z - loc) / s`` by the Woodbury identity."""
        cho, log_det = capacitance(parameters)
        projected = x @ parameters.factor
        quadratic = jnp.sum(x**2) - projected @ cho_solve((cho, True), projected)
        size = parameters.loc.shape[-1]
        constant = size * math.log(2 * math.pi) + log_det
        return -0.5 * (quadratic + constant) - jnp.sum(parameters.log_scale)

    def propose(parameters: LowRankNormal, noise: Array) -> tuple[Array, Array]:
        x = noise[rank:] + parameters.factor @ noise[:rank]
        z = parameters.loc + jnp.exp(parameters.log_scale) * x
        return z, log_density_of(parameters, x)

    def log_density(parameters: LowRankNormal, z: Array) -> Array:
        return log_density_of(parameters, (z - parameters.loc) * jnp.exp(-parameters.log_scale))

    def push_forward(parameters: LowRankNormal, location: Vector, scale: Vector) -> LowRankNormal:
        loc = location + scale * parameters.loc
        return parameters._replace(loc=loc, log_scale=parameters.log_scale + jnp.log(scale))

    def standardize(parameters: LowRankNormal) -> tuple[LowRankNormal, Vector, Vector]:
        zeros = jnp.zeros_like(parameters.loc)
        standard = LowRankNormal(zeros, zeros, parameters.factor)
        return standard, parameters.loc, jnp.exp(parameters.log_scale)

    return Proposal(init, sample_noise, propose, log_density, push_forward, standardize, "diagonal")


def check_start(location: Any, scale: Any) -> None:
    """Refuse what no proposal can start from."""
    dtype, shape = getattr(location, "dtype", None), getattr(location, "shape", ())
    if dtype is None or len(shape) != 1 or 0 in shape:
        kind = shown(location) if dtype is None else f"{dtype} of shape {shape}"
        raise ValueError(
            f"location must be a vector of floating-point numbers, got {kind}; flatten positions, "
            "e.g. with jax.flatten_util.ravel_pytree."
        )
    check_floats("location", location)
    check_positive("scale", scale)


def _noise_like_loc(rng_key: Any, shape: tuple[int, ...], parameters: Any) -> Array:
    return jax.random.normal(rng_key, (*shape, parameters.loc.shape[-1]), parameters.loc.dtype)


def _standard_normal(noise: Array) -> Array:
    return -0.5 * (jnp.sum(noise**2) + noise.shape[-1] * math.log(2 * math.pi))
