"""Flows and other distributions of flowjax as families of proposals."""

import gc
import sys
import weakref
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import paramax
import pytest
from flowjax import bijections
from flowjax.distributions import (
    Normal,
    StandardNormal,
    StudentT,
    Transformed,
)
from scipy import stats

from rvrs.core.randomness import key_from_noise
from rvrs.proposals import from_flowjax, given_flow
from rvrs.settings import named_proposal
from tests.proposals.checks import check_derivatives, check_dtypes
from tests.proposals.flowjax_flows import (
    MAKERS,
    D,
    block,
    coupling,
    flow_of,
    masked,
    planar,
    the_others_slow,
)


def moved(parameters, spread=0.3):
    """Every entry moved away from where it is."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + jnp.asarray(spread * rng.standard_normal(leaf.shape), leaf.dtype),
        parameters,
    )


def drawn(family, parameters, count, seed=0):
    noise = family.sample_noise(jax.random.key(seed), (count,), parameters)
    return jax.jit(jax.vmap(family.propose, (None, 0)))(parameters, noise)


@pytest.mark.parametrize("name", the_others_slow("masked autoregressive", "Student"))
def test_a_draw_comes_with_its_log_density_whatever_the_parameters(name):
    family = from_flowjax(flow_of(name))
    with jax.enable_x64():
        parameters = moved(family.init(jnp.arange(D, dtype=float), 0.5))
        noise = family.sample_noise(jax.random.key(0), (200,), parameters)

        @jax.vmap
        def both(noise):
            z, log_q = family.propose(parameters, noise)
            return z, log_q, family.log_density(parameters, z)

        z, on_the_path, at_the_point = jax.jit(both)(noise)
        assert {leaf.dtype for leaf in (z, on_the_path)} == {jnp.dtype("float64")}
        np.testing.assert_allclose(on_the_path, at_the_point, rtol=1e-9, atol=1e-8)
        assert np.all(np.std(z, axis=0) > 0)


@pytest.mark.parametrize("name", the_others_slow("masked autoregressive", "Student"))
def test_at_first_it_is_the_flow_itself_behind_an_affine_map(name):
    flow, location = flow_of(name), jnp.array([3.0, -1e3, 0.0])
    family = from_flowjax(flow)
    with jax.enable_x64():
        # In float64 the flow that was built in float32 is the same but for rounding.
        doubled = jax.tree.map(
            lambda leaf: leaf.astype(float) if eqx.is_inexact_array(leaf) else leaf, flow
        )
        parameters = family.init(location.astype(float), 0.5)
        noise = family.sample_noise(jax.random.key(0), (50,), parameters)
        widths = jnp.exp(parameters.log_diagonal)

        @jax.vmap
        def wanted(noise):
            x, log_q = doubled.sample_and_log_prob(key_from_noise(noise))
            return parameters.loc + widths * x, log_q - jnp.sum(jnp.log(widths))

        z, log_q = jax.jit(jax.vmap(family.propose, (None, 0)))(parameters, noise)
        for got, want in zip((z, log_q), jax.jit(wanted)(noise), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
        assert np.all(parameters.lower == 0)


@pytest.mark.parametrize("name", the_others_slow("coupling", "Student", "Cauchy"))
def test_init_puts_the_middle_and_the_width_of_the_draws_where_asked(name):
    family = from_flowjax(flow_of(name))
    location = np.array([3.0, -1e3, 0.0])
    parameters = family.init(jnp.asarray(location), 0.25)
    z, _ = drawn(family, parameters, given_flow._JUDGED_DRAWS)
    low, middle, high = np.quantile(np.asarray(z, float), (0.159, 0.5, 0.841), axis=0)
    # These are the draws that it goes by; float32 at 1000 leaves this much.
    np.testing.assert_allclose(middle, location, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose((high - low) / 2, 0.25, rtol=1e-3)


def test_init_holds_for_draws_that_it_did_not_go_by():
    parameters = from_flowjax(flow_of("Student")).init(jnp.zeros(D), 1.0)
    z, _ = drawn(from_flowjax(flow_of("Student")), parameters, 20_000, seed=1)
    low, middle, high = np.quantile(np.asarray(z, float), (0.159, 0.5, 0.841), axis=0)
    # Standard errors of a normal's median and quantiles, both from 2,000 draws.
    assert np.all(np.abs(middle) < 4 * 1.25 / 2000**0.5)
    assert np.all(np.abs((high - low) / 2 - 1) < 4 * 1.0 / 2000**0.5)


@pytest.mark.parametrize(
    "maker",
    [
        partial(masked, invert=False),
        pytest.param(coupling, marks=pytest.mark.slow),
        pytest.param(partial(block, invert=False), marks=pytest.mark.slow),
    ],
    ids=["masked autoregressive", "coupling", "block"],
)
def test_the_density_integrates_to_one(maker):
    family = from_flowjax(maker(size=2))
    with jax.enable_x64():
        parameters = moved(family.init(jnp.zeros(2), 0.5))
        z, _ = drawn(family, parameters, 10_000)
        # The box holds all of 10000 draws with as much space again on every side.
        low, high = 2 * z.min(0) - z.mean(0), 2 * z.max(0) - z.mean(0)
        first, second = (jnp.linspace(low[i], high[i], 400) for i in range(2))
        grid = jnp.stack(jnp.meshgrid(first, second), -1).reshape(-1, 2)
        density = jnp.exp(jax.jit(jax.vmap(family.log_density, (None, 0)))(parameters, grid))
        integral = density.sum() * (first[1] - first[0]) * (second[1] - second[0])
        np.testing.assert_allclose(integral, 1.0, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "masked autoregressive",
        pytest.param("masked autoregressive, inverted", marks=pytest.mark.slow),
        pytest.param("coupling, inverted", marks=pytest.mark.slow),
        pytest.param("block", marks=pytest.mark.slow),
        pytest.param("block, inverted", marks=pytest.mark.slow),
        pytest.param("planar", marks=pytest.mark.slow),
        pytest.param("spline", marks=pytest.mark.slow),
        pytest.param("Student", marks=pytest.mark.slow),
    ],
)
def test_the_derivatives_of_path_and_density_are_consistent_in_both_modes(name):
    family = from_flowjax(flow_of(name))
    with jax.enable_x64():
        parameters = moved(family.init(jnp.zeros(D), 1.0))
        noise = family.sample_noise(jax.random.key(0), (5,), parameters)
        path = check_derivatives(family, parameters, noise, atol=1e-7, atol_forward=1e-12)
        assert np.all(np.any(np.asarray(path.weights) != 0, axis=1))


def test_what_is_frozen_stays_as_it_is_and_all_else_is_trained():
    size = 2
    base = StudentT(jnp.full(size, 3.0), jnp.zeros(size), jnp.array([1.0, 4.0]))
    flow = Transformed(paramax.non_trainable(base), bijections.Affine(jnp.zeros(size)))
    family = from_flowjax(flow)
    with jax.enable_x64():
        start = family.init(jnp.zeros(size), 1.0)
        # The location and the scale of the bijection; df, location and scale of the base are not.
        assert start.weights.shape == (2 * size,)
        parameters = moved(start)._replace(lower=start.lower)
        z = jnp.array([0.3, -30.0])
        log_q, gradient = jax.jit(jax.value_and_grad(family.log_density))(parameters, z)
        assert np.all(np.isfinite(gradient.weights) & (np.asarray(gradient.weights) != 0))
        trained = parameters.weights.reshape(2, size)
        loc, scale = trained[0], jax.nn.softplus(trained[1])
        x = (z - parameters.loc) * jnp.exp(-parameters.log_diagonal)
        wanted = stats.t.logpdf((x - loc) / scale, 3.0, scale=[1.0, 4.0])
        wanted = np.sum(wanted - np.log(scale) - parameters.log_diagonal)
        np.testing.assert_allclose(log_q, wanted, rtol=1e-6)


def test_a_module_that_is_frozen_as_a_whole_is_not_among_the_weights():
    flow = masked(invert=False)
    layer = lambda flow: flow.bijection.bijection[0].masked_autoregressive_mlp  # noqa: E731
    frozen = eqx.tree_at(layer, flow, replace_fn=paramax.NonTrainable)
    count = lambda tree: sum(  # noqa: E731
        leaf.size for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)
    )
    weights = [from_flowjax(each).init(jnp.zeros(D), 1.0).weights for each in (flow, frozen)]
    assert weights[0].size == count(flow)
    assert weights[0].size - weights[1].size == count(layer(flow)) > 0


@pytest.mark.parametrize("name", the_others_slow("masked autoregressive", "standard"))
def test_float32_stays_float32_where_x64_is_on_and_promotion_is_strict(name):
    check_dtypes(from_flowjax(flow_of(name)), D)


@pytest.mark.parametrize("x64", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "name", ["masked autoregressive", pytest.param("coupling, inverted", marks=pytest.mark.slow)]
)
def test_a_flow_serves_in_float32_in_whichever_mode_it_was_built(name, x64):
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        with jax.numpy_dtype_promotion("standard"):
            flow = MAKERS[name]()
        built = {leaf.dtype for leaf in jax.tree.leaves(flow) if eqx.is_inexact_array(leaf)}
        assert built == {jnp.dtype("float64" if x64 else "float32")}
        family = from_flowjax(flow)
        parameters = moved(family.init(jnp.zeros(D, "float32"), 1.0))
        z, log_q = drawn(family, parameters, 100)
        again = jax.jit(jax.vmap(family.log_density, (None, 0)))(parameters, z)
        assert {leaf.dtype for leaf in (z, log_q, again, *parameters)} == {jnp.dtype("float32")}
        np.testing.assert_allclose(log_q, again, rtol=1e-4, atol=1e-4)


def test_a_flow_of_both_precisions_serves_in_either():
    with jax.enable_x64():
        flow = Normal(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0]))
        flow = eqx.tree_at(lambda flow: flow.bijection.loc, flow, jnp.zeros(2, jnp.float32))
        family = from_flowjax(flow)
        for dtype in (jnp.float32, jnp.float64):
            parameters = family.init(jnp.zeros(2, dtype), 1.0)
            z, log_q = drawn(family, parameters, 10)
            assert {leaf.dtype for leaf in (z, log_q, *parameters)} == {jnp.dtype(dtype)}
            again = jax.vmap(family.log_density, (None, 0))(parameters, z)
            np.testing.assert_allclose(log_q, again, rtol=1e-4)


def test_a_flow_that_was_first_met_while_tracing_serves_afterwards():
    flow = planar(size=2)
    start = lambda at: from_flowjax(flow).init(at, 0.5)  # noqa: E731
    traced = jax.jit(jax.vmap(start))(jnp.zeros((1, 2)))
    parameters = start(jnp.zeros(2))
    np.testing.assert_array_equal(traced.weights[0], parameters.weights)
    z, log_q = drawn(from_flowjax(flow), parameters, 10)
    again = jax.vmap(from_flowjax(flow).log_density, (None, 0))(parameters, z)
    np.testing.assert_allclose(again, log_q, rtol=1e-4, atol=1e-4)


def test_a_flow_has_one_family_and_another_built_alike_has_its_own():
    flow, alike = masked(), masked()
    assert from_flowjax(flow) is from_flowjax(flow)
    assert named_proposal(flow) is from_flowjax(flow)
    assert from_flowjax(alike) is not from_flowjax(flow)
    assert len({from_flowjax(flow), from_flowjax(alike)}) == 2


def test_a_flow_that_is_gone_is_forgotten_while_its_family_goes_on():
    flow = Normal(jnp.zeros(2))
    family, address, ended = from_flowjax(flow), id(flow), weakref.ref(flow)
    parameters = family.init(jnp.zeros(2), 1.0)
    assert given_flow._known[address] is family
    del flow
    gc.collect()
    assert ended() is None
    assert address not in given_flow._known
    z, log_q = family.propose(parameters, jnp.array([1, 2], jnp.uint32))
    np.testing.assert_allclose(log_q, family.log_density(parameters, z), rtol=1e-5)


def test_a_family_that_is_gone_leaves_nothing_behind():
    flow = Normal(jnp.zeros(2))
    family = from_flowjax(flow)
    family.init(jnp.zeros(2), 1.0)
    ended = weakref.ref(family.init)
    del family, flow
    gc.collect()
    assert ended() is None


def test_a_new_flow_at_the_address_of_one_that_is_gone_gets_its_own_family():
    families, addresses = [], set()
    for _ in range(100):
        flow = StandardNormal((2,))
        family = from_flowjax(flow)
        assert all(family is not other for other in families)
        families.append(family)
        reused = id(flow) in addresses
        addresses.add(id(flow))
        del flow
        if reused:
            return
    pytest.fail("no address was used twice")


def test_whether_something_is_a_flow_is_found_out_without_importing_flowjax(monkeypatch):
    flow = flow_of("normal")
    assert given_flow.is_flow(flow)
    assert not any(map(given_flow.is_flow, ("mvn", None, Normal, bijections.Affine())))
    monkeypatch.delitem(sys.modules, "flowjax.distributions")
    assert not given_flow.is_flow("mvn")
    assert "flowjax.distributions" not in sys.modules
