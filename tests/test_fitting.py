"""rvrs.fit on models with exact answers, and what users do with its result."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

import rvrs
from rvrs import fitting
from rvrs.fitting import NUM_STEPS

# Raw covariates: the posterior's standard deviations differ by a factor of 1e4.
X = np.stack([np.ones(8), 1e4 * np.linspace(0.5, 1.5, 8) ** 2], axis=1).astype(np.float32)
Y = np.array([1.2, 0.4, 2.0, 2.9, 2.2, 3.7, 4.1, 5.6], np.float32)
PRIOR_SDS = np.array([3.0, 1e-3], np.float32)


def regression(x, y):
    slopes = numpyro.sample("slopes", dist.Normal(0.0, PRIOR_SDS).to_event(1))
    numpyro.deterministic("first", slopes[0])
    numpyro.sample("y", dist.Normal(x @ slopes, 0.7), obs=y)


def other_regression(x, y):
    slopes = numpyro.sample("coefficients", dist.Normal(0.0, PRIOR_SDS).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slopes, 0.7), obs=y)


def exact():
    """Mean, covariance and log evidence of the conjugate posterior."""
    x, y, sds = X.astype(float), Y.astype(float), PRIOR_SDS.astype(float)
    precision = x.T @ x / 0.7**2 + np.diag(1 / sds**2)
    covariance = np.linalg.inv(precision)
    mean = covariance @ x.T @ y / 0.7**2
    marginal = x @ np.diag(sds**2) @ x.T + 0.7**2 * np.eye(len(y))
    _, log_det = np.linalg.slogdet(2 * np.pi * marginal)
    return mean, covariance, -0.5 * (log_det + y @ np.linalg.solve(marginal, y))


def latent():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


SHORT = {"num_steps": 1000, "num_evaluation_draws": 20_000, "progress": False}


@pytest.fixture(scope="module")
def fit():
    return rvrs.fit(jax.random.key(0), regression, X, Y, target_acceptance=0.3, **SHORT)


def test_defaults_find_a_badly_scaled_conjugate_posterior(fit):
    mean, covariance, log_evidence = exact()
    sds = np.sqrt(np.diag(covariance))
    # The proposal can be exact, so the ELBO is the log evidence.
    assert abs(fit.elbo - log_evidence) < 4 * fit.elbo_error + 0.002
    assert abs(fit.log_evidence - log_evidence) < 4 * fit.log_evidence_error + 0.002
    assert abs(fit.acceptance / 0.3 - 1) < 0.05
    draws = np.asarray(fit.sample(jax.random.key(1), 10_000)["slopes"], float)
    assert np.all(np.abs(draws.mean(0) - mean) < 0.06 * sds)
    np.testing.assert_allclose(draws.std(0), sds, rtol=0.04)
    correlation = covariance[0, 1] / sds.prod()
    assert abs(np.corrcoef(draws.T)[0, 1] - correlation) < 0.02
    assert fit.proposal_name == "mvn"
    assert fit.ess > 0.99 * fit.num_draws


def test_the_history_has_every_step(fit):
    for series in (fit.losses, fit.acceptances, fit.thresholds, fit.proposals_per_draw):
        assert series.shape == (1000,)
        assert np.all(np.isfinite(series))
    assert abs(fit.acceptances[-500:].mean() / 0.3 - 1) < 0.1
    assert abs(fit.losses[-500:].mean() + fit.elbo) < 0.1


def test_a_fit_is_immutable_and_short_to_print(fit):
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.elbo = 0.0
    assert repr(fit).startswith("Fit(elbo=")
    assert "\n" not in repr(fit)


def test_sites_are_constrained_and_deterministic_sites_included(fit):
    draws = fit.sample(jax.random.key(1), 7)
    assert {name: value.shape for name, value in draws.items()} == {"slopes": (7, 2), "first": (7,)}
    np.testing.assert_array_equal(draws["first"], draws["slopes"][:, 0])


def test_resampled_draws_are_draws_of_the_posterior(fit):
    mean, covariance, _ = exact()
    draws = np.asarray(fit.sample(jax.random.key(1), 10_000, resample=True)["slopes"], float)
    assert draws.shape == (10_000, 2)
    assert np.all(np.abs(draws.mean(0) - mean) < 0.06 * np.sqrt(np.diag(covariance)))
    assert len(np.unique(draws[:, 0])) > 5000


def test_the_summary_says_how_good_the_fit_is_and_what_the_posterior_is(fit):
    text = fit.summary()
    for words in ("ELBO", "log evidence", "acceptance", "k-hat", "ESS", "slopes[0]", "95 %"):
        assert words in text
    assert "first" not in text
    row = next(line for line in text.splitlines() if line.startswith("slopes[1]"))
    mean, covariance, _ = exact()
    assert abs(float(row.split()[1]) - mean[1]) < 0.1 * np.sqrt(covariance[1, 1])


def test_to_arviz_has_draws_statistics_and_figures(fit):
    data = fit.to_arviz(num_samples=50)
    assert data.posterior["slopes"].shape == (1, 50, 2)
    assert set(data.sample_stats) == {"lw", "A", "acceptance"}
    a = data.sample_stats["acceptance"].values
    assert np.all((a > 0) & (a <= 1))
    # A = lw - log a_e, by definition.
    expected = data.sample_stats["lw"].values - np.log(a)
    np.testing.assert_allclose(data.sample_stats["A"].values, expected, rtol=1e-5)
    assert data.attrs["elbo"] == fit.elbo
    assert data.attrs["khat"] == fit.khat


def test_plot_writes_a_figure(fit, tmp_path):
    figure = fit.plot(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    assert len(figure.axes) >= 4


def assert_same(one, two):
    for name in ("elbo", "elbo_error", "log_evidence", "acceptance", "khat", "ess", "threshold"):
        assert getattr(one, name) == getattr(two, name), name
    np.testing.assert_array_equal(one.losses, two.losses)
    np.testing.assert_array_equal(one.thresholds, two.thresholds)
    assert one.params.keys() == two.params.keys()
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_a_loaded_fit_is_the_saved_one_and_draws_the_same(fit, tmp_path):
    path = tmp_path / "fit.npz"
    fit.save(path)
    loaded = rvrs.load(path, regression, X, Y)
    assert_same(fit, loaded)
    assert loaded.seconds == fit.seconds
    got, wanted = (f.sample(jax.random.key(3), 20)["slopes"] for f in (loaded, fit))
    np.testing.assert_array_equal(got, wanted)


def test_loading_with_something_else_says_what_differs(fit, tmp_path):
    path = tmp_path / "fit.npz"
    fit.save(path)
    with pytest.raises(ValueError, match=r"these differ: arguments: \[0\]\[1\]\. Pass what"):
        rvrs.load(path, regression, X, Y + 1)
    with pytest.raises(ValueError, match="latent site slopes"):
        rvrs.load(path, other_regression, X, Y)


def test_an_interrupted_run_resumes_to_the_same_bits(fit, tmp_path):
    path = tmp_path / "checkpoint.npz"
    options = {"target_acceptance": 0.3} | SHORT

    def interrupt(steps, _):
        if steps == 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rvrs.fit(
            jax.random.key(0), regression, X, Y, checkpoint=path, callback=interrupt, **options
        )
    with pytest.raises(ValueError, match=r"not finished; go on with rvrs\.fit"):
        rvrs.load(path, regression, X, Y)
    # Another key: the stored ones count.
    resumed = rvrs.fit(jax.random.key(9), regression, X, Y, resume=path, **options)
    assert_same(fit, resumed)
    # A finished run resumes to itself.
    fit.save(path)
    assert_same(fit, rvrs.fit(jax.random.key(9), regression, X, Y, resume=path, **options))


def test_resuming_with_other_settings_or_data_says_what_differs(fit, tmp_path):
    path = tmp_path / "fit.npz"
    fit.save(path)
    options = {"target_acceptance": 0.3} | SHORT
    with pytest.raises(ValueError, match=r"num_steps \(1000 there, 2000 here\)"):
        rvrs.fit(jax.random.key(0), regression, X, Y, resume=path, **options | {"num_steps": 2000})
    with pytest.raises(ValueError, match="settings: target_acceptance"):
        rvrs.fit(jax.random.key(0), regression, X, Y, resume=path, **SHORT)
    with pytest.raises(FileNotFoundError, match="no file"):
        rvrs.fit(jax.random.key(0), regression, X, Y, resume=tmp_path / "x.npz", **options)


def test_a_second_fit_with_other_data_compiles_nothing_and_is_right(fit):
    def compiled():
        return [program._cache_size() for program in fit.guide.programs._compiled.values()]

    before = compiled()
    other = rvrs.fit(jax.random.key(5), regression, X, Y + 10.0, target_acceptance=0.3, **SHORT)
    assert compiled() == before
    assert other.guide is fit.guide
    assert abs(other.elbo - fit.elbo) > 1.0
    # The first fit's data are still its own.
    again = fit.sample(jax.random.key(1), 10_000)["slopes"]
    assert np.all(np.abs(again.mean(0) - exact()[0]) < 0.06 * np.sqrt(np.diag(exact()[1])))


@pytest.mark.slow
def test_params_of_a_fit_work_in_stock_numpyro(fit):
    guide = rvrs.AutoRVRS(regression, proposal="mvn", target_acceptance=0.3)
    draws = guide.sample_posterior(jax.random.key(0), fit.params, X, Y, sample_shape=(2, 3))
    assert draws["slopes"].shape == (2, 3, 2)
    svi = SVI(regression, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    state = svi.init(jax.random.key(0), X, Y, init_params=fit.params)
    losses = jax.lax.map(
        lambda key: svi.evaluate(state._replace(rng_key=key), X, Y),
        jax.random.split(jax.random.key(1), 500),
    )
    assert abs(float(losses.mean()) + fit.elbo) < 4 * float(losses.std()) / 500**0.5 + 0.005


@pytest.mark.slow
def test_a_ready_guide_is_trained_and_model_parameters_with_it():
    def model(y):
        scale = numpyro.param("scale", 0.2, constraint=dist.constraints.positive)
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    y = jnp.asarray([-1.0, 0.0, 1.0, 2.0, -2.0])
    guide = rvrs.AutoRVRS(
        model, proposal=AutoDiagonalNormal(model), target_acceptance=0.5, prefix="mine"
    )
    options = SHORT | {"num_steps": 3000}
    fit = rvrs.fit(jax.random.key(0), model, y, guide=guide, **options)
    # Maximum likelihood with the mean integrated out: sum of squares / (n - 1), nearly.
    assert abs(float(fit.params["scale"]) - np.sqrt(2.5)) < 0.08
    draws = np.asarray(fit.sample(jax.random.key(1), 5000)["mean"])
    assert abs(draws.std() / np.sqrt(2.5 / 5) - 1) < 0.1


@pytest.mark.slow
def test_parameters_of_a_model_are_learned_whatever_the_size_of_the_proposal():
    """7,000 parameters of the proposal want small steps; those of the model do not."""

    def model():
        location = numpyro.param("location", 0.0)
        x = numpyro.sample("x", dist.Normal(location, 1.0).expand([120]).to_event(1))
        numpyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=jnp.full(120, 3.0))

    options = SHORT | {"num_steps": 500, "proposal": "mvn", "target_acceptance": 0.5}
    fit = rvrs.fit(jax.random.key(0), model, **options)
    # Without x, y is N(location, 2): the best location is 3.
    assert abs(float(fit.params["location"]) - 3) < 0.1


def test_a_wrong_posterior_is_not_passed_over_in_silence():
    # Two modes far apart: the fit has one of them.
    def model():
        mixture = dist.MixtureSameFamily(
            dist.Categorical(jnp.asarray([0.5, 0.5])),
            dist.StudentT(2.0, jnp.asarray([-30.0, 30.0]), 1.0),
        )
        numpyro.sample("z", mixture)

    # Only the tails of the mode that was found can tell, and not at every seed (of four, at three).
    with pytest.warns(UserWarning, match=r"k-hat is|below the log evidence"):
        fit = rvrs.fit(jax.random.key(1), model, target_acceptance=0.5, **SHORT)
    assert fit.warnings
    assert "WARNING: " + fit.warnings[0] in fit.summary()


def test_the_progress_bar_shows_what_matters(fit, capsys):
    options = SHORT | {"progress": True}
    rvrs.fit(jax.random.key(0), regression, X, Y, target_acceptance=0.3, **options)
    shown = capsys.readouterr().err
    for words in ("RVRS", "ELBO", "acceptance", "T ", "proposals per draw"):
        assert words in shown


@pytest.mark.parametrize(("dimension", "name"), [(101, "low_rank"), (2001, "diagonal")])
def test_the_automatic_proposal_depends_on_the_dimension(dimension, name):
    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0).expand([dimension]).to_event(1))

    arguments = ((), {})
    guide, got = fitting._guide(model, None, "auto", 0.1, arguments)
    assert got == name
    assert guide.latent_dim == dimension


def bad(match, error=ValueError, model=regression, args=(X, Y), **options):
    return pytest.param(match, error, model, args, options, id=match)


@pytest.mark.parametrize(
    ("match", "error", "model", "args", "options"),
    [
        bad("rng_key must be", rng_key=0),
        bad("rng_key must be one", rng_key=jax.random.split(jax.random.key(0), 3)),
        bad("does not exist", FileNotFoundError, checkpoint="no-such-folder/fit.npz"),
        bad("is a folder", checkpoint="."),
        bad("target_acceptance must be a number in (0, 1]", target_acceptance=float("nan")),
        bad("model must be a NumPyro model", model=3),
        bad("num_steps must be a whole number", num_steps=0),
        bad("num_evaluation_draws must be", num_evaluation_draws=1.5),
        bad("target_acceptance must be a number", target_acceptance=0.0),
        bad("target_acceptance must be a number in", target_acceptance="low"),
        bad("proposal must be one of", proposal="full"),
        bad("(in rvrs.fit 'auto' as well)", proposal="full"),
        bad("as in rvrs.fit(rng_key, model, x, y): missing", TypeError, args=(X,)),
        bad("progress must be True or False", progress="yes"),
        bad("callback must be a function", callback=1),
        bad("model_kwargs must be a dict", model_kwargs=[1]),
        bad("guide must be a rvrs.AutoRVRS", guide=AutoNormal(regression)),
        bad("guide was built for another model", guide=rvrs.AutoRVRS(other_regression)),
        bad("leave proposal out", guide=rvrs.AutoRVRS(regression), proposal="mvn"),
        bad("is not that of the guide", guide=rvrs.AutoRVRS(regression), target_acceptance=0.7),
        bad("not finite", model=lambda: numpyro.factor("f", -jnp.inf) or latent(), args=()),
        bad("no latent variables", model=lambda: numpyro.deterministic("a", 1.0), args=()),
    ],
)
def test_bad_arguments_are_named_before_any_work(match, error, model, args, options):
    options = SHORT | {"rng_key": jax.random.key(0)} | options
    with pytest.raises(error, match=re.escape(match)):
        rvrs.fit(options.pop("rng_key"), model, *args, **options)


def test_nan_in_the_data_of_a_known_model_is_named(fit):
    # The structure of the model is known by now, so this is found by the search for a start.
    with pytest.raises(ValueError, match="NaN or infinities in the arguments y"):
        rvrs.fit(jax.random.key(0), regression, X, Y * np.nan, target_acceptance=0.3, **SHORT)


def test_without_arviz_nothing_is_trained_in_vain(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    monkeypatch.setattr(fitting.running, "start", lambda *_, **__: pytest.fail("it started"))
    with pytest.raises(ImportError, match=r"rvrs\[arviz\]"):
        rvrs.fit(jax.random.key(0), regression, X, Y, **SHORT)


def test_arguments_of_the_result_are_checked(fit, tmp_path):
    with pytest.raises(ValueError, match="num_samples must be"):
        fit.sample(jax.random.key(0), 0)
    with pytest.raises(ValueError, match="rng_key must be"):
        fit.sample(0, 10)
    with pytest.raises(ValueError, match="num_samples must be"):
        fit.to_arviz(num_samples="many")
    fit.save(tmp_path / "fit.npz")
    with pytest.raises(ValueError, match="guide was built for another model"):
        rvrs.load(tmp_path / "fit.npz", regression, X, Y, guide=rvrs.AutoRVRS(other_regression))


def test_a_tiny_acceptance_stays_above_the_guardrail():
    guide = fitting._cached_guide(regression, "mvn", 1e-7)
    assert guide.settings.epsilon < 1e-9


def test_the_defaults_are_the_documented_ones():
    assert NUM_STEPS == 10_000
    assert fitting.FULL_RANK_LIMIT == 100
