"""Normalizing flows as proposals, through flowjax: ``pip install 'rvrs[flows]'``.

A draw is ``loc + L f(noise)``: a flow ``f``, which starts close to the identity, followed by the
triangular affine map of :func:`~rvrs.proposals.full_rank_normal`. The affine map carries location
and scale, so that the networks see numbers of order one whatever the target's units.

Many proposals are made for each draw that is accepted, so both flows sample in one pass of their
networks; only the density at a given point, which accepted draws alone need, may cost more.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jax.scipy.stats import norm
from jaxtyping import Array

from rvrs.core.arguments import check_count, shown
from rvrs.proposals.family import Proposal, Vector
from rvrs.proposals.normal import FullRankNormal, check_start, cholesky, full_rank_normal


class Flow(NamedTuple):
    """Parameters of :func:`coupling_flow` and :func:`masked_autoregressive_flow`."""

    loc: Array
    log_diagonal: Array
    """Logarithm of the diagonal of ``L``."""
    lower: Array
    """``(d, d)``, the rest of ``L`` as in :class:`~rvrs.proposals.FullRankNormal`."""
    weights: Array
    """Weights and biases of all networks, in one vector."""


def coupling_flow(
    *, num_layers: int = 8, nn_width: int = 32, nn_depth: int = 1, seed: int = 0
) -> Proposal:
    """Affine coupling layers: half of the coordinates moves and scales the other half.

    Sampling and the density at a point both cost one pass of the networks.

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
    try:
        import equinox  # noqa: F401
        from flowjax import bijections  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Flow proposals need flowjax, which is not installed; run: pip install 'rvrs[flows]'"
        ) from error
    return _family(kind, num_layers, nn_width, nn_depth, seed)


@cache
def _family(kind: _Kind, num_layers: int, nn_width: int, nn_depth: int, seed: int) -> Proposal:
    build = cache(partial(_build, kind, num_layers, nn_width, nn_depth, seed))
    affine = full_rank_normal()

    def network(parameters: FullRankNormal | Flow) -> _Network:
        return build(parameters.loc.shape[-1], parameters.loc.dtype.name)

    def init(location: Vector, scale: float) -> Flow:
        check_start(location, scale)
        if location.shape[-1] < 2:
            raise ValueError(
                f"A {kind} flow needs a location of at least 2 dimensions, got "
                f'{location.shape[-1]}; use proposal="mvn" or "diagonal" there.'
            )
        start = affine.init(location, scale)
        return Flow(*start, weights=jnp.asarray(network(start).weights, location.dtype))

    def propose(parameters: Flow, noise: Array) -> tuple[Array, Array]:
        x, log_det = network(parameters).transform(parameters.weights, noise)
        z = parameters.loc + cholesky(_affine_part(parameters)) @ x
        log_noise = jnp.sum(norm.logpdf(noise))
        return z, log_noise - log_det - jnp.sum(parameters.log_diagonal)

    def log_density(parameters: Flow, z: Array) -> Array:
        factor = cholesky(_affine_part(parameters))
        x = solve_triangular(factor, z - parameters.loc, lower=True)
        noise, log_det = network(parameters).inverse(parameters.weights, x)
        return jnp.sum(norm.logpdf(noise)) + log_det - jnp.sum(parameters.log_diagonal)

    def push_forward(parameters: Flow, location: Vector, scale: Array) -> Flow:
        pushed = affine.push_forward(_affine_part(parameters), location, scale)
        return Flow(*pushed, weights=parameters.weights)

    def standardize(parameters: Flow) -> tuple[Flow, Vector, Array]:
        standard, location, scale = affine.standardize(_affine_part(parameters))
        return Flow(*standard, weights=parameters.weights), location, scale

    return Proposal(
        init, affine.sample_noise, propose, log_density, push_forward, standardize, "triangular"
    )


def _affine_part(parameters: Flow) -> FullRankNormal:
    return FullRankNormal(parameters.loc, parameters.log_diagonal, parameters.lower)


class _Network(NamedTuple):
    """A flow without its affine map, for one dimension and one dtype."""

    weights: np.ndarray
    """Their initial values."""
    transform: Callable[[Array, Array], tuple[Array, Array]]
    """``(weights, noise) -> (x, log |dx / dnoise|)``."""
    inverse: Callable[[Array, Array], tuple[Array, Array]]
    """``(weights, x) -> (noise, log |dnoise / dx|)``."""


def _build(
    kind: _Kind, num_layers: int, nn_width: int, nn_depth: int, seed: int, size: int, dtype: str
) -> _Network:
    import equinox
    import paramax
    from flowjax import bijections

    rng = np.random.default_rng(seed)
    # The result is cached, so nothing in it may belong to a trace that happens to be going on.
    # (Under ensure_compile_time_eval the checks of equinox fail.) flowjax takes the dtype of its
    # constants from the x64 flag.
    with eval_context(), jax.enable_x64(dtype == "float64"), _promotion():
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
        trainable, fixed = equinox.partition(
            bijections.Scan(layers),
            equinox.is_inexact_array,
            is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
        )
        weights, unravel = ravel_pytree(trainable)
        weights = np.asarray(weights)

    def run(method: str, weights: Array, x: Array) -> tuple[Array, Array]:
        with _promotion():
            bijection = equinox.combine(unravel(weights), fixed)
            y, log_det = getattr(bijection, method)(x)
        return y, log_det.astype(x.dtype)

    return _Network(
        weights, partial(run, "transform_and_log_det"), partial(run, "inverse_and_log_det")
    )


def _promotion() -> Any:
    # flowjax adds up log determinants from zeros of the default dtype, which for float32
    # positions in x64 mode is not theirs; the result is cast back.
    return jax.numpy_dtype_promotion("standard")


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
