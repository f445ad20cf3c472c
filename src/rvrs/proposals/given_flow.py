"""Flows that users build with flowjax, as proposals."""

import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_context
from jaxtyping import Array

from rvrs.core.arguments import check_kind
from rvrs.core.randomness import key_from_noise, noise_for_keys
from rvrs.proposals.affine_flow import Networks, flow_family, promotion, ravelled, require_flowjax
from rvrs.proposals.family import Proposal

if TYPE_CHECKING:
    from flowjax.distributions import AbstractDistribution as FlowjaxDistribution
else:
    FlowjaxDistribution = Any

# Draws that a flow's initial place and size are judged by.
_JUDGED_DRAWS = 2_000


def from_flowjax(flow: FlowjaxDistribution) -> Proposal:
    """A flow, or any other distribution of flowjax, as a proposal.

    It is followed by a triangular affine map, which is trained with it. Where ``flow`` is and how
    wide does not matter, therefore: proposals start where a fit or ``init`` wants them. Its shape
    is what training starts from.

    >>> import jax, optax, rvrs
    >>> from flowjax.distributions import Normal
    >>> from flowjax.flows import masked_autoregressive_flow
    >>> flow = masked_autoregressive_flow(
    ...     jax.random.key(0), base_dist=Normal(jax.numpy.zeros(2)), flow_layers=2, invert=False
    ... )
    >>> algorithm = rvrs.vi.as_top_level_api(
    ...     lambda z: -0.5 * (z**4).sum(), optax.adam(1e-2), proposal=flow
    ... )
    >>> state = algorithm.init(jax.numpy.zeros(2))
    >>> algorithm.sample(jax.random.key(1), state, 100).shape
    (100, 2)

    Parameters
    ----------
    flow
        An unconditional ``flowjax.distributions.AbstractDistribution`` of shape ``(d,)``, with
        support on all of it, whose draws and density are differentiable. What is wrapped in
        ``paramax.NonTrainable`` stays as it is.

    Returns
    -------
    The family, the same one for the same object. Wherever a ``proposal=`` is asked for, ``flow``
    itself does as well.

    Notes
    -----
    Build flows with ``invert=False``. They are then sampled in one pass, and many proposals are
    made for each draw that is accepted; what has to be inverted is the density at draws that are
    accepted. With ``invert=True``, flowjax's default, it is the other way round: a masked
    autoregressive flow then takes ``d`` passes to sample, a block neural autoregressive flow a
    numerical search. Coupling flows cost the same either way.

    Networks with bounded activations (``nn_activation=jnp.tanh``) keep the tails of the base
    distribution; with flowjax's default, ``relu``, single draws may end up very far away. A block
    neural autoregressive flow with its default activation all but ends at an edge, and what the
    target has beyond is missing from draws and evidence without a sign of it.
    """
    require_flowjax()
    from flowjax.distributions import AbstractDistribution

    what = "a distribution of flowjax, e.g. flowjax.distributions.Transformed(base_dist, bijection)"
    check_kind("flow", flow, AbstractDistribution, what)
    if id(flow) not in _known:
        _check(flow)
        # The family has the flow's arrays but not the flow, of whose end we want to hear.
        arrays = jax.tree.map(lambda leaf: leaf, flow)
        _known[id(flow)] = flow_family(partial(_build, arrays), noise_for_keys)
        weakref.finalize(flow, _known.pop, id(flow))
    return _known[id(flow)]


# By identity, since flows have no hash.
_known: dict[int, Proposal] = {}


def is_flow(value: Any) -> TypeGuard[FlowjaxDistribution]:
    """Whether it is a distribution of flowjax; nothing is imported to find out."""
    distributions = sys.modules.get("flowjax.distributions")
    return distributions is not None and isinstance(value, distributions.AbstractDistribution)


def _check(flow: Any) -> None:
    from flowjax.distributions import VmapMixture

    leaves = jax.tree.leaves(flow, is_leaf=lambda node: isinstance(node, VmapMixture))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise ValueError("flow is being traced by JAX; build it outside of jit, vmap and grad.")
    if len(flow.shape) != 1 or 0 in flow.shape:
        raise ValueError(
            f"flow must be a distribution over vectors, got the shape {flow.shape}; build it with "
            "a base of shape (d,), e.g. base_dist=Normal(jnp.zeros(d))."
        )
    if flow.cond_shape is not None:
        raise ValueError(
            f"flow is conditional (cond_shape={flow.cond_shape}), but there is nothing to "
            "condition it on; build it without cond_dim."
        )
    if any(isinstance(leaf, VmapMixture) for leaf in leaves):
        raise ValueError(
            "flow contains a VmapMixture, whose draws are not differentiable in its weights, which "
            "the gradient needs; start from a single base distribution, e.g. Normal."
        )


def _build(flow: Any, size: int, dtype: str) -> Networks:
    if flow.shape != (size,):
        (own,) = flow.shape
        raise ValueError(
            f"proposal: the flow is for d={own}, but there are {size} latent dimensions "
            f"(unconstrained); build it with a base of shape ({size},), e.g. "
            f"base_dist=Normal(jnp.zeros({size}))."
        )
    # The result is cached, so nothing in it may belong to a trace that happens to be going on.
    with eval_context(), promotion():
        weights, rebuild = ravelled(_cast(flow, dtype))

        def sample(weights: Array, noise: Array) -> tuple[Array, Array]:
            with promotion():
                x, log_q = rebuild(weights).sample_and_log_prob(key_from_noise(noise))
            return x.astype(weights.dtype), log_q.astype(weights.dtype)

        def log_density(weights: Array, x: Array) -> Array:
            with promotion():
                return rebuild(weights).log_prob(x).astype(x.dtype)

        start = jnp.asarray(weights)
        _check_both_ways(flow, sample, log_density, start)
        noise = noise_for_keys(jax.random.key(0), (_JUDGED_DRAWS,))
        drawn = jax.jit(jax.vmap(sample, in_axes=(None, 0)))(start, noise)[0]
    # Of a normal distribution, mean and standard deviation; others may have neither. Infinities
    # are refused, which NumPy need not warn of.
    with np.errstate(invalid="ignore"):
        low, center, high = np.quantile(np.asarray(drawn, float), (0.159, 0.5, 0.841), axis=0)
        spread = (high - low) / 2
    if not np.all(np.isfinite(spread) & (spread > 0)):
        raise ValueError(
            "flow: its draws are not finite, or all the same, in some coordinate; check its "
            "parameters."
        )
    return Networks(weights, sample, log_density, center, spread)


def _cast(flow: Any, dtype: str) -> Any:
    import equinox

    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if equinox.is_inexact_array(leaf) else leaf, flow
    )


def _check_both_ways(flow: Any, sample: Any, log_density: Any, weights: Array) -> None:
    """Refuse flows that only go one way."""
    noise = noise_for_keys(jax.random.key(0), ())
    name = type(flow).__name__
    try:
        x, _ = jax.eval_shape(sample, weights, noise)
    except NotImplementedError as error:
        raise ValueError(
            f"flow: this {name} cannot be sampled ({error}); build it with invert=False, or of "
            "bijections that go both ways."
        ) from error
    try:
        jax.eval_shape(log_density, weights, x)
    except NotImplementedError as error:
        raise ValueError(
            f"flow: this {name} cannot evaluate its log density at a given point ({error}), which "
            "the gradient needs; build it of bijections that go both ways (a planar flow with "
            "negative_slope=0.1)."
        ) from error
