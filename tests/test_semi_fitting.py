"""rvrs.fit with local latents, on minibatches of a hierarchy with exact answers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import rvrs
from rvrs import semi_fitting

NUM_POINTS, BATCH = 40, 8
LOCAL_SD, NOISE_SD = 0.8, 0.5
X = np.random.default_rng(0).normal(0.5, 1.0, NUM_POINTS).astype(np.float32)


def global_model(x):
    return numpyro.sample("mean", dist.Normal(0.0, 1.0)), x


def local_model(outputs):
    mean, x = outputs
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.Normal(mean, LOCAL_SD))
        numpyro.sample("x", dist.Normal(z, NOISE_SD), obs=x)


def model(x):
    local_model(global_model(x))


def exact():
    """Posterior mean and standard deviation of the global latent, and the log evidence."""
    x, variance = X.astype(float), LOCAL_SD**2 + NOISE_SD**2
    precision = 1 + NUM_POINTS / variance
    covariance = variance * np.eye(NUM_POINTS) + 1.0
    _, log_det = np.linalg.slogdet(2 * np.pi * covariance)
    log_evidence = -0.5 * (log_det + x @ np.linalg.solve(covariance, x))
    return x.sum() / variance / precision, precision**-0.5, log_evidence


def make_guide(**settings):
    settings = {"target_acceptance": 0.3, "epsilon": 1e-6} | settings
    return rvrs.AutoSemiRVRS(model, local_model, AutoNormal(global_model), **settings)


GUIDE = make_guide()
SHORT = {"batch_size": BATCH, "num_steps": 1000, "progress": False}


@pytest.fixture(scope="module")
def fit():
    return rvrs.fit(jax.random.key(0), model, X, guide=GUIDE, **SHORT)


def test_batches_find_a_conjugate_posterior(fit):
    mean, sd, log_evidence = exact()
    # The global guide can be exact, and then the ELBO with exact local posteriors is the evidence.
    assert abs(fit.marginal_elbo - log_evidence) < 4 * fit.marginal_elbo_error + 0.05
    # Local proposals do not know of the global draw; rejection makes up for most of it.
    assert log_evidence - 0.5 < fit.elbo < log_evidence + 4 * fit.elbo_error
    draws = fit.sample(jax.random.key(1), 4000, indices=[3, 11])
    found = np.asarray(draws["mean"], float)
    assert abs(found.mean() - mean) < 0.15 * sd
    assert abs(found.std() / sd - 1) < 0.1
    # Given the global draw, z_n is normal with known moments.
    precision = LOCAL_SD**-2 + NOISE_SD**-2
    centre = (found[:, None] * LOCAL_SD**-2 + X[[3, 11]] * NOISE_SD**-2) / precision
    standard = (np.asarray(draws["z"]) - centre) * np.sqrt(precision)
    np.testing.assert_allclose(standard.mean(0), 0, atol=0.12)
    np.testing.assert_allclose(standard.std(0), 1, atol=0.1)


def test_the_acceptance_of_every_point_is_the_target(fit):
    assert abs(fit.acceptance / 0.3 - 1) < 0.05
    low, high = fit.acceptance_range
    assert 0.25 < low < 0.3 < high < 0.36
    assert fit.thresholds.shape == (NUM_POINTS,)


def test_the_history_has_every_step(fit):
    for series in (fit.losses, fit.acceptances, fit.proposals_per_draw, fit.dropped):
        assert series.shape == (1000,)
        assert np.all(np.isfinite(series))
    assert np.all(fit.dropped == 0)
    last = fit.losses[-500:]
    assert abs(last.mean() + fit.elbo) < 4 * last.std() / np.sqrt(500) + 0.2


def test_the_summary_tells_quality_epochs_and_global_latents(fit):
    text = fit.summary()
    for words in ("40 data points", "(z)", "200.0 epochs", "marginal ELBO", "acceptance", "mean "):
        assert words in text
    assert "z[0]" not in text
    assert repr(fit).startswith("SemiFit(elbo=")


def test_plot_writes_a_figure(fit, tmp_path):
    figure = fit.plot(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    assert [axes.get_ylabel() != "" for axes in figure.axes] == [True] * 3


def assert_same(one, two):
    for name in ("elbo", "elbo_error", "elbo_bias", "marginal_elbo", "acceptance", "warnings"):
        assert getattr(one, name) == getattr(two, name), name
    for name in ("losses", "acceptances", "proposals_per_draw", "dropped", "thresholds"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert one.params.keys() == two.params.keys()
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_a_loaded_fit_is_the_saved_one_and_draws_the_same(fit, tmp_path):
    fit.save(tmp_path / "fit.npz")
    loaded = rvrs.load(tmp_path / "fit.npz", model, X, guide=GUIDE)
    assert_same(fit, loaded)
    got, wanted = (f.sample(jax.random.key(3), 20, indices=[5])["z"] for f in (loaded, fit))
    np.testing.assert_array_equal(got, wanted)


def test_loading_with_something_else_says_what_differs(fit, tmp_path):
    path = tmp_path / "fit.npz"
    fit.save(path)
    with pytest.raises(ValueError, match=r"these differ: arguments: \[0\]\[0\]"):
        rvrs.load(path, model, X + 1, guide=GUIDE)
    with pytest.raises(ValueError, match="num_points"):
        rvrs.load(path, model, X[:30], guide=GUIDE)
    with pytest.raises(ValueError, match="settings: target_acceptance"):
        rvrs.load(path, model, X, guide=make_guide(target_acceptance=0.5))
    with pytest.raises(ValueError, match=r"a fit of rvrs\.AutoSemiRVRS; pass a guide built alike"):
        rvrs.load(path, model, X)


def test_an_interrupted_run_resumes_to_the_same_bits(fit, tmp_path):
    path = tmp_path / "checkpoint.npz"

    def interrupt(steps, _):
        if steps == 500:
            raise KeyboardInterrupt

    options = SHORT | {"guide": GUIDE}
    with pytest.raises(KeyboardInterrupt):
        rvrs.fit(jax.random.key(0), model, X, checkpoint=path, callback=interrupt, **options)
    with pytest.raises(ValueError, match=r"not finished; go on with rvrs\.fit"):
        rvrs.load(path, model, X, guide=GUIDE)
    # Another key: the stored ones count, and those of the batches.
    resumed = rvrs.fit(jax.random.key(9), model, X, resume=path, **options)
    assert_same(fit, resumed)
    with pytest.raises(ValueError, match=r"batch_size \(8 there, 10 here\)"):
        rvrs.fit(jax.random.key(0), model, X, resume=path, **options | {"batch_size": 10})


def test_a_memory_map_is_fitted_to_the_same_bits_without_a_new_program(fit, tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=X.shape)
    mapped[:] = X
    before = [program._cache_size() for program in GUIDE.programs._compiled.values()]
    again = rvrs.fit(jax.random.key(0), model, mapped, guide=GUIDE, **SHORT)
    assert_same(fit, again)
    assert [program._cache_size() for program in GUIDE.programs._compiled.values()] == before


def test_progress_is_in_epochs(fit, capsys):
    options = SHORT | {"progress": True, "num_steps": 20}
    rvrs.fit(jax.random.key(0), model, X, guide=GUIDE, **options)
    shown = capsys.readouterr().err
    for words in ("RVRS", "4.0/4.0 epochs", "ELBO", "acceptance", "proposals per draw"):
        assert words in shown


@pytest.mark.slow
def test_points_without_draws_are_counted_and_warned_of():
    guide = make_guide(target_acceptance=0.1, sampler="budget", num_proposals=10)
    with pytest.warns(UserWarning, match="did not get their draws"):
        fit = rvrs.fit(jax.random.key(0), model, X, guide=guide, **SHORT | {"batch_size": 40})
    # At an acceptance of 0.1, ten proposals give two draws with probability 0.264.
    assert abs(fit.dropped[-500:].mean() - 0.736) < 0.05
    assert "left out" in fit.warnings[0]
    assert np.all(fit.proposals_per_draw == 5)


@pytest.mark.slow
def test_all_points_may_be_one_batch_and_a_batch_one_point():
    whole = rvrs.fit(jax.random.key(0), model, X, guide=GUIDE, num_steps=300, progress=False)
    assert whole.data.batch_size == NUM_POINTS
    single = make_guide(target_acceptance=0.5)
    one = rvrs.fit(jax.random.key(0), model, X, guide=single, **SHORT | {"batch_size": 1})
    _, _, log_evidence = exact()
    for fit in (whole, one):
        assert log_evidence - 5 < fit.elbo < log_evidence + 4 * fit.elbo_error


@pytest.mark.slow
def test_a_model_that_takes_its_rows_by_index_is_fitted_alike():
    def by_index_local(mean):
        with numpyro.plate("data", NUM_POINTS, subsample_size=BATCH) as index:
            z = numpyro.sample("z", dist.Normal(mean, LOCAL_SD))
            numpyro.sample("x", dist.Normal(z, NOISE_SD), obs=jnp.asarray(X)[index])

    def by_index_global():
        return numpyro.sample("mean", dist.Normal(0.0, 1.0))

    def by_index():
        by_index_local(by_index_global())

    guide = rvrs.AutoSemiRVRS(
        by_index, by_index_local, AutoNormal(by_index_global), target_acceptance=0.3, epsilon=1e-6
    )
    fit = rvrs.fit(jax.random.key(0), by_index, guide=guide, num_steps=500, progress=False)
    assert fit.data.batch_size == BATCH
    _, _, log_evidence = exact()
    assert abs(fit.marginal_elbo - log_evidence) < 4 * fit.marginal_elbo_error + 0.3


def with_fixed_size(x):
    with numpyro.plate("data", NUM_POINTS, subsample_size=len(x)):
        z = numpyro.sample("z", dist.Normal(0.0, LOCAL_SD))
        numpyro.sample("x", dist.Normal(z, NOISE_SD), obs=x)


def test_a_part_of_the_data_is_refused():
    guide = rvrs.AutoSemiRVRS(with_fixed_size, with_fixed_size)
    with pytest.raises(ValueError, match="hold 10 of the 40 data points of plate 'data'; pass all"):
        rvrs.fit(jax.random.key(0), with_fixed_size, X[:10], guide=guide, num_steps=10)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"batch_size": 41}, "batch_size=41 is more than the 40 data points of plate 'data'"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number above 0"),
        ({"num_evaluation_draws": 5}, "num_evaluation_draws is not for AutoSemiRVRS"),
        ({"target_acceptance": 0.7}, "is not that of the guide"),
        ({"guide": None}, "batch_size is for models with local latents"),
    ],
)
def test_bad_arguments_are_named_before_any_work(options, match, monkeypatch):
    monkeypatch.setattr(semi_fitting, "warm_up", lambda *_: pytest.fail("it started"))
    with pytest.raises(ValueError, match=re.escape(match)):
        rvrs.fit(jax.random.key(0), model, X, **SHORT | {"guide": GUIDE} | options)


@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ([40], "indices must be from 0 to 39, got 40 to 40"),
        ([-1, 3], "indices must be from 0 to 39, got -1 to 3"),
        ([], "indices must be a list of whole numbers"),
        ([0.5], "indices must be a list of whole numbers"),
    ],
)
def test_points_that_there_are_not_cannot_be_sampled(fit, indices, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        fit.sample(jax.random.key(0), 10, indices=indices)
