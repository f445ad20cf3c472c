import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.stats import gamma, loggamma, norm, t

from rvrs.datasets import Dataset
from rvrs.experiments import hierarchical_model
from rvrs.experiments.hierarchical_model import MADE_UP, build

GLOBALS = {"coefficients": np.array([0.4, -0.3]), "scale": 0.7, "degrees_of_freedom": 3.0}


def made_up(size: int) -> Dataset:
    random = np.random.RandomState(0)
    covariates = random.normal(size=(size, 2)).astype(np.float32)
    return Dataset("made up", covariates, random.normal(size=size).astype(np.float32), ("a", "b"))


def residuals(dataset: Dataset) -> np.ndarray:
    return dataset.responses - dataset.covariates @ GLOBALS["coefficients"]


def log_joint(model, rows, **latents) -> float:
    with handlers.substitute(data={hierarchical_model.PLATE: jnp.asarray(rows)}):
        return float(log_density(model, (), {}, GLOBALS | latents)[0])


@pytest.fixture
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a made-up ``pol``: one constant column, and responses that it explains."""
    random = np.random.RandomState(1)
    features = random.normal(size=(400, 26))
    features[:, 3] = 7.0
    responses = 5 + 10 * (features[:, 0] + 0.1 * random.normal(size=400))
    names = np.array([f"feature {i}" for i in range(26)])
    np.savez(tmp_path / "pol.npz", X=features, y=responses, feature_names=names)
    monkeypatch.setenv("RVRS_DATA", str(tmp_path))
    return tmp_path


def test_integrating_tau_out_gives_the_student_t_and_a_gamma_posterior(double_precision):
    dataset = made_up(1)
    models = build(dataset, 1)
    log_tau, step = np.linspace(-12.0, 4.0, 401, retstep=True)
    joint = np.array([log_joint(models.model, [0], tau=np.exp([at])) for at in log_tau])
    joint += log_tau  # a density of log tau
    marginal = np.log(np.exp(joint).sum() * step)
    assert marginal == pytest.approx(log_joint(models.oracle_model, [0]), rel=1e-8)

    nu, scale, residual = 3.0, 0.7, float(residuals(dataset)[0])
    prior = norm.logpdf(GLOBALS["coefficients"]).sum() + norm.logpdf(scale) + math.log(2)
    prior += gamma.logpdf(nu, 2.0, scale=10.0)
    assert marginal == pytest.approx(prior + t.logpdf(residual, nu, scale=scale), rel=1e-7)
    rate = nu / 2 + residual**2 / (2 * scale**2)
    posterior = loggamma.logpdf(log_tau + math.log(rate), nu / 2 + 0.5)
    np.testing.assert_allclose(joint - marginal, posterior, atol=1e-6)


@pytest.mark.parametrize("name", ["model", "oracle_model"])
def test_batches_stand_for_all_rows(name, double_precision):
    dataset, tau = made_up(6), np.linspace(0.3, 2.0, 6)
    taus = (lambda rows: {"tau": tau[rows]}) if name == "model" else lambda rows: {}
    everything, batches = np.arange(6), np.array([[0, 3], [5, 1], [2, 4]])
    full = log_joint(getattr(build(dataset, 6), name), everything, **taus(everything))
    model = getattr(build(dataset, 2), name)
    parts = [log_joint(model, rows, **taus(rows)) for rows in batches]
    assert np.ptp(parts) > 0.1
    assert np.mean(parts) == pytest.approx(full, rel=1e-12)


def test_data_are_standardised_and_a_quarter_of_them_noisy(folder):
    dataset = hierarchical_model.load("pol")
    assert dataset.covariates.shape == (400, 26)  # 26 features, one constant, and the intercept
    assert "feature 3" not in dataset.covariate_names
    assert dataset.covariate_names[-1] == "intercept"
    raw = np.load(folder / "pol.npz")["y"]
    noise = dataset.responses - (raw - raw.mean()) / raw.std()
    noisy = np.abs(noise) > 1e-5
    assert noisy.sum() == 100
    clean = (raw - raw.mean()) / raw.std()
    unexplained = clean - dataset.covariates @ np.linalg.lstsq(dataset.covariates, clean)[0]
    ratio = noise[noisy].std() / unexplained.std()
    assert abs(ratio / hierarchical_model.NOISE_SD - 1) < 4 / math.sqrt(2 * 100)
    np.testing.assert_array_equal(hierarchical_model.load("pol").responses, dataset.responses)


def test_the_made_up_data_need_no_file_and_have_heavy_tails(monkeypatch, tmp_path):
    monkeypatch.setenv("RVRS_DATA", str(tmp_path))
    dataset = hierarchical_model.load(MADE_UP)
    assert dataset.name == MADE_UP
    assert dataset.covariates.shape == (400, 5)
    assert dataset.covariates.dtype == dataset.responses.dtype == np.float32
    assert len(dataset.covariate_names) == 5
    np.testing.assert_array_equal(dataset.covariates[:, -1], 1.0)
    features = dataset.covariates[:, :-1]
    np.testing.assert_allclose(features.mean(axis=0), 0.0, atol=1e-6)
    np.testing.assert_allclose([*features.std(axis=0), dataset.responses.std()], 1.0, rtol=1e-6)
    coefficients = np.linalg.lstsq(dataset.covariates, dataset.responses)[0]
    left = dataset.responses - dataset.covariates @ coefficients
    # A regression, and residuals whose likelihood prefers heavy tails by far to normal ones.
    assert left.var() < 0.9
    nu, loc, scale = t.fit(left)
    assert 1 < nu < 5
    assert t.logpdf(left, nu, loc, scale).sum() > norm.logpdf(left, scale=left.std()).sum() + 20
    np.testing.assert_array_equal(hierarchical_model.load(MADE_UP).responses, dataset.responses)


def test_unknown_names_and_sizes_are_refused():
    with pytest.raises(
        ValueError, match="name must be one of 'pol', 'bike', 'made-up', got 'adult'"
    ):
        hierarchical_model.load("adult")
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"batch_size must be from 1 to 4, .* got {size}"):
            build(made_up(4), size)
