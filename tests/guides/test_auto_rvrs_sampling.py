"""Draws from a trained AutoRVRS against exact posteriors, and what comes with them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import rvrs
from tests.guides.models import X, Y, line, rate, svi_of

ZERO = np.zeros(1, np.float32)
# Of `rate` given one count of zero; its logarithm is far from normal.
EXACT = stats.gamma(0.5, scale=0.5)


@pytest.fixture(scope="module")
def trained():
    guide = rvrs.AutoRVRS(rate, target_acceptance=0.03, epsilon=1e-6)
    return guide, svi_of(rate, guide, 3e-2).run(
        jax.random.key(0), 1500, ZERO, progress_bar=False
    ).params


@pytest.fixture(scope="module")
def draws(trained):
    guide, params = trained
    return guide.sample_posterior(jax.random.key(1), params, ZERO, sample_shape=(4000,))


def test_draws_at_low_acceptance_follow_the_exact_posterior(draws):
    assert stats.kstest(np.asarray(draws["rate"], float), EXACT.cdf).pvalue > 1e-3


def test_a_normal_proposal_alone_would_not(trained):
    guide, params = trained
    plain = guide.propose_latent(jax.random.key(1), params, ZERO, num_samples=4000)
    assert stats.kstest(np.exp(np.asarray(plain[:, 0], float)), EXACT.cdf).pvalue < 1e-6


def test_draws_are_constrained_and_bring_deterministic_sites_and_nothing_internal(draws):
    assert set(draws) == {"rate", "log rate"}
    assert np.all(draws["rate"] > 0)
    np.testing.assert_allclose(draws["log rate"], np.log(draws["rate"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 5)])
def test_draws_have_exactly_the_shape_that_was_asked_for(sample_shape):
    def model():
        numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("b", dist.Dirichlet(jnp.ones(3)).expand([4]))
        numpyro.deterministic("c", jnp.zeros((2, 1)))

    guide = rvrs.AutoRVRS(model, target_acceptance=1.0)
    params = {"auto_loc": jnp.zeros(9), "auto_log_scale": jnp.zeros(9)}
    got = guide.sample_posterior(jax.random.key(0), params, sample_shape=sample_shape)
    shapes = {name: value.shape for name, value in got.items()}
    assert shapes == {"a": sample_shape, "b": (*sample_shape, 4, 3), "c": (*sample_shape, 2, 1)}
    np.testing.assert_allclose(np.sum(got["b"], -1), 1.0, rtol=1e-5)


def test_median_and_quantiles_are_those_of_the_posterior(trained):
    guide, params = trained
    levels = [0.1, 0.5, 0.9]
    got = guide.quantiles(params, levels, ZERO, num_samples=4000, rng_key=jax.random.key(1))
    assert set(got) == {"rate"}
    assert got["rate"].shape == (3,)
    # The probabilities below them, with the standard error of an empirical quantile.
    error = np.sqrt(np.array(levels) * (1 - np.array(levels)) / 4000)
    assert np.all(np.abs(EXACT.cdf(np.asarray(got["rate"])) - levels) < 4 * error)
    median = guide.median(params, ZERO, num_samples=4000, rng_key=jax.random.key(1))
    assert median["rate"].shape == ()
    np.testing.assert_array_equal(median["rate"], got["rate"][1])


def test_a_fresh_guide_with_saved_parameters_gives_the_same_draws(trained, draws):
    _, params = trained
    saved = {name: np.asarray(value) for name, value in params.items()}
    fresh = rvrs.AutoRVRS(rate, target_acceptance=0.03, epsilon=1e-6)
    again = fresh.sample_posterior(jax.random.key(1), saved, ZERO, sample_shape=(4000,))
    # Two programs may round differently.
    np.testing.assert_allclose(again["rate"], draws["rate"], rtol=1e-5)


def test_weights_of_draws_are_those_of_the_model_and_the_proposal(trained):
    guide, params = trained
    got = guide.draw_latent(jax.random.key(1), params, ZERO, num_samples=50)
    z = np.asarray(got.latent[:, 0], float)
    log_p = stats.gamma(0.5).logpdf(np.exp(z)) + z - np.exp(z)
    loc, log_scale = float(params["auto_loc"][0]), float(params["auto_log_scale"][0])
    lw = log_p - stats.norm(loc, np.exp(log_scale)).logpdf(z)
    np.testing.assert_allclose(got.log_weight, lw, atol=1e-4)
    np.testing.assert_allclose(got.log_ratio, lw - np.log(got.acceptance), atol=1e-4)
    assert np.all(got.complete)


def test_the_evidence_is_found(trained):
    guide, params = trained
    got = guide.evaluate(jax.random.key(1), params, ZERO, num_draws=50_000)
    # Gamma(1 / 2, 1) at a count of zero: (1 / (1 + 1))^(1 / 2).
    assert abs(float(got.log_evidence) + 0.5 * np.log(2)) < 4 * float(got.log_evidence_error)
    assert -0.5 * np.log(2) - float(got.elbo) < 0.01


def test_another_call_with_other_values_compiles_nothing(trained, draws):
    guide, params = trained
    before = sizes(guide)
    other = {name: value + 0.1 for name, value in params.items()}
    got = guide.sample_posterior(jax.random.key(9), other, ZERO + 1, sample_shape=(4000,))
    assert sizes(guide) == before
    assert not np.array_equal(got["rate"], draws["rate"])


def sizes(guide):
    return {key: program._cache_size() for key, program in guide.programs._compiled.items()}


def test_data_that_were_left_out_are_asked_for(trained):
    guide, params = trained
    with pytest.raises(TypeError, match=r"model's arguments, data included.*'y'"):
        guide.sample_posterior(jax.random.key(0), params)


def test_parameters_of_another_guide_are_refused(trained):
    guide, params = trained
    renamed = {name.replace("auto", "other"): value for name, value in params.items()}
    with pytest.raises(ValueError, match="params has no 'auto_loc'"):
        guide.sample_posterior(jax.random.key(0), renamed, ZERO)


def test_a_closed_form_is_refused(trained):
    guide, params = trained
    with pytest.raises(NotImplementedError, match="sample_posterior"):
        guide.get_posterior(params)


@pytest.mark.parametrize(
    "proposal",
    [
        pytest.param("low_rank", id="low_rank", marks=pytest.mark.slow),
        pytest.param("AutoMultivariateNormal", id="full", marks=pytest.mark.slow),
        pytest.param("mvn", id="mvn", marks=pytest.mark.slow),
        pytest.param(rvrs.proposals.low_rank_normal(1), id="rank one", marks=pytest.mark.slow),
        pytest.param(rvrs.proposals.coupling_flow(), id="flow", marks=pytest.mark.slow),
        pytest.param("AutoDiagonalNormal", id="diagonal", marks=pytest.mark.slow),
        pytest.param("AutoLowRankMultivariateNormal", id="low rank", marks=pytest.mark.slow),
        pytest.param("AutoIAFNormal", id="iaf", marks=pytest.mark.slow),
    ],
)
def test_every_proposal_trains_and_samples(proposal):
    if isinstance(proposal, str) and proposal.startswith("Auto"):
        proposal = getattr(numpyro.infer.autoguide, proposal)(line)
    guide = rvrs.AutoRVRS(line, proposal=proposal, target_acceptance=0.5)
    svi = svi_of(line, guide)
    result = svi.run(jax.random.key(0), 3, X, Y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    start = svi.get_params(svi.init(jax.random.key(0), X, Y))
    moved = jax.tree.map(lambda new, old: bool(np.any(new != old)), result.params, start)
    assert any(jax.tree.leaves(moved))
    got = guide.sample_posterior(jax.random.key(1), result.params, X, Y, sample_shape=(7,))
    assert got["scale"].shape == (7,)
    assert np.all(got["scale"] > 0)
