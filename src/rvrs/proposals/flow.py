"""Normalizing flows as proposals, through flowjax: ``pip install 'rvrs[flows]'``.

Layers that start close to the identity, behind the affine map of
:mod:`rvrs.proposals.affine_flow`. Both flows are sampled in one pass of their networks.
"""

import math
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context
from jax.scipy.stats import norm
from jaxtyping import Array

from rvrs.core.arguments import check_count, shown
from rvrs.proposals.affine_flow import Networks, flow_family, promotion, ravelled, require_flowjax
from rvrs.proposals.family import Proposal
from rvrs.proposals.normal import full_rank_normal


def coupling_flow(
    *, num_layers: int = 8, nn_width: int = 32, nn_depth: int = 1, seed: int = 0
) -> Proposal:
    """Affine coupling layers: half of the coordinates moves and scales the other half.

    Sampling and the density at a point both cost one pass of the networks.

    >>> import jax.numpy as jnp, rvrs
    >>> family = rvrs.proposals.coupling_flow(num_layers=2, nn_width=4)
    >>> z, log_q = family.propose(family.init(jnp.zeros(2), 1.0), jnp.array([0.5, -1.0]))
    >>> z.shape
    (2,)

    Parameters
    ----------
    num_layers
        Layers of the flow, with a permutation of the coordinates after each. Any two in a row
        transform every coordinate.
    nn_width
        Hidden units per layer of each network.
    nn_depth
        Hidden layers of each network.
    seed
        Seed of the initial weights and of the permutations.
    """
    return _checked_family("coupling", num_layers, nn_width, nn_depth, seed)


def masked_autoregressive_flow(
    *, num_layers: int = 4, nn_width: int = 32, nn_depth: int = 1, seed: int = 0
) -> Proposal:
    """Affine autoregressive layers: all coordinates before it move and scale a coordinate.

    Sampling costs one pass of the networks, as in inverse autoregressive flows. The density at a
    given point costs ``d`` passes, one after the other.

    >>> import jax.numpy as jnp, rvrs
    >>> family = rvrs.proposals.masked_autoregressive_flow(num_layers=2, nn_width=4)
    >>> family.init(jnp.zeros(3), 1.0).loc.shape
    (3,)

    Parameters
    ----------
    num_layers
        Layers of the flow, with a permutation of the coordinates after each.
    nn_width
        Hidden units per layer of each network.
    nn_depth
        Hidden layers of each network.
    seed
        Seed of the initial weights and of the permutations.
    """
    return _checked_family("masked autoregressive", num_layers, nn_width, nn_depth, seed)


_Kind = Literal["coupling", "masked autoregressive"]

# Size of the networks' initial outputs: so small that the flow is the identity for all practical
# purposes, but not zero, where no gradient would reach the layers below the last.
_INITIAL_OUTPUT = 0.01
# Least factor by which a layer scales a coordinate; its logarithm stays finite.
_MIN_SCALE = 0.01


def _checked_family(
    kind: _Kind, num_layers: int, nn_width: int, nn_depth: int, seed: int
) -> Proposal:
    check_count("num_layers", num_layers)
    check_count("nn_width", nn_width)
    check_count("nn_depth", nn_depth)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {shown(seed)}.")
    require_flowjax()
    return _family(kind, num_layers, nn_width, nn_depth, seed)


@cache
def _family(kind: _Kind, num_layers: int, nn_width: int, nn_depth: int, seed: int) -> Proposal:
    build = partial(_build, kind, num_layers, nn_width, nn_depth, seed)
    return flow_family(build, full_rank_normal().sample_noise)


def _build(
    kind: _Kind, num_layers: int, nn_width: int, nn_depth: int, seed: int, size: int, dtype: str
) -> Networks:
    if size < 2:
        raise ValueError(
            f"A {kind} flow needs a location of at least 2 dimensions, got {size}; use "
            'proposal="mvn" or "diagonal" there.'
        )
    import equinox
    from flowjax import bijections

    rng = np.random.default_rng(seed)
    # The result is cached, so nothing in it may belong to a trace that happens to be going on.
    # (Under ensure_compile_time_eval the checks of equinox fail.) flowjax takes the dtype of its
    # constants from the x64 flag.
    with eval_context(), jax.enable_x64(dtype == "float64"), promotion():
        options: dict[str, Any] = {
            # The random weights of equinox are replaced below: drawing all layers' with NumPy
            # saves seconds of compilation, and they are the same for every dtype.
            "key": jax.random.key(0, impl="unsafe_rbg"),
            "transformer": _affine_transformer(),
            "dim": size,
            "nn_width": nn_width,
            "nn_depth": nn_depth,
            # Smooth, so that the density is; bounded, so that tails stay those of a normal.
            "nn_activation": jnp.tanh,
        }
        if kind == "coupling":
            layer = bijections.Coupling(**options, untransformed_dim=size // 2)
        else:
            layer = bijections.MaskedAutoregressive(**options)
        order = _permutations(rng, num_layers, size)
        layers = bijections.Chain([layer, bijections.Permute(order[0])])
        layers = jax.tree.map(
            lambda leaf: (
                jnp.asarray(np.broadcast_to(leaf, (num_layers, *leaf.shape)))
                if equinox.is_array(leaf)
                else leaf
            ),
            layers,
        )
        layers = equinox.tree_at(
            lambda chain: (chain[1].permutation, chain[1].inverse_permutation, _mlp(chain)),
            layers,
            (
                (jnp.asarray(order),),
                (jnp.asarray(np.argsort(order, axis=-1)),),
                _random_weights(rng, _mlp(layers)),
            ),
        )
        weights, rebuild = ravelled(bijections.Scan(layers))

    def run(method: str, weights: Array, x: Array) -> tuple[Array, Array]:
        with promotion():
            y, log_det = getattr(rebuild(weights), method)(x)
        return y, log_det.astype(x.dtype)

    def sample(weights: Array, noise: Array) -> tuple[Array, Array]:
        x, log_det = run("transform_and_log_det", weights, noise)
        return x, jnp.sum(norm.logpdf(noise)) - log_det

    def log_density(weights: Array, x: Array) -> Array:
        noise, log_det = run("inverse_and_log_det", weights, x)
        return jnp.sum(norm.logpdf(noise)) + log_det

    return Networks(weights, sample, log_density)


def _affine_transformer() -> Any:
    """``x -> a x + b``, the identity where the network's outputs are zero."""
    import equinox
    import paramax
    from flowjax.bijections import Affine

    # softplus(unit) + _MIN_SCALE = 1
    unit = math.log(math.expm1(1 - _MIN_SCALE))
    scale = paramax.Parameterize(lambda x: jax.nn.softplus(x) + _MIN_SCALE, jnp.asarray(unit))
    return equinox.tree_at(lambda affine: affine.scale, Affine(), scale)


def _permutations(rng: np.random.Generator, num_layers: int, size: int) -> np.ndarray:
    """How the coordinates are reordered after each layer: in turn reversed and shuffled.

    Reversal swaps the halves of a coupling layer; in two dimensions there is nothing else to do.
    """
    order = np.tile(np.arange(size)[::-1], (num_layers, 1))
    if size > 2:
        order[1::2] = rng.permuted(order[1::2], axis=1)
    return order


def _mlp(chain: Any) -> Any:
    """The networks of the layers."""
    layer = chain[0]
    return layer.conditioner if hasattr(layer, "conditioner") else layer.masked_autoregressive_mlp


def _random_weights(rng: np.random.Generator, mlp: Any) -> Any:
    """The networks with random weights, such that all outputs but the last layer's are O(1)."""
    import equinox

    def draw(linear: Any, size: float) -> Any:
        def one(leaf: Any) -> Any:
            if not equinox.is_inexact_array(leaf):
                return leaf
            # Weights are (layers, out, in), biases (layers, out).
            spread = size / math.sqrt(linear.in_features) if leaf.ndim == 3 else size
            return jnp.asarray(spread * rng.standard_normal(leaf.shape), leaf.dtype)

        return jax.tree.map(one, linear)

    *hidden, last = mlp.layers
    drawn = (*(draw(linear, 1.0) for linear in hidden), draw(last, _INITIAL_OUTPUT))
    return equinox.tree_at(lambda mlp: mlp.layers, mlp, drawn)
