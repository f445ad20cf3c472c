"""AutoRVRS with everything that stock SVI does to a guide."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from numpyro.contrib.module import eqx_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, Trace_ELBO
from scipy import stats

import rvrs
from tests.guides.models import X, Y, line, location, svi_of

STEPS = 20


@pytest.fixture(scope="module")
def trained():
    """A guide, its SVI and the result of a short run."""
    guide = rvrs.AutoRVRS(line, target_acceptance=0.3)
    svi = svi_of(line, guide)
    return guide, svi, svi.run(jax.random.key(0), STEPS, X, Y, progress_bar=False)


def assert_same(first, second, rtol=1e-5):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=rtol, err_msg=name)


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_the_progress_bar(trained):
    _, svi, result = trained
    bar = svi.run(jax.random.key(0), STEPS, X, Y, progress_bar=True)
    assert_same(result.params, bar.params)
    np.testing.assert_allclose(result.losses, bar.losses, rtol=1e-4)


@pytest.mark.parametrize("way", ["jit", "scan", "fori_loop", "stable_update"])
def test_steps_give_the_parameters_of_a_run_however_they_are_looped(way, trained):
    _, svi, result = trained
    state = svi.init(jax.random.key(0), X, Y)
    step = svi.stable_update if way == "stable_update" else svi.update
    if way == "scan":
        body = lambda state, _: step(state, X, Y)  # noqa: E731
        state, _ = jax.jit(lambda state: lax.scan(body, state, None, length=STEPS))(state)
    elif way == "fori_loop":
        body = lambda _, state: step(state, X, Y)[0]  # noqa: E731
        state = lax.fori_loop(0, STEPS, body, state)
    else:
        step = jax.jit(step)
        for _ in range(STEPS):
            state, _ = step(state, X, Y)
    assert_same(svi.get_params(state), result.params)
    threshold = state.mutable_state["auto_state"]["value"]
    np.testing.assert_allclose(threshold, result.state.mutable_state["auto_state"]["value"], 1e-4)


def test_a_run_continues_from_its_state(trained):
    _, svi, result = trained
    half = svi.run(jax.random.key(0), STEPS // 2, X, Y, progress_bar=False)
    whole = svi.run(jax.random.key(9), STEPS // 2, X, Y, progress_bar=False, init_state=half.state)
    assert_same(whole.params, result.params)


def test_initial_parameters_are_those_that_were_asked_for(trained):
    _, svi, _ = trained
    wanted = {"auto_loc": jnp.array([0.3, -0.7])}
    got = svi.get_params(svi.init(jax.random.key(0), X, Y, init_params=wanted))
    np.testing.assert_array_equal(got["auto_loc"], wanted["auto_loc"])
    np.testing.assert_allclose(got["auto_log_scale"], np.log(0.1), rtol=1e-6)


def test_evaluate_averages_to_minus_the_elbo(trained):
    guide, svi, result = trained
    keys = jax.random.split(jax.random.key(2), 4000)
    once = lambda key: svi.evaluate(result.state._replace(rng_key=key), X, Y)  # noqa: E731
    values = np.asarray(jax.jit(jax.vmap(once))(keys), float)
    wanted = guide.evaluate(jax.random.key(3), result.params, X, Y, num_draws=50_000)
    # T is solved in both, from different proposals, to about 3 % of Z; this moves the ELBO by
    # about 3 % of its derivative by log Z, which is below 1.
    error = np.hypot(values.std() / np.sqrt(values.size), float(wanted.elbo_error))
    assert abs(values.mean() + float(wanted.elbo)) < 4 * error + 0.02


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_draws_from_the_guide(parallel, trained):
    guide, _, result = trained
    predictive = Predictive(
        line, guide=guide, params=result.params, num_samples=1000, parallel=parallel
    )
    got = np.asarray(predictive(jax.random.key(1), X, Y)["double"], float)
    assert got.shape == (1000,)
    draws = guide.sample_posterior(jax.random.key(2), result.params, X, Y, sample_shape=(1000,))
    wanted = 2 * np.asarray(draws["slope"], float)
    error = np.hypot(got.std(), wanted.std()) / np.sqrt(1000)
    assert abs(got.mean() - wanted.mean()) < 4 * error


def test_predictive_without_the_data_says_what_to_do_and_that_works(trained):
    guide, _, result = trained
    new = np.array([0.0, 10.0], np.float32)
    with pytest.raises(ValueError, match=r"'y' changed.*guide\.conditioned_on"):
        Predictive(line, guide=guide, params=result.params, num_samples=5)(jax.random.key(1), new)
    predictive = Predictive(
        line, guide=guide.conditioned_on(X, y=Y), params=result.params, num_samples=500
    )
    got = predictive(jax.random.key(1), new)
    assert got["y"].shape == (500, 2)
    assert np.corrcoef(got["y"][:, 1], got["double"])[0, 1] > 0.2


def test_several_particles_are_refused_with_the_remedy(trained):
    guide, _, _ = trained
    svi = SVI(line, guide, numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=2))
    with pytest.raises(ValueError, match=r"num_particles.*num_samples"):
        svi.run(jax.random.key(0), 3, X, Y, progress_bar=False)
    # Mapped one after the other they cannot be told from one; NumPyro's own warning stays.
    loss = Trace_ELBO(num_particles=2, vectorize_particles=False)
    svi = SVI(line, guide, numpyro.optim.Adam(1e-2), loss)
    with pytest.warns(UserWarning, match="mutable state is currently ignored"):
        svi.update(svi.init(jax.random.key(0), X, Y), X, Y)


@pytest.mark.slow
def test_double_precision_is_kept():
    with jax.enable_x64():
        guide = rvrs.AutoRVRS(line, target_acceptance=0.3)
        svi = svi_of(line, guide)
        x, y = X.astype(float), Y.astype(float)
        result = svi.run(jax.random.key(0), 3, x, y, progress_bar=False)
        draws = guide.sample_posterior(jax.random.key(1), result.params, x, y, sample_shape=(4,))
        assert result.losses.dtype == jnp.float64
        for leaf in jax.tree.leaves((result.params, draws)):
            assert leaf.dtype == jnp.float64
        assert result.state.mutable_state["auto_state"]["value"].dtype == jnp.float64


@pytest.mark.slow
def test_old_and_new_keys_give_the_same(trained):
    guide, svi, result = trained
    old = svi.run(jax.random.PRNGKey(0), STEPS, X, Y, progress_bar=False)
    assert_same(old.params, result.params)
    first, second = (
        guide.sample_posterior(make(1), result.params, X, Y, sample_shape=(5,))
        for make in (jax.random.key, jax.random.PRNGKey)
    )
    assert_same(first, second)


@pytest.mark.slow
def test_runs_can_be_mapped_over_seeds_and_the_guide_used_afterwards():
    guide = rvrs.AutoRVRS(line, target_acceptance=0.3)
    svi = svi_of(line, guide)
    jax.jit(svi.init)(jax.random.key(0), X, Y)
    keys = jax.random.split(jax.random.key(0), 3)
    run = lambda key: svi.run(key, STEPS, X, Y, progress_bar=False).params  # noqa: E731
    many = jax.jit(jax.vmap(run))(keys)
    assert len(np.unique(many["auto_loc"][:, 0])) == 3
    with jax.checking_leaks():
        guide.sample_posterior(
            jax.random.key(1), jax.tree.map(lambda leaf: leaf[0], many), X, Y, sample_shape=(2,)
        )
    # The seed decides where a fresh guide starts, so the second seed has to be the first one here.
    guide = rvrs.AutoRVRS(line, target_acceptance=0.3)
    one = svi_of(line, guide).run(keys[1], STEPS, X, Y, progress_bar=False).params
    assert_same(one, jax.tree.map(lambda leaf: leaf[1], many), rtol=1e-3)


@pytest.mark.slow
def test_two_guides_with_different_prefixes_stand_side_by_side():
    parts = [
        lambda: numpyro.sample("a", dist.Gamma(2.0, 3.0)),
        lambda: numpyro.sample("b", dist.StudentT(3.0, 1.0)),
    ]
    guides = [
        rvrs.AutoRVRS(part, prefix=name, target_acceptance=0.3)
        for part, name in zip(parts, "ab", strict=True)
    ]
    both = lambda functions: lambda: [function() for function in functions]  # noqa: E731
    svi = svi_of(both(parts), both(guides))
    result = svi.run(jax.random.key(0), STEPS, progress_bar=False)
    assert set(result.state.mutable_state) == {"a_state", "b_state"}
    keys = jax.random.split(jax.random.key(2), 4000)
    once = lambda key: svi.evaluate(result.state._replace(rng_key=key))  # noqa: E731
    values = np.asarray(jax.jit(jax.vmap(once))(keys), float)
    elbos = [guide.evaluate(jax.random.key(3), result.params, num_draws=50_000) for guide in guides]
    error = np.hypot(values.std() / np.sqrt(values.size), 2 * float(elbos[0].elbo_error))
    assert abs(values.mean() + sum(float(e.elbo) for e in elbos)) < 4 * error + 0.02


def posterior_z_score(guide, params, y):
    """Of the mean of draws from the guide against the exact posterior of ``location``."""
    draws = np.asarray(
        guide.sample_posterior(jax.random.key(5), params, y, sample_shape=(2000,))["mu"], float
    )
    return (draws.mean() - np.mean(y)) * np.sqrt(len(y) * draws.size)


def test_data_that_change_between_calls_are_the_data_that_count():
    guide = rvrs.AutoRVRS(location, target_acceptance=0.3)
    svi = svi_of(location, guide, 0.1)
    y = np.zeros(4, np.float32)
    before = float(svi.evaluate(svi.init(jax.random.key(0), y), y))
    y[:] = 20  # in place, too
    state = svi.init(jax.random.key(0), y)
    assert float(svi.evaluate(state, y)) > before + 500
    update = jax.jit(svi.update)
    for _ in range(700):
        state, _ = update(state, y)
    params = svi.get_params(state)
    assert abs(posterior_z_score(guide, params, y)) < 4
    log_evidence = stats.multivariate_normal.logpdf(y, np.zeros(4), np.eye(4) + 1000.0**2)
    got = guide.evaluate(jax.random.key(1), params, y, num_draws=50_000)
    assert abs(float(got.log_evidence) - log_evidence) < 4 * float(got.log_evidence_error) + 1e-3
    # The same program, other data.
    y[:] = 20.5
    for _ in range(2000):
        state, _ = update(state, y)
    assert abs(posterior_z_score(guide, svi.get_params(state), y)) < 4


def test_constraints_of_model_parameters_outlive_repeated_initialisation():
    def model(y):
        scale = numpyro.param("scale", 2.0, constraint=constraints.positive)
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, scale), obs=y)

    svi = svi_of(model, rvrs.AutoRVRS(model, target_acceptance=0.3))
    for seed in range(3):
        state = svi.init(jax.random.key(seed), Y)
        assert float(svi.get_params(state)["scale"]) == pytest.approx(2.0)
        raw = svi.optim.get_params(state.optim_state)
        assert float(raw["scale"]) == pytest.approx(np.log(2.0))
    result = svi.run(jax.random.key(0), 300, Y, progress_bar=False)
    assert 0 < float(result.params["scale"]) < 1.9


@pytest.mark.slow
def test_a_neural_network_in_the_model_is_trained_along():
    network = eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0))

    def model(x, y):
        net = eqx_module("net", network)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        mean = numpyro.deterministic("mean", jax.vmap(net)(x[:, None])[:, 0])
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    guide = rvrs.AutoRVRS(model, target_acceptance=0.3)
    result = svi_of(model, guide, 3e-2).run(jax.random.key(0), 200, X, Y, progress_bar=False)
    assert np.mean(result.losses[-20:]) < np.mean(result.losses[:20]) - 1
    draws = guide.sample_posterior(jax.random.key(1), result.params, X, Y, sample_shape=(3,))
    assert draws["mean"].shape == (3, 8)
    assert float(jnp.mean((draws["mean"][0] - Y) ** 2)) < 0.3


@pytest.mark.slow
def test_improper_priors_and_dynamic_supports_are_sampled_inside_their_support():
    def model(y):
        whole = numpyro.sample("whole", dist.ImproperUniform(constraints.positive, (), ()))
        part = numpyro.sample("part", dist.Uniform(0.0, whole))
        numpyro.sample("y", dist.Normal(jnp.stack([whole, part]), 0.5), obs=y)

    guide = rvrs.AutoRVRS(model, target_acceptance=0.3)
    y = jnp.array([2.0, 1.0])
    result = svi_of(model, guide).run(jax.random.key(0), 50, y, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1), result.params, y, sample_shape=(500,))
    assert np.all(draws["part"] > 0)
    assert np.all(draws["part"] < draws["whole"])


def test_a_model_may_size_its_plates_by_the_values_of_its_arguments():
    def model(group, y):
        with numpyro.plate("groups", int(group.max()) + 1):
            mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu[group], 0.5), obs=y)

    group = np.array([0, 1, 2, 2])
    y = np.array([0.5, -0.5, 1.0, 2.0], np.float32)
    guide = rvrs.AutoRVRS(model, target_acceptance=0.3)
    result = svi_of(model, guide).run(jax.random.key(0), 5, group, y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    draws = guide.sample_posterior(jax.random.key(1), result.params, group, y, sample_shape=(6,))
    assert draws["mu"].shape == (6, 3)


def test_a_guide_can_be_copied(trained):
    guide, _, result = trained
    first, second = (
        g.sample_posterior(jax.random.key(1), result.params, X, Y, sample_shape=(5,))
        for g in (guide, copy.deepcopy(guide))
    )
    assert_same(first, second)


def test_parameters_mean_the_same_whether_the_structure_was_found_while_tracing_or_not():
    # The sites of the model are not in alphabetical order.
    params = {
        "auto_loc": jnp.array([7.0, -3.0]),
        "auto_log_scale": jnp.array([-7.0, -7.0]),
    }

    def draw(key):
        guide = rvrs.AutoRVRS(line, target_acceptance=1.0)
        return guide.sample_posterior(key, params, X, Y)

    for got in (draw(jax.random.key(0)), jax.jit(draw)(jax.random.key(0))):
        assert float(got["slope"]) == pytest.approx(7.0, abs=0.01)
        assert float(got["scale"]) == pytest.approx(np.exp(-3.0), abs=0.01)
