import jax
import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm

from rvrs.experiments import breast_cancer
from rvrs.experiments.breast_cancer import METHODS, Method, Reference


@pytest.fixture(scope="module")
def dataset():
    return breast_cancer.load()


@pytest.fixture(scope="module")
def reference(dataset) -> Reference:
    return breast_cancer.reference(jax.random.key(0), dataset, num_warmup=300, num_samples=1000)


@pytest.fixture(scope="module")
def mean_field(dataset) -> breast_cancer.MethodFit:
    return breast_cancer.fit(jax.random.key(0), METHODS[0], dataset, num_steps=1000)


def test_reference_solves_the_posteriors_equations(dataset, reference):
    # The expected gradient of a log density vanishes: E[X' (y - p)] = E[z] with a normal prior.
    logits = reference.draws @ dataset.covariates.T
    score = (dataset.responses - expit(logits)) @ dataset.covariates - reference.draws
    errors = score.std(axis=0) / np.sqrt(len(score))
    # Six of them, as draws of a chain are not independent.
    assert np.all(np.abs(score.mean(axis=0)) < 6 * errors)


@pytest.mark.slow
def test_mean_field_is_too_narrow(mean_field, reference):
    comparison = breast_cancer.compare(mean_field.draws, reference)
    assert comparison.min_sd_ratio < 0.75
    assert comparison.max_sd_ratio < 1.05
    assert comparison.mean_error < 0.4
    assert mean_field.fit.warnings
    assert mean_field.draws.shape == (breast_cancer.NUM_DRAWS, 31)


def test_comparison_finds_the_worst_of_all_coefficients():
    # Draws whose means and standard deviations are exact.
    quantiles = norm.ppf((np.arange(1000) + 0.5) / 1000)
    quantiles /= quantiles.std()
    reference = Reference(np.stack([quantiles, 2 * quantiles, 1 + quantiles], axis=1), 0.0)
    draws = np.stack([1.1 * quantiles, 1 + quantiles, 1 + quantiles], axis=1)
    assert breast_cancer.compare(draws, reference) == pytest.approx((0.5, 0.5, 1.1))
    assert breast_cancer.narrowest(draws, reference, 2).tolist() == [1, 2]


@pytest.mark.slow
def test_figure_shows_where_the_first_fit_is_narrowest(mean_field, reference, dataset, tmp_path):
    path = tmp_path / "breast-cancer.png"
    figure = breast_cancer.plot([mean_field], reference, dataset, path)
    first = breast_cancer.narrowest(mean_field.draws, reference, 1)[0]
    assert figure.axes[0].get_xlabel() == dataset.covariate_names[first]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_figure_without_fits_is_refused(reference, dataset):
    with pytest.raises(ValueError, match="at least one fit"):
        breast_cancer.plot([], reference, dataset)


def test_methods_have_names_of_their_own():
    assert len({method.name for method in METHODS}) == len(METHODS)
    assert METHODS[0] == Method("mean-field", "diagonal", 1.0)


@pytest.mark.slow
def test_rejection_widens_what_mean_field_makes_too_narrow(dataset):
    reference = breast_cancer.reference(jax.random.key(1), dataset)
    fits = {
        method.name: breast_cancer.fit(jax.random.key(2), method, dataset) for method in METHODS
    }
    ratios = {
        name: breast_cancer.compare(found.draws, reference).min_sd_ratio
        for name, found in fits.items()
    }
    assert ratios["mean-field"] < 0.7
    assert ratios["RVRS 0.3"] > 0.78
    assert ratios["RVRS 0.1"] > 0.87
    assert ratios["RVRS 0.1 MVN"] > 0.94
    names = ("mean-field", "RVRS 0.3", "RVRS 0.1", "RVRS 0.1 MVN")
    elbos = [fits[name].fit.elbo for name in names]
    # The gaps are 4.3, 0.75 and 0.38, the errors below 0.02.
    assert np.all(np.diff(elbos) > 0.3)
    assert fits["RVRS 0.1 MVN"].fit.elbo > fits["MVN"].fit.elbo + 0.2
