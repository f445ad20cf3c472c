"""What a family of proposal distributions is, and how to train one in other units."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Vector = Float[Array, " d"]
Scale = Float[Array, " d"] | Float[Array, "d d"]
"""Standard deviations, or a lower-triangular matrix."""


class Proposal(NamedTuple):
    """A family ``q`` that can be sampled, replayed from its noise and evaluated at any point.

    The parameters are a NamedTuple of arrays, every real value of which is valid.
    """

    init: Callable[[Vector, float], Any]
    """``(location, scale) -> parameters`` of a distribution around ``location``."""
    sample_noise: Callable[[Any, tuple[int, ...], Any], Array]
    """``(key, shape, parameters) -> noise`` with leading axes ``shape``."""
    propose: Callable[[Any, Array], tuple[Vector, Array]]
    """``(parameters, noise) -> (z, log q(z))``, differentiable in the parameters."""
    log_density: Callable[[Any, Vector], Array]
    """``(parameters, z) -> log q(z)``."""
    push_forward: Callable[[Any, Vector, Scale], Any]
    """``(parameters, location, scale) -> parameters`` of the distribution of
    ``location + scale z``, ``z ~ q``."""
    closed_under: Literal["diagonal", "triangular"]
    """Which scales ``push_forward`` takes: vectors, or lower-triangular matrices."""


def in_frame(family: Proposal, location: Vector, scale: Scale) -> Proposal:
    """The same family with its parameters in the units of a frame.

    A draw is ``location + scale u`` with ``u`` from ``family``, so an optimizer that takes steps
    of one size for all parameters takes steps of that size in units of ``scale``: coordinates of
    very different scales train alike. ``family.push_forward(parameters, location, scale)`` gives
    the parameters in plain units.
    """

    def plain(parameters: Any) -> Any:
        return family.push_forward(parameters, location, scale)

    return Proposal(
        init=lambda at, unit: family.init(jnp.zeros_like(at), 1.0),
        sample_noise=family.sample_noise,
        propose=lambda parameters, noise: family.propose(plain(parameters), noise),
        log_density=lambda parameters, z: family.log_density(plain(parameters), z),
        push_forward=lambda parameters, *_: plain(parameters),
        closed_under=family.closed_under,
    )
