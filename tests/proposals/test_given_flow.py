"""Flows and other distributions of flowjax as proposals."""

import gc
import re
import sys
import weakref
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.stats import norm
from numpyro.infer import SVI, Trace_ELBO
from scipy import stats

import rvrs
from rvrs import proposals
from rvrs.bench import compilation
from rvrs.core.randomness import key_from_noise
from rvrs.proposals import from_flowjax, given_flow
from rvrs.settings import named_proposal

pytest.importorskip("flowjax")

import equinox as eqx
import paramax
from flowjax import bijections, flows
from flowjax.distributions import (
    Cauchy,
    MultivariateNormal,
    Normal,
    StandardNormal,
    StudentT,
    Transformed,
    VmapMixture,
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


@pytest.mark.parametrize(
    "name", the_others_slow("masked autoregressive", "coupling", "block", "Student")
)
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
    # By the chain rule, the derivative of log q(z(phi), phi) is that of the path's log density.
    family = from_flowjax(flow_of(name))
    with jax.enable_x64():
        parameters = moved(family.init(jnp.zeros(D), 1.0))
        noise = family.sample_noise(jax.random.key(0), (5,), parameters)

        @jax.vmap
        def derivatives(noise):
            path = jax.grad(lambda phi: family.propose(phi, noise)[1])(parameters)
            z, pull_back = jax.vjp(lambda phi: family.propose(phi, noise)[0], parameters)
            d_phi, d_z = jax.grad(family.log_density, (0, 1))(parameters, z)
            d_z_forward = jax.jacfwd(family.log_density, 1)(parameters, z)
            return path, jax.tree.map(jnp.add, d_phi, pull_back(d_z)[0]), d_z, d_z_forward

        path, chained, d_z, d_z_forward = jax.jit(derivatives)(noise)
        for field in path._fields:
            got, wanted = getattr(path, field), getattr(chained, field)
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7, err_msg=field)
        np.testing.assert_allclose(d_z, d_z_forward, rtol=1e-9, atol=1e-12)
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


@pytest.mark.parametrize(
    "name", the_others_slow("masked autoregressive", "coupling", "block", "standard")
)
def test_float32_stays_float32_where_x64_is_on_and_promotion_is_strict(name):
    family = from_flowjax(flow_of(name))
    with jax.enable_x64(), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float32, jnp.float64):
            parameters = family.init(jnp.zeros(D, dtype), 0.5)
            assert {leaf.dtype for leaf in parameters} == {jnp.dtype(dtype)}
            noise = family.sample_noise(jax.random.key(0), (), parameters)
            # Tracing alone tells the dtypes.
            z, log_q = jax.eval_shape(family.propose, parameters, noise)
            again, gradient = jax.eval_shape(jax.value_and_grad(family.log_density), parameters, z)
            assert {leaf.dtype for leaf in (z, log_q, again, *gradient)} == {jnp.dtype(dtype)}


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


# Training.


LOG_EVIDENCE = 1.5


def banana(z):
    return LOG_EVIDENCE + norm.logpdf(z[0]) + norm.logpdf(z[1], z[0] ** 2, 0.5)


def trained(flow, num_steps):
    algorithm = rvrs.vi.as_top_level_api(
        banana,
        optax.adam(optax.cosine_decay_schedule(2e-2, num_steps)),
        proposal=flow,
        target_acceptance=0.3,
        num_samples=4,
        init_scale=0.5,
    )
    state = algorithm.init(jnp.zeros(2))
    run = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps, chunk_size=num_steps)
    return algorithm, state, *run


@pytest.mark.parametrize(
    "maker",
    [
        pytest.param(partial(masked, invert=False), id="masked autoregressive"),
        pytest.param(partial(masked, invert=True), id="inverted", marks=pytest.mark.slow),
        pytest.param(partial(coupling, invert=True), id="coupling", marks=pytest.mark.slow),
        pytest.param(
            partial(masked, invert=False, base=lambda at: StudentT(5.0, at)),
            id="heavy tails",
            marks=pytest.mark.slow,
        ),
        pytest.param(partial(spline, invert=False), id="spline", marks=pytest.mark.slow),
    ],
)
def test_training_finds_the_log_evidence_of_a_banana_and_nearly_closes_the_gap(maker):
    algorithm, start, state, info = trained(maker(size=2), num_steps=1000)
    got = algorithm.evaluate(jax.random.key(1), state, 100_000)
    assert float(got.log_evidence_error) < 0.02
    assert abs(float(got.log_evidence) - LOG_EVIDENCE) < 4 * float(got.log_evidence_error)
    assert LOG_EVIDENCE - float(got.elbo) < 0.15
    assert not info.skipped.any()
    assert np.any(start.parameters.weights != state.parameters.weights)


Y = np.array([1.5], np.float32)


def model(y):
    """A banana, of which one coordinate is observed."""
    first = numpyro.sample("first", dist.Normal(0.0, 1.0))
    second = numpyro.sample("second", dist.Normal(first**2, 0.5))
    numpyro.sample("y", dist.Normal(second, 1.0), obs=y)


def exact(y):
    """Log evidence and the posterior mean of ``second``, by quadrature over ``first``."""
    first = np.linspace(-8, 8, 4001)
    joint = stats.norm.pdf(first) * stats.norm.pdf(y.item(), first**2, 1.25**0.5)
    second = (first**2 / 0.25 + y.item()) / (1 / 0.25 + 1)
    return np.log(np.sum(joint) * (first[1] - first[0])), np.average(second, weights=joint)


flow_for_the_model = partial(planar, size=2, flow_layers=4, invert=False)
FLOW = flow_for_the_model()
SHORT = {
    "target_acceptance": 0.3,
    "num_steps": 500,
    "num_evaluation_draws": 20_000,
    "progress": False,
}


@pytest.fixture(scope="module")
def fit():
    return rvrs.fit(jax.random.key(0), model, Y, proposal=FLOW, **SHORT)


def test_a_fit_finds_the_log_evidence_and_the_mean(fit):
    log_evidence, mean = exact(Y)
    assert abs(fit.log_evidence - log_evidence) < 4 * fit.log_evidence_error
    assert fit.log_evidence_error < 0.01
    assert log_evidence - fit.elbo < 0.1
    assert abs(fit.acceptance / 0.3 - 1) < 0.1
    draws = np.asarray(fit.sample(jax.random.key(1), 5000, resample=True)["second"], float)
    # Resampled draws are not quite independent.
    assert abs(draws.mean() - mean) < 6 * draws.std() / 5000**0.5
    assert fit.guide.settings.proposal is from_flowjax(FLOW)


def test_another_fit_with_the_same_flow_compiles_nothing_and_is_right(fit):
    with compilation.counted() as count:
        other = rvrs.fit(jax.random.key(1), model, Y - 0.5, proposal=FLOW, **SHORT)
        assert count() == 0
    assert other.guide is fit.guide
    assert abs(other.log_evidence - exact(Y - 0.5)[0]) < 4 * other.log_evidence_error


@pytest.fixture
def path(fit, tmp_path):
    fit.save(tmp_path / "fit.npz")
    return tmp_path / "fit.npz"


def test_a_loaded_fit_draws_the_same_to_the_bit(fit, path):
    loaded = rvrs.load(path, model, Y, proposal=flow_for_the_model())
    assert loaded.elbo == fit.elbo
    jax.tree.map(np.testing.assert_array_equal, loaded.params, fit.params)
    got, wanted = (each.sample(jax.random.key(3), 5000, resample=True) for each in (loaded, fit))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert np.all(np.isfinite(got["second"]))


def test_a_fit_is_not_loaded_without_its_flow(path):
    with pytest.raises(
        ValueError, match=r"a proposal of your own; .* rvrs\.load\(\.\.\., proposal="
    ):
        rvrs.load(path, model, Y)


@pytest.mark.parametrize(
    ("maker", "match"),
    [
        (
            partial(flow_for_the_model, flow_layers=3),
            r"weights does not fit: float32 \(\d+,\) instead",
        ),
        (partial(masked, size=2), "weights does not fit"),
        (partial(flow_for_the_model, size=4), "proposal: the flow is for d=4, but there are 2"),
    ],
)
def test_a_fit_is_not_loaded_with_a_flow_of_other_sizes(maker, match, path):
    with pytest.raises(ValueError, match=match):
        rvrs.load(path, model, Y, proposal=maker())


@pytest.mark.slow
def test_stock_svi_trains_a_guide_with_a_flow():
    guide = rvrs.AutoRVRS(model, proposal=FLOW, target_acceptance=0.3)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1000, Y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert result.losses[-100:].mean() < result.losses[:100].mean()
    got = guide.evaluate(jax.random.key(1), result.params, Y, num_draws=20_000)
    log_evidence, _ = exact(Y)
    assert abs(float(got.log_evidence) - log_evidence) < 4 * float(got.log_evidence_error)
    assert log_evidence - float(got.elbo) < 0.15
    fields = proposals.Flow._fields
    assert set(result.params) == {f"auto_{field}" for field in fields}


# What is refused.


def conditional():
    shift = bijections.AdditiveCondition(lambda condition: condition, (2,), (2,))
    return Transformed(Normal(jnp.zeros(2)), shift)


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


def svi_of(model, **options):
    guide = rvrs.AutoRVRS(model, **options)
    SVI(model, guide, optax.adam(1e-2), Trace_ELBO()).init(jax.random.key(0), Y)


def vi_of(_, **options):
    rvrs.vi.as_top_level_api(banana, optax.adam(1e-2), **options).init(jnp.zeros(2))


def fit_of(model, **options):
    rvrs.fit(jax.random.key(0), model, Y, **SHORT | options)


@pytest.mark.parametrize("use", [svi_of, vi_of, fit_of])
def test_every_way_in_refuses_what_does_not_fit_and_names_the_proposal(use):
    match = r"proposal: the flow is for d=3, but there are 2 latent .* base of shape \(2,\)"
    with pytest.raises(ValueError, match=match):
        use(model, proposal=flow_of("coupling"))
    with pytest.raises(ValueError, match="flow is conditional"):
        use(model, proposal=conditional())
    with pytest.raises(ValueError, match="proposal must be one of 'diagonal', "):
        use(model, proposal=bijections.Affine(jnp.zeros(2)))


def test_without_flowjax_the_error_says_what_to_install(monkeypatch):
    flow = flow_of("normal")
    monkeypatch.setitem(sys.modules, "flowjax", None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[flows\]'"):
        from_flowjax(flow)
