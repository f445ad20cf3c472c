"""rvrs.pymc.fit on a model with an exact answer, and what users of PyMC do with its result."""

import re

import jax
import numpy as np
import pytest
from scipy import special, stats

import rvrs
from rvrs import fitting

pm = pytest.importorskip("pymc")

COORDS = {"group": ["first", "second"], "item": [10, 20, 30, 40, 50]}
GROUP_OF = np.array([0, 0, 1, 1, 1])
Y = np.array([1.2, 0.7, 5.0, 7.5, 4.1])
OTHER_Y = 20.0 / Y
PRIOR_MEAN, PRIOR_SD, NOISE = 0.5, 2.0, 0.6

OPTIONS = {"num_steps": 300, "num_evaluation_draws": 20_000, "progress": False}
# As many as a summary is made of: that is compiled once.
NUM_DRAWS = 10_000


def sizes(y, name="size"):
    """Normal in the logarithm of the sizes, which is also what PyMC transforms them by."""
    with pm.Model(coords=COORDS) as model:
        group_of = pm.Data("group_of", GROUP_OF, dims="item")
        measured = pm.Data("measured", y, dims="item")
        size = pm.LogNormal(name, PRIOR_MEAN, PRIOR_SD, dims="group")
        pm.Deterministic("ratio", size[0] / size[1])
        log_sizes = pm.math.log(size)[group_of]
        pm.LogNormal("y", log_sizes, NOISE, observed=measured, dims="item")
    return model


def exact(y):
    """Means and standard deviations of the logarithms of the sizes, and the log evidence."""
    design = np.eye(2)[GROUP_OF]
    precision = np.sum(design, axis=0) / NOISE**2 + 1 / PRIOR_SD**2
    means = (np.log(y) @ design / NOISE**2 + PRIOR_MEAN / PRIOR_SD**2) / precision
    covariance = PRIOR_SD**2 * design @ design.T + NOISE**2 * np.eye(len(y))
    marginal = stats.multivariate_normal(np.full(len(y), PRIOR_MEAN), covariance)
    return means, 1 / np.sqrt(precision), marginal.logpdf(np.log(y)) - np.sum(np.log(y))


def assert_mean_and_sd(draws, mean, sd, spread=1.0):
    """Z-scores below 4; ``spread`` is how much larger the errors are than of independent draws."""
    error = spread * sd / np.sqrt(len(draws))
    assert np.all(np.abs((np.mean(draws, 0) - mean) / error) < 4)
    assert np.all(np.abs((np.std(draws, 0) - sd) / (error / np.sqrt(2))) < 4)


def assert_exact(fit, y):
    means, sds, log_evidence = exact(y)
    # The proposal can be exact, so the ELBO is the log evidence; PyMC has constants in float32.
    assert abs(fit.elbo - log_evidence) < 4 * fit.elbo_error + 1e-6
    assert abs(fit.log_evidence - log_evidence) < 4 * fit.log_evidence_error + 1e-6
    draws = fit.sample(jax.random.key(1), NUM_DRAWS)
    assert_mean_and_sd(np.log(draws["size"]), means, sds)


@pytest.fixture(scope="module")
def model():
    return sizes(Y)


@pytest.fixture(scope="module")
def fit(model):
    return rvrs.pymc.fit(jax.random.key(0), model, target_acceptance=0.3, **OPTIONS)


@pytest.fixture
def other_data(model):
    with model:
        pm.set_data({"measured": OTHER_Y})
    yield
    with model:
        pm.set_data({"measured": Y})


def test_a_conjugate_posterior_is_found_with_its_evidence(fit):
    assert_exact(fit, Y)
    assert abs(fit.acceptance / 0.3 - 1) < 0.05
    assert repr(fit).startswith("PyMCFit(elbo=-10.917")


def test_draws_are_of_free_variables_and_deterministics_and_nothing_else(fit):
    draws = fit.sample(jax.random.key(2), NUM_DRAWS)
    assert {name: value.shape for name, value in draws.items()} == {
        "size": (NUM_DRAWS, 2),
        "ratio": (NUM_DRAWS,),
    }
    np.testing.assert_allclose(draws["ratio"], draws["size"][:, 0] / draws["size"][:, 1], 1e-12)


def test_tables_and_figures_show_the_free_variables(fit, tmp_path):
    text = fit.summary()
    rows = [line.split()[0] for line in text.splitlines()[text.splitlines().index("") + 2 :]]
    assert rows == ["size[0]", "size[1]"]
    figure = fit.plot(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").stat().st_size > 10_000
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert [label for label in labels if label in {"size[0]", "size[1]", "ratio"}] == rows


def test_inference_data_has_the_axes_and_the_data_of_the_model(fit, other_data):
    data = fit.to_arviz(jax.random.key(2), NUM_DRAWS)
    draws = fit.sample(jax.random.key(2), NUM_DRAWS)
    assert set(data.groups()) == {"posterior", "sample_stats", "observed_data", "constant_data"}
    assert set(data.posterior.data_vars) == {"size", "ratio"}
    assert data.posterior["size"].dims == ("chain", "draw", "group")
    assert list(data.posterior["group"].values) == COORDS["group"]
    for name, value in draws.items():
        np.testing.assert_array_equal(data.posterior[name].values[0], value)
    # As they were: the data of the model are others by now.
    for group, name, wanted in [
        (data.observed_data, "y", Y),
        (data.constant_data, "group_of", GROUP_OF),
    ]:
        np.testing.assert_array_equal(group[name].values, wanted)
        assert group[name].dims == ("item",)
        assert list(group["item"].values) == COORDS["item"]
    assert data.attrs["log_evidence"] == fit.log_evidence
    assert set(data.sample_stats.data_vars) == {"lw", "A", "acceptance"}


def test_changes_to_inference_data_leave_the_fit_alone(fit):
    data = fit.to_arviz(num_samples=NUM_DRAWS)
    data.observed_data["y"][:] = 0.0
    again = fit.to_arviz(num_samples=NUM_DRAWS)
    np.testing.assert_array_equal(again.observed_data["y"].values, Y)


def test_pymc_predicts_from_the_inference_data(fit, model):
    drawn = fit.to_arviz(num_samples=NUM_DRAWS).sel(draw=slice(0, 3999))
    predicted = pm.sample_posterior_predictive(
        drawn,
        model=model,
        random_seed=0,
        progressbar=False,
        compile_kwargs={"mode": "FAST_COMPILE"},
    ).posterior_predictive["y"]
    assert predicted.dims == ("chain", "draw", "item")
    means, sds, _ = exact(Y)
    spread = np.sqrt(sds[GROUP_OF] ** 2 + NOISE**2)
    assert_mean_and_sd(np.log(predicted.values[0]), means[GROUP_OF], spread)


def assert_same(one, two):
    assert type(one) is type(two) is rvrs.pymc.PyMCFit
    assert (one.elbo, one.khat, one.seconds) == (two.elbo, two.khat, two.seconds)
    np.testing.assert_array_equal(one.losses, two.losses)
    draws = [fit.sample(jax.random.key(3), NUM_DRAWS) for fit in (one, two)]
    jax.tree.map(np.testing.assert_array_equal, *draws)
    data, again = (fit.to_arviz(num_samples=NUM_DRAWS) for fit in (one, two))
    assert data.groups() == again.groups()
    assert all(data[group].equals(again[group]) for group in data.groups())


def test_a_loaded_fit_is_the_saved_one_and_draws_the_same(fit, model, tmp_path):
    path = tmp_path / "fit.npz"
    fit.save(path)
    assert_same(fit, rvrs.pymc.load(path, model))
    with pytest.raises(ValueError, match="with the proposal 'mvn'; leave proposal out"):
        rvrs.pymc.load(path, model, proposal=flow())
    resumed = rvrs.pymc.fit(jax.random.key(9), model, target_acceptance=0.3, resume=path, **OPTIONS)
    assert resumed.elbo == fit.elbo


def test_another_fit_of_the_same_model_compiles_nothing(fit, model):
    def compiled():
        return [program._cache_size() for program in fit.guide.programs._compiled.values()]

    before = compiled()
    again = rvrs.pymc.fit(jax.random.key(0), model, target_acceptance=0.3, **OPTIONS)
    assert again.guide is fit.guide
    assert compiled() == before
    np.testing.assert_array_equal(again.losses, fit.losses)


def test_results_are_of_double_precision_whatever_jax_was_set_to(fit, model):
    jax.config.update("jax_enable_x64", False)
    rvrs.pymc.fit(jax.random.key(0), model, target_acceptance=0.3, **OPTIONS)
    assert jax.config.read("jax_enable_x64")
    assert fit.sample(jax.random.key(0), NUM_DRAWS)["size"].dtype == np.float64


def test_data_that_are_set_are_those_of_the_next_fit_and_not_of_the_last(fit, model, other_data):
    before = fit.sample(jax.random.key(1), NUM_DRAWS)
    new = rvrs.pymc.fit(jax.random.key(0), model, target_acceptance=0.3, **OPTIONS)
    assert_exact(new, OTHER_Y)
    np.testing.assert_array_equal(new.to_arviz(num_samples=NUM_DRAWS).observed_data["y"], OTHER_Y)
    jax.tree.map(np.testing.assert_array_equal, fit.sample(jax.random.key(1), NUM_DRAWS), before)
    assert_exact(fit, Y)


def test_loading_with_other_data_is_refused(fit, model, other_data, tmp_path):
    fit.save(tmp_path / "fit.npz")
    with pytest.raises(ValueError, match=r"these differ: .*\['observed_data'\]\['y'\]"):
        rvrs.pymc.load(tmp_path / "fit.npz", model)


def test_loading_with_another_model_is_refused(fit, tmp_path, monkeypatch):
    fit.save(tmp_path / "fit.npz")
    with pytest.raises(ValueError, match=r"these differ: .*latent site weight_log__"):
        rvrs.pymc.load(tmp_path / "fit.npz", sizes(Y, name="weight"))
    # One with the same variables and data.
    monkeypatch.setitem(globals(), "NOISE", 0.601)
    with pytest.raises(ValueError, match=r"these differ: [^;]*\['log density'\]\. Pass"):
        rvrs.pymc.load(tmp_path / "fit.npz", sizes(Y))


def flow():
    return rvrs.proposals.coupling_flow(num_layers=2, nn_width=4)


class ReachedError(Exception):
    """Raised in place of the work."""


@pytest.mark.parametrize(
    ("proposal", "family"),
    [
        ("auto", "mvn"),
        ("diagonal", "diagonal"),
        ("mvn", "mvn"),
        ("low_rank", "low_rank"),
        (flow(), flow()),
    ],
    ids=["auto", "diagonal", "mvn", "low_rank", "flow"],
)
def test_proposal_and_target_acceptance_are_passed_on(proposal, family, model, monkeypatch):
    def start(_, guide, *__, **___):
        raise ReachedError(guide)

    monkeypatch.setattr(fitting.running, "start", start)
    with pytest.raises(ReachedError) as reached:
        rvrs.pymc.fit(jax.random.key(0), model, proposal=proposal, target_acceptance=0.7)
    (guide,) = reached.value.args
    wanted = rvrs.AutoRVRS(guide.model, proposal=family)
    assert guide.settings.proposal == wanted.settings.proposal
    assert guide.settings.target_acceptance == 0.7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"guide": None}, "guide is not for PyMC models; leave it out"),
        ({"mesh": None}, "mesh is not for PyMC models"),
        ({"model_args": (Y,)}, "model_args is not for PyMC models"),
        ({"model_kwargs": {"y": Y}}, "model_kwargs is not for PyMC models"),
        ({"batch_size": 2}, "batch_size is not for PyMC models"),
        ({"learning_rate": 0.1}, "learning_rate is not for PyMC models"),
        # Before the model is looked at.
        ({"rng_key": 0, "model": None}, "rng_key must be one JAX random key"),
        ({"model": sizes}, "model must be a pymc.Model"),
        ({"num_steps": 0}, "num_steps must be a whole number"),
        ({"proposal": "full"}, "proposal must be one of"),
        ({"target_acceptance": 2.0}, "target_acceptance must be a number in"),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
)
def test_bad_arguments_are_named(options, said, model):
    options = {"rng_key": jax.random.key(0), "model": model} | OPTIONS | options
    with pytest.raises(ValueError, match=re.escape(said)):
        rvrs.pymc.fit(**options)


def test_a_path_that_is_none_is_named_before_the_model_is_looked_at():
    with pytest.raises(ValueError, match="path must be the path of a file"):
        rvrs.pymc.load(3, None)


def test_a_file_that_is_missing_is_named(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*fit\.npz"):
        rvrs.pymc.load(tmp_path / "fit.npz", model)


def test_a_model_of_pymc_is_sent_here_by_the_fit_of_numpyro_models(model):
    with pytest.raises(ValueError, match=r"for PyMC models there is rvrs\.pymc\.fit"):
        rvrs.fit(jax.random.key(0), model)


@pytest.mark.slow
def test_a_diagonal_proposal_is_trained(model):
    fit = rvrs.pymc.fit(jax.random.key(0), model, proposal="diagonal", **OPTIONS)
    assert fit.proposal_name == "diagonal"
    assert abs(fit.acceptance / 0.1 - 1) < 0.05
    # The groups are independent, so it can be exact.
    assert_exact(fit, Y)


@pytest.mark.slow
def test_a_fit_with_a_flow_is_loaded_with_one_built_alike(model, tmp_path):
    fit = rvrs.pymc.fit(jax.random.key(0), model, proposal=flow(), **OPTIONS)
    path = tmp_path / "fit.npz"
    fit.save(path)
    with pytest.raises(ValueError, match=r"a proposal of your own; pass one built alike"):
        rvrs.pymc.load(path, model)
    assert_same(fit, rvrs.pymc.load(path, model, proposal=flow()))


@pytest.mark.slow
# There are so few large weights that it depends on the draws what their tail looks like.
@pytest.mark.filterwarnings("ignore:k-hat is")
def test_a_posterior_that_is_not_normal_is_found_with_its_evidence():
    counts, exposures = np.array([3, 1, 4, 1, 5]), np.array([1.0, 2.0, 1.0, 0.5, 3.0])
    with pm.Model() as model:
        rate = pm.Gamma("rate", 2.0, 1.0)
        pm.Poisson("y", rate * exposures, observed=counts)
    fit = rvrs.pymc.fit(jax.random.key(0), model, **OPTIONS)
    shape, inverse_scale = 2.0 + counts.sum(), 1.0 + exposures.sum()
    log_evidence = special.gammaln(shape) - shape * np.log(inverse_scale)
    log_evidence += np.sum(counts * np.log(exposures) - special.gammaln(counts + 1))
    assert abs(fit.log_evidence - log_evidence) < 4 * fit.log_evidence_error
    draws = fit.sample(jax.random.key(1), NUM_DRAWS, resample=True)["rate"]
    # Of four times as many, some are drawn twice; and the standard deviation of draws of a gamma
    # distribution is less certain than of a normal one, by nearly as much.
    spread = np.sqrt(1 + 1 / 4)
    assert_mean_and_sd(draws, shape / inverse_scale, np.sqrt(shape) / inverse_scale, spread)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [-30.0, 30.0])
def test_the_search_begins_at_the_initial_value(mode):
    with pm.Model() as model:
        pm.NormalMixture("x", w=[0.5, 0.5], mu=[-30.0, 30.0], sigma=1.0, initval=mode + 2.0)
    fit = rvrs.pymc.fit(jax.random.key(0), model, **OPTIONS)
    # The draws of one mode cannot tell of the other.
    assert abs(fit.log_evidence - np.log(0.5)) < 4 * fit.log_evidence_error + 1e-6
    assert_mean_and_sd(fit.sample(jax.random.key(1), NUM_DRAWS)["x"], mode, 1.0)


@pytest.mark.slow
def test_missing_values_are_part_of_the_posterior_and_have_their_places():
    y = np.array([[1.0, np.nan, 2.0], [np.nan, 0.0, 1.5]])
    with pm.Model(coords={"row": ["a", "b"], "column": [1, 2, 3]}) as model:
        mean = pm.Normal("mean", 0.0, 1.0)
        with pytest.warns(match="missing values"):
            pm.Normal("y", mean, 1.0, observed=y, dims=("row", "column"))
    data = rvrs.pymc.fit(jax.random.key(0), model, **OPTIONS).to_arviz(num_samples=NUM_DRAWS)
    assert set(data.posterior.data_vars) == {"mean", "y_unobserved", "y"}
    assert data.posterior["y"].dims == ("chain", "draw", "row", "column")
    number = np.sum(~np.isnan(y))
    best = np.nansum(y) / (number + 1)
    filled = data.posterior["y"].values[0]
    assert_mean_and_sd(filled[:, np.isnan(y)], best, np.sqrt(1 + 1 / (number + 1)))
    assert np.all(filled[:, ~np.isnan(y)] == y[~np.isnan(y)])
    predicted = pm.sample_posterior_predictive(
        data.sel(draw=slice(0, 9)), model=model, random_seed=0, progressbar=False
    )
    assert predicted.posterior_predictive["y"].shape == (1, 10, 2, 3)
