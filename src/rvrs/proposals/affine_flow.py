"""What all flows have in common: a draw is ``loc + L x``, where ``x`` comes out of networks.

The triangular affine map is that of :func:`~rvrs.proposals.full_rank_normal`. It carries location
and scale, so that the networks see numbers of order one whatever the target's units.

Many proposals are made for each draw that is accepted, so a flow should be sampled in one pass of
its networks; only the density at a given point, which accepted draws alone need, may cost more.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

from rvrs.proposals.family import Proposal, Vector
from rvrs.proposals.normal import FullRankNormal, check_start, cholesky, full_rank_normal


class Flow(NamedTuple):
    """Parameters of a flow.

    >>> import jax.numpy as jnp, rvrs
    >>> rvrs.proposals.coupling_flow().init(jnp.zeros(3), 1.0)._fields
    ('loc', 'log_diagonal', 'lower', 'weights')
    """

    loc: Array
    log_diagonal: Array
    """Logarithm of the diagonal of ``L``."""
    lower: Array
    """``(d, d)``, the rest of ``L`` as in :class:`~rvrs.proposals.FullRankNormal`."""
    weights: Array
    """Weights and biases of all networks, in one vector."""


class Networks(NamedTuple):
    """A flow without its affine map, for one dimension and one dtype."""

    weights: np.ndarray
    """Their initial values."""
    sample: Callable[[Array, Array], tuple[Array, Array]]
    """``(weights, noise) -> (x, log density of x)``."""
    log_density: Callable[[Array, Array], Array]
    """``(weights, x) -> log density of x``."""
    center: np.ndarray | float = 0.0
    """Where ``x`` is at the initial weights: a number, or one for every coordinate."""
    spread: np.ndarray | float = 1.0
    """How wide it is there."""


def flow_family(
    build: Callable[[int, str], Networks],
    sample_noise: Callable[[Any, tuple[int, ...], Any], Array],
) -> Proposal:
    """The family of the flow that ``build(dimension, dtype)`` makes, or refuses to make."""
    build = cache(build)
    affine = full_rank_normal()

    def networks(parameters: FullRankNormal | Flow) -> Networks:
        return build(parameters.loc.shape[-1], parameters.loc.dtype.name)

    def init(location: Vector, scale: float) -> Flow:
        check_start(location, scale)
        start = affine.init(location, scale)
        weights, _, _, center, spread = networks(start)
        factor = jnp.asarray(scale / spread, location.dtype)
        return Flow(
            location - factor * jnp.asarray(center, location.dtype),
            start.log_diagonal - jnp.asarray(np.log(spread), location.dtype),
            start.lower,
            jnp.asarray(weights, location.dtype),
        )

    def propose(parameters: Flow, noise: Array) -> tuple[Array, Array]:
        x, log_q = networks(parameters).sample(parameters.weights, noise)
        z = parameters.loc + cholesky(_affine_part(parameters)) @ x
        return z, log_q - jnp.sum(parameters.log_diagonal)

    def log_density(parameters: Flow, z: Array) -> Array:
        factor = cholesky(_affine_part(parameters))
        x = solve_triangular(factor, z - parameters.loc, lower=True)
        log_q = networks(parameters).log_density(parameters.weights, x)
        return log_q - jnp.sum(parameters.log_diagonal)

    def push_forward(parameters: Flow, location: Vector, scale: Array) -> Flow:
        pushed = affine.push_forward(_affine_part(parameters), location, scale)
        return Flow(*pushed, weights=parameters.weights)

    def standardize(parameters: Flow) -> tuple[Flow, Vector, Array]:
        standard, location, scale = affine.standardize(_affine_part(parameters))
        return Flow(*standard, weights=parameters.weights), location, scale

    return Proposal(
        init, sample_noise, propose, log_density, push_forward, standardize, "triangular"
    )


def _affine_part(parameters: Flow) -> FullRankNormal:
    return FullRankNormal(parameters.loc, parameters.log_diagonal, parameters.lower)


def ravelled(module: Any) -> tuple[np.ndarray, Callable[[Array], Any]]:
    """The trainable numbers of an equinox module as a vector, and the module with others."""
    import equinox
    import paramax

    trainable, fixed = equinox.partition(
        module,
        equinox.is_inexact_array,
        is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
    )
    weights, unravel = ravel_pytree(trainable)
    return np.asarray(weights), lambda weights: equinox.combine(unravel(weights), fixed)


def promotion() -> Any:
    """How flowjax wants to be traced; what comes out has to be cast back."""
    # flowjax adds up log determinants from zeros of the default dtype, which for float32
    # positions in x64 mode is not theirs.
    return jax.numpy_dtype_promotion("standard")


def require_flowjax() -> None:
    """Advice on how to get flowjax, where it is missing."""
    try:
        import equinox  # noqa: F401
        from flowjax import bijections  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Flow proposals need flowjax, which is not installed; run: pip install 'rvrs[flows]'"
        ) from error
