"""AutoSemiRVRS against conjugate hierarchies, and as a citizen of NumPyro."""

import functools

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.module import eqx_module, flax_module
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

import rvrs
from rvrs.core import rejection
from rvrs.guides import _semi_posterior
from tests.guides import hierarchies
from tests.guides.hierarchies import HIERARCHIES, NUM_POINTS, X

EPSILON = 1e-3


def float32(parameters):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters)


@functools.cache
def evaluated(name, target_acceptance, num_global=400, num_local=400, epsilon=EPSILON):
    case = HIERARCHIES[name]
    guide = case.guide(2, target_acceptance=target_acceptance, epsilon=epsilon)
    params = float32(case.parameters())
    return guide.evaluate(jax.random.key(0), params, num_global=num_global, num_local=num_local)


@pytest.mark.parametrize("name", ["normal", "scale mixture, Gamma"])
def test_the_nested_elbo_of_all_points_is_that_of_quadrature(name):
    found = evaluated(name, 0.2)
    with jax.enable_x64():
        case = HIERARCHIES[name]
        t = np.asarray(found.threshold, float)
        wanted = float(hierarchies.exact_elbo(case, case.parameters(), t, EPSILON))
    assert abs(float(found.elbo) - wanted) < 4 * float(found.elbo_error)
    assert float(found.elbo_error) < 0.05


@pytest.mark.slow
def test_the_estimated_bias_is_what_few_proposals_add():
    # Differences of two evaluations at the same global draws show little but the bias.
    few, many = evaluated("normal", 0.2, 20_000, 40), evaluated("normal", 0.2, 2000, 400)
    plain = float(few.elbo + few.elbo_bias)
    error = np.hypot(float(few.elbo_error), float(many.elbo_error))
    assert abs(plain - float(many.elbo) - float(few.elbo_bias)) < 4 * error
    assert plain < float(many.elbo) - 4 * error


@pytest.mark.slow
def test_the_elbo_rises_to_that_of_exact_local_posteriors_as_the_acceptance_falls():
    case = HIERARCHIES["normal"]
    with jax.enable_x64():
        # With the local latents integrated out, x is normal around the global latent.
        parameters = case.parameters()
        nodes, weights = np.polynomial.hermite_e.hermegauss(40)
        g = parameters["g_loc"] + parameters["g_scale"] * nodes
        scale = np.hypot(0.8, np.exp(hierarchies.THETA))
        inside = sum(hierarchies.log_normal(x, g, scale) for x in X)
        outside = hierarchies.log_normal(g, 0.0, 1.0) - hierarchies.log_normal(
            g, parameters["g_loc"], parameters["g_scale"]
        )
        wanted = float(weights @ (inside + outside) / weights.sum())
    gaps = []
    for target_acceptance in (0.5, 0.1, 0.02):
        found = evaluated("normal", target_acceptance, 400, 2000, epsilon=1e-6)
        assert abs(float(found.marginal_elbo) - wanted) < 4 * float(found.marginal_elbo_error)
        gaps.append(wanted - float(found.elbo))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]
    assert gaps[2] < 0.1 * gaps[0]


@pytest.mark.slow
def test_evaluation_takes_no_more_memory_for_more_draws():
    num_points = 5000
    x = jnp.asarray(np.random.default_rng(0).normal(size=num_points), jnp.float32)

    def global_model():
        return numpyro.sample("g", dist.Normal(0.0, 1.0))

    def local_model(g):
        with numpyro.plate("data", num_points, subsample_size=256) as index:
            z = numpyro.sample("z", dist.Normal(g, 1.0))
            numpyro.sample("x", dist.StudentT(3.0, z, 1.0), obs=x[index])

    guide = rvrs.AutoSemiRVRS(
        lambda: local_model(global_model()), local_model, AutoNormal(global_model)
    )
    arguments = ((), {})
    params, _ = guide.initial_parameters(jax.random.key(0), arguments, num_points)
    plate = guide.plate_of(arguments)

    def bytes_of(num_global, num_local):
        program = jax.jit(
            lambda key, params: _semi_posterior.evaluate(
                guide, plate, num_global, num_local, key, params, jnp.arange(num_points), arguments
            )
        )
        return program.lower(jax.random.key(0), params).compile().memory_analysis()

    paper = bytes_of(10_000, 1_000).temp_size_in_bytes
    assert paper < 100e6
    assert paper < 1.5 * bytes_of(10, 1_000).temp_size_in_bytes


@functools.cache
def fixed(sampler, num_proposals, size=None, count=40_000):
    """Losses of the normal hierarchy at a fixed threshold."""
    case = HIERARCHIES["normal"]
    guide = case.guide(
        size,
        target_acceptance=0.3,
        threshold=0.0,
        epsilon=EPSILON,
        sampler=sampler,
        num_proposals=num_proposals,
    )
    params = float32(case.parameters())

    @jax.jit
    @jax.vmap
    def losses(key):
        return Trace_ELBO().loss(key, params, guide.model, guide)

    return np.asarray(losses(jax.random.split(jax.random.key(3), count)), float)


@pytest.mark.slow
def test_the_bias_of_the_budget_sampler_shrinks_with_its_budget():
    with jax.enable_x64():
        case = HIERARCHIES["normal"]
        wanted = -float(hierarchies.exact_elbo(case, case.parameters(), 0.0, EPSILON))
    biases, errors = [], []
    for budget in (8, 32, 256):
        # The loss is NaN where no point got its draws.
        losses = fixed("budget", budget)
        biases.append(np.nanmean(losses) - wanted)
        errors.append(np.nanstd(losses) / np.sqrt(len(losses)))
    assert abs(biases[0]) > 2 * abs(biases[1]) > 2 * abs(biases[2])
    assert abs(biases[0]) > 4 * errors[0]
    assert abs(biases[2]) < 0.02 + 4 * errors[2]


def problem_with_a_straggler():
    """Nine easy data points and one whose proposal hardly meets its posterior."""
    x = jnp.concatenate([jnp.zeros(9), jnp.array([4.0])])

    def model():
        with numpyro.plate("data", 10) as index:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 0.4), obs=x[index])

    guide = rvrs.AutoSemiRVRS(
        model, model, threshold=2.0, epsilon=1e-6, max_proposals=100_000, init_scale=1.0
    )
    arguments = ((), {})
    params, _ = guide.initial_parameters(jax.random.key(0), arguments, 10)
    program = guide.local_program(guide.plate_of(arguments), params, {}, arguments)
    return guide, *guide.problem(program, params, program.rows(jnp.arange(10)))


@pytest.mark.slow
def test_reallocation_saves_most_proposals_where_one_point_is_hard():
    guide, problem, targets = problem_with_a_straggler()
    t = jnp.full(10, 2.0).at[9].set(-2.0)
    totals = {}
    for reallocate in (False, True):
        draws = jax.jit(
            lambda key, reallocate=reallocate: rejection.draw_exact(
                key,
                problem,
                targets,
                t,
                num_samples=2,
                epsilon=1e-6,
                block_size=20,
                max_proposals=200_000,
                reallocate=reallocate,
            )
        )(jax.random.key(1))
        assert bool(jnp.all(draws.complete))
        totals[reallocate] = int(jnp.sum(draws.tally.num_proposals))
    acceptance = float(draws.tally.acceptance[9] / draws.tally.num_proposals[9])
    assert acceptance < 3e-4
    assert totals[True] < totals[False] / 5
    # The guide asks for it.
    again = guide.draw_exact(jax.random.key(1), problem, targets, t, 2)
    assert int(jnp.sum(again.tally.num_proposals)) < totals[False] / 5


def per_point_guide(x):
    with numpyro.plate("data", 6) as index:
        loc = numpyro.param("loc", jnp.zeros(6))[index]
        scale = numpyro.param("scale", jnp.ones(6))[index]
        numpyro.sample("z", dist.Normal(loc, scale))


def encoder_guide(x):
    slope, scale = numpyro.param("slope", jnp.array(0.0)), numpyro.param("scale", jnp.array(1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("z", dist.Normal(slope * x, scale))


def local_only(x):
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.StudentT(4.0, z, 0.5), obs=x)


POINTS = jnp.array([0.3, -1.0, 2.0, 0.7, -0.4, 1.2])


def test_an_encoder_and_parameters_of_every_point_agree():
    settings = {"target_acceptance": 0.3, "threshold": 0.0}
    encoder = rvrs.AutoSemiRVRS(local_only, local_only, None, encoder_guide, **settings)
    points = rvrs.AutoSemiRVRS(local_only, local_only, None, per_point_guide, **settings)
    shared = {"slope": jnp.array(0.7), "scale": jnp.array(0.6)}
    own = {"loc": 0.7 * POINTS, "scale": jnp.full(6, 0.6)}
    key = jax.random.key(4)

    def loss(guide):
        return jax.jit(
            jax.value_and_grad(lambda p: Trace_ELBO().loss(key, p, local_only, guide, POINTS))
        )

    value, gradient = loss(encoder)(shared)
    own_value, own_gradient = loss(points)(own)
    np.testing.assert_allclose(value, own_value, rtol=1e-5)
    np.testing.assert_allclose(gradient["slope"], own_gradient["loc"] @ POINTS, rtol=1e-4)
    np.testing.assert_allclose(gradient["scale"], own_gradient["scale"].sum(), rtol=1e-4)


def test_new_data_is_sampled_by_an_encoder_at_the_wanted_acceptance():
    guide = rvrs.AutoSemiRVRS(local_only, local_only, None, encoder_guide, target_acceptance=0.2)
    params = {"slope": jnp.array(0.7), "scale": jnp.array(0.9)}
    new = jnp.array([1.5, -2.0, 0.0])
    draws = guide.sample_posterior(jax.random.key(0), params, new, sample_shape=(4, 500))
    assert draws["z"].shape == (4, 500, 3)
    grid = np.linspace(-8, 10, 4001)
    for n, x in enumerate(np.asarray(new)):
        log_p = -(grid**2) / 2 - 2.5 * np.log1p(((x - grid) / 0.5) ** 2 / 4)
        weight = np.exp(log_p - log_p.max())
        mean = weight @ grid / weight.sum()
        sd = np.sqrt(weight @ (grid - mean) ** 2 / weight.sum())
        z = np.asarray(draws["z"][..., n]).ravel()
        assert abs(z.mean() - mean) < 0.1 * sd
        assert abs(z.std() / sd - 1) < 0.15
    found = guide.evaluate(jax.random.key(1), params, new, num_local=20_000)
    np.testing.assert_allclose(np.exp(found.log_normalizer), 0.2, rtol=0.2)


@functools.cache
def trained(size=2, num_steps=300):
    case = HIERARCHIES["normal"]
    guide = case.guide(size, target_acceptance=0.3)
    svi = SVI(guide.model, guide, optax.adam(0.02), Trace_ELBO())
    state = svi.init(jax.random.key(0))
    state, losses = jax.lax.scan(lambda state, _: svi.update(state), state, None, length=num_steps)
    return guide, svi, state, losses


def test_stock_svi_trains_it_in_a_scan():
    _, _, state, losses = trained()
    assert bool(jnp.all(jnp.isfinite(losses)))
    assert float(losses[-100:].mean()) < float(losses[:20].mean())
    table = state.mutable_state["auto_state"]
    assert table["value"].shape == (NUM_POINTS,)
    assert bool(jnp.all(table["memory"] > 0))
    assert int(table["num_dropped"]) == 0


def test_only_the_rows_of_the_batch_change_in_the_table_of_thresholds():
    _, svi, state, _ = trained()
    with handlers.substitute(data={"data": jnp.array([2, 0])}):
        new, _ = svi.update(state)
    before, after = (s.mutable_state["auto_state"]["value"] for s in (state, new))
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(before != after)), [0, 2])


@pytest.mark.slow
def test_a_subset_is_chosen_as_for_autosemidais():
    case = HIERARCHIES["normal"]
    guide = case.guide(2, target_acceptance=0.05)
    params = float32(case.parameters())
    with handlers.substitute(data={"data": jnp.array([2])}):
        draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(4000,))
    assert draws["z"].shape == (4000, 1)
    # Given g, the local posterior is normal with known moments; r is close to it.
    data_precision = np.exp(-2 * hierarchies.THETA)
    precision = 0.8**-2 + data_precision
    means = (np.asarray(draws["g"]) * 0.8**-2 + X[2] * data_precision) / precision
    standard = (np.asarray(draws["z"][:, 0]) - means) * np.sqrt(precision)
    assert abs(standard.mean()) < 0.1
    assert abs(standard.std() - 1) < 0.1
    one = guide.sample_posterior(jax.random.key(0), params)
    assert one["z"].shape == (2,)
    assert one["g"].shape == ()


@pytest.mark.slow
def test_quantiles_and_predictive_go_with_it():
    guide, svi, state, _ = trained()
    params = svi.get_params(state)
    low, high = guide.quantiles(params, [0.1, 0.9], num_samples=200)["z"]
    assert bool(jnp.all(low < high))
    predictive = Predictive(guide.model, guide=guide, params=params, num_samples=5)
    assert predictive(jax.random.key(0))["x"].shape == (5, 2)


def test_a_new_batch_traces_nothing_and_a_new_batch_size_traces_once():
    runs = []

    def model(x):
        runs.append(len(x))
        with numpyro.plate("data", 20, subsample_size=len(x)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)

    guide = rvrs.AutoSemiRVRS(model, model, target_acceptance=0.5)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    update = jax.jit(svi.update)
    state = svi.init(jax.random.key(0), POINTS[:4])
    state, _ = update(state, POINTS[:4])
    traced = len(runs)
    for start in range(3):
        state, _ = update(state, POINTS[start : start + 4])
    assert len(runs) == traced
    state, _ = update(state, POINTS[:3])
    assert set(runs[traced:]) <= {1, 3}
    traced = len(runs)
    update(state, POINTS[3:])
    assert len(runs) == traced


@pytest.mark.slow
def test_several_local_sites_of_any_shape_and_support():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)
    counts = jnp.asarray(rng.integers(0, 5, (5, 3)))

    def model():
        with numpyro.plate("data", 5, subsample_size=3) as index:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
            share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
            numpyro.sample("x", dist.Normal(z, tau[:, None]).to_event(1), obs=x[index])
            total = counts.sum(-1)[index]
            numpyro.sample("counts", dist.Multinomial(total, share), obs=counts[index])
            numpyro.deterministic("sum", z.sum(-1))

    guide = rvrs.AutoSemiRVRS(model, model, target_acceptance=0.2)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 30, progress_bar=False)
    assert bool(jnp.all(jnp.isfinite(result.losses)))
    assert result.params["auto_z_loc"].shape == (5, 2)
    assert result.params["auto_share_loc"].shape == (5, 2)
    draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(7,))
    shapes = {name: value.shape for name, value in draws.items()}
    assert shapes == {"z": (7, 3, 2), "tau": (7, 3), "share": (7, 3, 3), "sum": (7, 3)}
    np.testing.assert_allclose(draws["share"].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(draws["z"].sum(-1), draws["sum"], rtol=1e-4, atol=1e-5)


class Decoder(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, z):
        return jax.nn.tanh(self.layer(z))


def equinox_networks():
    keys = jax.random.split(jax.random.key(0))
    decoder = Decoder(eqx.nn.Linear(1, 2, key=keys[0]))
    encoder = Decoder(eqx.nn.Linear(2, 1, key=keys[1]))
    return lambda: eqx_module("decoder", decoder), lambda: eqx_module("encoder", encoder)


def flax_networks():
    return (
        lambda: flax_module("decoder", flax.linen.Dense(2), input_shape=(1,)),
        lambda: flax_module("encoder", flax.linen.Dense(1), input_shape=(2,)),
    )


@pytest.mark.parametrize(
    "networks", [equinox_networks, pytest.param(flax_networks, marks=pytest.mark.slow)]
)
def test_networks_in_model_and_guide_get_gradients(networks):
    make_decoder, make_encoder = networks()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)

    def model(x):
        network = make_decoder()
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
            numpyro.sample("x", dist.Normal(jax.vmap(network)(z), 0.5).to_event(1), obs=x)

    def guide(x):
        network = make_encoder()
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal(jax.vmap(network)(x), 0.5).to_event(1))

    semi = rvrs.AutoSemiRVRS(model, model, None, guide, target_acceptance=0.3)
    svi = SVI(model, semi, optax.adam(0.01), Trace_ELBO())
    before = svi.init(jax.random.key(0), x)
    after, loss = jax.jit(svi.update)(before, x)
    assert bool(jnp.isfinite(loss))
    moved = jax.tree.map(
        lambda a, b: bool(jnp.any(a != b)), svi.get_params(before), svi.get_params(after)
    )
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.slow
def test_a_global_guide_may_be_any_function_and_the_local_one_sees_its_draws():
    seen = []

    def model(x):
        g = numpyro.sample("g", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x)):
            z = numpyro.sample("z", dist.Normal(g, 1.0))
            numpyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def global_guide(x):
        numpyro.sample("g", dist.Normal(numpyro.param("m", 0.1), 0.5))

    def local_guide(latents, x):
        seen.append(set(latents))
        with numpyro.plate("data", len(x)):
            numpyro.sample("z", dist.Normal(0.5 * (latents["g"] + x), 0.7))

    guide = rvrs.AutoSemiRVRS(model, model, global_guide, local_guide, target_acceptance=0.3)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    result = svi.run(jax.random.key(0), 20, POINTS, progress_bar=False)
    assert bool(jnp.all(jnp.isfinite(result.losses)))
    assert seen[0] == {"g"}
    assert guide.sample_posterior(jax.random.key(0), result.params, POINTS)["z"].shape == (6,)


@pytest.mark.slow
def test_an_autoguide_of_the_local_model_proposes_too():
    case = HIERARCHIES["normal"]
    local = lambda outputs: case.local_model(outputs, 2)  # noqa: E731
    model = lambda: local(case.global_model())  # noqa: E731
    guide = rvrs.AutoSemiRVRS(
        model,
        local,
        AutoDiagonalNormal(case.global_model),
        AutoNormal(local, prefix="local"),
        target_acceptance=0.3,
    )
    svi = SVI(model, guide, optax.adam(0.02), Trace_ELBO())
    result = svi.run(jax.random.key(0), 50, progress_bar=False)
    assert bool(jnp.all(jnp.isfinite(result.losses)))
    assert result.params["z_local_loc"].shape == (NUM_POINTS,)


@pytest.mark.slow
def test_a_model_that_just_has_its_rows_is_right_if_slow():
    # The example in NumPyro's documentation of AutoSemiDAIS.
    def model():
        with numpyro.plate("data", 8, subsample_size=2):
            tau = numpyro.sample("tau", dist.Gamma(5.0, 5.0))
            numpyro.sample("obs", dist.Normal(0.0, tau), obs=jnp.array([1.0, -2.0]))

    guide = rvrs.AutoSemiRVRS(model, model, target_acceptance=0.3)
    svi = SVI(model, guide, optax.adam(0.02), Trace_ELBO())
    with pytest.warns(UserWarning, match="computes with all 2"):
        state = svi.init(jax.random.key(0))
    with pytest.warns(UserWarning, match="computes with all 2"):
        _, loss = svi.update(state)
    assert bool(jnp.isfinite(loss))


@pytest.mark.slow
def test_it_runs_in_double_precision():
    with jax.enable_x64():
        case = HIERARCHIES["scale mixture"]
        guide = case.guide(2, target_acceptance=0.3)
        svi = SVI(guide.model, guide, optax.adam(0.02), Trace_ELBO())
        result = svi.run(jax.random.key(0), 10, progress_bar=False)
        assert result.params["auto_tau_loc"].dtype == jnp.float64
        assert result.losses.dtype == jnp.float64
        assert bool(jnp.all(jnp.isfinite(result.losses)))
