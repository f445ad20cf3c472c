"""Flows that cannot propose are refused, and it is said why."""

import re
import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flowjax import bijections
from flowjax.distributions import (
    Normal,
    StandardNormal,
    Transformed,
    VmapMixture,
)

from rvrs.proposals import from_flowjax
from tests.proposals.flowjax_flows import (
    D,
    conditional,
    flow_of,
    planar,
)


def mixture(size=2):
    parts = eqx.filter_vmap(Normal)(jnp.zeros((3, size)))
    return VmapMixture(parts, weights=jnp.ones(3))


@pytest.mark.parametrize(
    ("maker", "match"),
    [
        (
            lambda: eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
            "must be a distribution of flowjax",
        ),
        (bijections.Affine, "must be a distribution of flowjax"),
        (lambda: Normal, "must be a distribution of flowjax"),
        (lambda: "mvn", "must be a distribution of flowjax"),
        (lambda: dist.Normal(jnp.zeros(2)), "must be a distribution of flowjax"),
        (Normal, "must be a distribution over vectors, got the shape ();"),
        (
            lambda: Normal(jnp.zeros((2, 3))),
            "must be a distribution over vectors, got the shape (2",
        ),
        (lambda: StandardNormal((0,)), "must be a distribution over vectors, got the shape (0,)"),
        (conditional, "is conditional (cond_shape=(2,)), but there is nothing to condition it on"),
        (mixture, "contains a VmapMixture, whose draws are not differentiable"),
        (
            lambda: Transformed(mixture(), bijections.Affine(jnp.zeros(2))),
            "contains a VmapMixture, whose draws are not differentiable",
        ),
    ],
)
def test_what_is_no_flow_or_not_a_usable_one_is_refused_at_once(maker, match):
    with pytest.raises(ValueError, match=re.escape(f"flow {match}")):
        from_flowjax(maker())


def from_location(location):
    return from_flowjax(Normal(location)).init(jnp.zeros(2), 1.0).loc.sum()


def from_the_flow(flow):
    return from_flowjax(flow).init(jnp.zeros(2), 1.0).loc.sum()


@pytest.mark.parametrize(
    "trace",
    [
        lambda: jax.jit(from_location)(jnp.zeros(2)),
        lambda: jax.vmap(from_location)(jnp.zeros((3, 2))),
        lambda: jax.grad(from_location)(jnp.zeros(2)),
        lambda: eqx.filter_jit(from_the_flow)(Normal(jnp.zeros(2))),
        lambda: eqx.filter_grad(from_the_flow)(Normal(jnp.zeros(2))),
    ],
    ids=["jit", "vmap", "grad", "filter_jit", "filter_grad"],
)
def test_a_flow_that_is_being_traced_is_refused(trace):
    with pytest.raises(ValueError, match=r"flow is being traced by JAX; build it outside of jit"):
        trace()


@pytest.mark.parametrize(
    ("maker", "match"),
    [
        (
            partial(planar, negative_slope=None, invert=True),
            "cannot be sampled (The inverse planar",
        ),
        (
            partial(planar, negative_slope=None, invert=False),
            "cannot evaluate its log density at a given point (The inverse planar",
        ),
    ],
)
def test_a_flow_that_goes_one_way_only_is_refused(maker, match):
    family = from_flowjax(maker())
    with pytest.raises(ValueError, match=r"^flow: this Transformed " + re.escape(match)):
        family.init(jnp.zeros(D), 1.0)


@pytest.mark.parametrize(
    ("loc", "scale"),
    [(np.nan, 1.0), (np.inf, 1.0), (0.0, np.inf), (0.0, np.nan), (1e9, 1e-3)],
)
def test_a_flow_whose_draws_are_not_finite_or_all_the_same_is_refused(loc, scale):
    family = from_flowjax(Normal(jnp.array([0.0, loc]), jnp.array([1.0, scale])))
    with pytest.raises(ValueError, match="flow: its draws are not finite, or all the same"):
        family.init(jnp.zeros(2), 1.0)


def test_without_flowjax_the_error_says_what_to_install(monkeypatch):
    flow = flow_of("normal")
    monkeypatch.setitem(sys.modules, "flowjax", None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[flows\]'"):
        from_flowjax(flow)
