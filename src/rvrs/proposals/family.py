"""What a family of proposal distributions is."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float

Vector = Float[Array, " d"]
Scale = Float[Array, " d"] | Float[Array, "d d"]
"""Standard deviations, or a lower-triangular matrix."""


class Proposal(NamedTuple):
    """A family ``q`` that can be sampled, replayed from its noise and evaluated at any point.

    The parameters are a NamedTuple of arrays, every real value of which is valid. Families are made
    by functions such as :func:`rvrs.proposals.diagonal_normal`; one of your own fills these fields.

    >>> import rvrs
    >>> rvrs.proposals.full_rank_normal().closed_under
    'triangular'
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
    standardize: Callable[[Any], tuple[Any, Vector, Scale]]
    """``(parameters) -> (standard, location, scale)``, a member of the family around 0 with scale
    1 and the frame that it is in: ``push_forward(standard, location, scale) = parameters``. Steps
    of one size in the standard parameters are right for coordinates of any scale."""
    closed_under: Literal["diagonal", "triangular"]
    """Which scales ``push_forward`` takes: vectors, or lower-triangular matrices."""
