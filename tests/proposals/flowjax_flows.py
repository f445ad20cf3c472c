"""Flows and other distributions of flowjax to try as proposals."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from flowjax import bijections, flows
from flowjax.distributions import (
    Cauchy,
    MultivariateNormal,
    Normal,
    StandardNormal,
    StudentT,
    Transformed,
)
from flowjax.root_finding import bisect_check_expand_search, root_finder_to_inverter

# In three dimensions permutations need not be their own inverses.
D = 3


def built(constructor, size=D, base=Normal, **options):
    """A flow of flowjax around a standard base; small."""
    return constructor(jax.random.key(3), base_dist=base(jnp.zeros(size)), **options)


masked = partial(
    built, flows.masked_autoregressive_flow, flow_layers=2, nn_width=6, nn_activation=jnp.tanh
)
# With flowjax's default activation.
coupling = partial(built, flows.coupling_flow, flow_layers=3, nn_width=6)
planar = partial(built, flows.planar_flow, flow_layers=2, negative_slope=0.1)
spline = partial(built, flows.triangular_spline_flow, flow_layers=1, knots=4)
block = partial(built, flows.block_neural_autoregressive_flow, nn_block_dim=3)


def search(function):
    """A numerical inverse as precise as the dtype allows; by default its error is 1e-5."""
    precision = 1e-11 if jax.config.jax_enable_x64 else 1e-5
    return bisect_check_expand_search(function, jnp.zeros(D), width=5, atol=precision)


precise_block = partial(block, inverter=root_finder_to_inverter(search))


def off_centre():
    """Heavy tails, far from zero, and a thousand times as wide in one coordinate as in another."""
    return StudentT(
        jnp.array([3.0, 5.0, 9.0]), jnp.array([0.0, 1e3, -5.0]), jnp.array([1, 50, 0.05])
    )


MAKERS = {
    "masked autoregressive": partial(masked, invert=False),
    "masked autoregressive, inverted": partial(masked, invert=True),
    "coupling": partial(coupling, invert=False),
    "coupling, inverted": partial(coupling, invert=True),
    "block": partial(precise_block, invert=False),
    "block, inverted": partial(precise_block, invert=True),
    "planar": partial(planar, invert=False),
    "planar, inverted": partial(planar, invert=True),
    "spline": partial(spline, invert=False),
    "normal": lambda: Normal(jnp.array([-2.0, 0.0, 7.0]), jnp.array([0.1, 1.0, 30.0])),
    "correlated": lambda: MultivariateNormal(jnp.ones(D), jnp.eye(D) + 0.5),
    "Student": off_centre,
    # Neither mean nor variance.
    "Cauchy": lambda: Cauchy(jnp.zeros(D), jnp.array([0.1, 1.0, 10.0])),
    # Nothing to train but the affine map.
    "standard": lambda: StandardNormal((D,)),
}


def the_others_slow(*quick):
    """All names, of which ``make test`` leaves out some."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS
    ]


@cache
def flow_of(name):
    return MAKERS[name]()


def conditional():
    shift = bijections.AdditiveCondition(lambda condition: condition, (2,), (2,))
    return Transformed(Normal(jnp.zeros(2)), shift)
