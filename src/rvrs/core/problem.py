"""What the core is asked to do: B independent targets, and the family that proposes for them.

One mechanism serves all uses of the method. Plain RVRS is ``B = 1``; a model with local latent
variables has one target per data point of the batch, whose proposal parameters may come from an
encoder and whose densities may depend on a draw of the global variables.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Float

PRNGKey = Any
"""A JAX random key, of the old (``uint32[2]``) or the typed kind."""
PyTree = Any


class Problem(NamedTuple):
    """The four functions that define a problem; all but the first act on one draw of one target.

    The sampler stores the noise of the draws that it accepts and the objective replays
    ``propose`` on it, so no gradient ever passes through the rejection loop. Noise may be
    anything with leading axes that arrays can be indexed by: standard normals, or random keys
    for families whose sampler has no explicit noise.
    """

    sample_noise: Callable[[PRNGKey, tuple[int, ...]], PyTree]
    """``(key, shape) -> noise`` with leading axes ``shape``."""
    propose: Callable[[PyTree, PyTree], tuple[PyTree, Array]]
    """``(proposal, noise) -> (z, log q(z))``: the reparameterised sampler."""
    log_proposal: Callable[[PyTree, PyTree], Array]
    """``(proposal, z) -> log q(z)`` at any given point."""
    log_joint: Callable[[PyTree, PyTree, PyTree], Array]
    """``(model, data, z) -> log p(x, z)``."""


class Targets(NamedTuple):
    """Parameters and data of the B targets."""

    proposal: PyTree
    """Proposal parameters (phi); every leaf has the leading axis B."""
    model: PyTree = None
    """Parameters that all targets share (theta, or a draw of the global variables)."""
    data: PyTree = None
    """What each target alone has; every leaf has the leading axis B."""

    @property
    def num_targets(self) -> int:
        """The number of targets, B."""
        return jax.tree.leaves(self.proposal)[0].shape[0]

    def take(self, index: Array) -> "Targets":
        """The targets at ``index``, in that order."""
        rows = jax.tree.map(lambda leaf: leaf[index], (self.proposal, self.data))
        return Targets(rows[0], self.model, rows[1])


def log_weights(problem: Problem, targets: Targets, noise: PyTree) -> Float[Array, "k b"]:
    """``lw = log p(x, z) - log q(z)`` for K proposals to each target; noise is ``(K, B, ...)``.

    Nothing is differentiated through the result: rejected proposals need values only.
    """

    def one(proposal: PyTree, data: PyTree, noise: PyTree) -> Array:
        z, log_q = problem.propose(proposal, noise)
        return problem.log_joint(targets.model, data, z) - log_q

    per_block = jax.vmap(jax.vmap(one), in_axes=(None, None, 0))
    return lax.stop_gradient(per_block(targets.proposal, targets.data, noise))
