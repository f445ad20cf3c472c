import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import gamma, loggamma, norm, t

from rvrs.baselines import local
from rvrs.datasets import Dataset
from rvrs.experiments import hierarchical
from rvrs.experiments.hierarchical import METHODS, Result, build
from rvrs.experiments.lognormal_family import (
    family_gap,
    family_optimum,
    interpolated_gap,
    optimal_fraction,
    shortfall,
)

GLOBALS = {"coefficients": np.array([0.4, -0.3]), "scale": 0.7, "degrees_of_freedom": 3.0}
RESULT = Result(-123.25, 0.1 + 0.2, 3.0, 1 / 3)


def made_up(size: int) -> Dataset:
    random = np.random.RandomState(0)
    covariates = random.normal(size=(size, 2)).astype(np.float32)
    return Dataset("made up", covariates, random.normal(size=size).astype(np.float32), ("a", "b"))


def heavy_tailed() -> Dataset:
    dataset = made_up(200)
    noise = np.clip(np.random.RandomState(1).standard_t(2, size=200), -8, 8)
    return dataset._replace(responses=noise.astype(np.float32))


def residuals(dataset: Dataset) -> np.ndarray:
    return dataset.responses - dataset.covariates @ GLOBALS["coefficients"]


def log_joint(model, rows, **latents) -> float:
    with handlers.substitute(data={hierarchical.PLATE: jnp.asarray(rows)}):
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


def solve(q, log_ratio, target_acceptance):
    return brentq(lambda at: q @ expit(log_ratio + at) - target_acceptance, -50, 50)


def brute_force(shape: float, target_acceptance: float, locations, scales) -> float:
    """Least KL(r || posterior) over a grid of proposals, as an integral of r log(r / posterior)."""
    z, dz = np.linspace(-25.0, 6.0, 4001, retstep=True)
    log_p = loggamma.logpdf(z, shape)
    gaps = []
    for location in locations:
        for scale in scales:
            log_q = norm.logpdf(z, location, scale)
            q, log_ratio = np.exp(log_q) * dz, log_p - log_q
            threshold = solve(q, log_ratio, target_acceptance)
            log_r = log_q - np.logaddexp(0, -log_ratio - threshold) - math.log(target_acceptance)
            gaps.append(np.exp(log_r) * dz @ (log_r - log_p))
    return min(gaps)


@pytest.mark.parametrize(("shape", "target_acceptance"), [(1.5, 0.5), (2.5, 0.1)])
def test_optimum_of_the_family_is_that_of_a_brute_force_grid(shape, target_acceptance):
    gap, mean_field_gap = family_optimum(shape, target_acceptance)
    # The grid holds the optimum of the proposal to 0.04, where the gap is flat.
    grid = brute_force(
        shape, target_acceptance, np.linspace(-1.0, 1.5, 63), np.linspace(0.4, 1.6, 31)
    )
    assert gap <= grid + 1e-9
    assert gap == pytest.approx(grid, rel=0.02)
    stirling = math.lgamma(shape) - (shape - 0.5) * math.log(shape) + shape
    assert mean_field_gap == pytest.approx(stirling - math.log(2 * math.pi) / 2, rel=1e-9)
    assert family_optimum(shape, 1.0)[0] == pytest.approx(mean_field_gap, rel=1e-6)


@pytest.mark.parametrize("nu", [1.0, 2.0, 4.0])
def test_rejection_can_close_four_fifths_of_the_gap_at_one_half_and_nearly_all_at_a_tenth(nu):
    assert 0.80 < optimal_fraction(nu, 0.5) < 0.83
    assert optimal_fraction(nu, 0.1) == pytest.approx(0.989, abs=5e-4)


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


@pytest.mark.slow
def test_mean_field_at_its_best_is_below_oracle_by_the_gap_of_every_row(
    double_precision, monkeypatch
):
    dataset = made_up(40)
    nu, scale = GLOBALS["degrees_of_freedom"], GLOBALS["scale"]
    shape = nu / 2 + 0.5
    rates = nu / 2 + residuals(dataset) ** 2 / (2 * scale**2)
    locations = {
        "coefficients": GLOBALS["coefficients"],
        "scale": math.log(scale),
        "degrees_of_freedom": math.log(nu),
        "tau": np.log(shape / rates) - 1 / (2 * shape),
    }
    # The global variables hardly vary, so that the gap is that of the local ones alone.
    params = {f"{site}_auto_loc": jnp.asarray(at) for site, at in locations.items()}
    params |= {f"{site}_auto_scale": jnp.full(np.shape(at), 1e-7) for site, at in locations.items()}
    params["tau_auto_scale"] = jnp.full(40, 1 / math.sqrt(shape))
    models = build(dataset, 40)
    monkeypatch.setattr(hierarchical, "_ELBO_ERROR", 0.08)
    elbos, errors = zip(
        *(
            hierarchical.evaluate(jax.random.key(0), model, local.normals(model), params)
            for model in (models.model, models.oracle_model)
        ),
        strict=True,
    )
    expected = 40 * family_optimum(shape, 1.0)[1]
    assert 0.01 < errors[0] < hierarchical._ELBO_ERROR
    assert abs(elbos[1] - elbos[0] - expected) < 4 * math.hypot(*errors)
    assert 4 * math.hypot(*errors) < 0.3 * expected
    assert hierarchical.mean_degrees_of_freedom(params) == pytest.approx(nu)


@pytest.mark.slow
def test_training_finds_the_optimum_of_oracle(double_precision, monkeypatch):
    # Independent normals at the mode: their best scales are known where the density is normal.
    monkeypatch.setattr(hierarchical, "BATCH_SIZE", 100)
    dataset = made_up(400)
    result = METHODS["oracle"](jax.random.key(0), dataset, 3000)
    models = build(dataset, 400)

    def negative_log_posterior(at):
        latents = {"coefficients": at[:2], "scale": jnp.exp(at[2])}
        latents["degrees_of_freedom"] = jnp.exp(at[3])
        return -log_density(models.oracle_model, (), {}, latents)[0] - at[2] - at[3]

    mode = jax.scipy.optimize.minimize(negative_log_posterior, jnp.zeros(4), method="BFGS").x
    curvature = jnp.diagonal(jax.hessian(negative_log_posterior)(mode))
    laplace = -negative_log_posterior(mode) + 0.5 * jnp.log(2 * math.pi / curvature).sum()
    assert result.elbo == pytest.approx(float(laplace), abs=0.3)
    assert result.seconds_per_step > 0


@pytest.mark.parametrize("target_acceptance", [1.0, 0.5])
def test_the_interpolated_gap_is_that_of_the_family(target_acceptance, double_precision):
    gap = interpolated_gap(target_acceptance)
    for shape in (0.61, 1.7, 9.3):
        wanted = family_optimum(shape, target_acceptance)[0]
        assert float(gap(jnp.asarray(shape))) == pytest.approx(wanted, rel=2e-4)


def test_the_shortfall_of_a_proposal_is_its_distance_from_the_optimum(double_precision):
    shape, rate, target_acceptance = 2.0, 3.0, 0.5
    location, scale = 0.0, 1.0
    # Global variables that do not vary, so that the optimum of the family is the best there is.
    found = shortfall(
        jnp.full(3, shape),
        jnp.full((3, 1), rate),
        jnp.array([location - math.log(rate)]),
        jnp.array([scale]),
        target_acceptance,
    )
    gap = family_gap(shape, target_acceptance, location, scale)
    best = family_optimum(shape, target_acceptance)[0]
    assert gap - best > 0.01
    assert float(found[0]) == pytest.approx(gap - best, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["semi-rvrs-0.5", "semi-rvrs-0.5-gamma", "semi-rvrs-0.5-budget"])
def test_rejection_is_between_mean_field_and_oracle(name, double_precision, monkeypatch):
    monkeypatch.setattr(hierarchical, "BATCH_SIZE", 50)
    monkeypatch.setattr(hierarchical, "_GLOBAL_DRAWS", 100)
    dataset, key = heavy_tailed(), jax.random.key(0)
    # Without local parameters steps are cheap, and few of them not enough.
    best = METHODS["oracle"](key, dataset, 8000)
    base = METHODS["optimum-1"](key, dataset, 8000)
    found = METHODS[name](key, dataset, 1500)
    share = (found.elbo - base.elbo) / (best.elbo - base.elbo)
    error = math.hypot(found.elbo_error, best.elbo_error, base.elbo_error)
    assert (found.dropped > 0) == ("budget" in name)
    assert share > (0.9 if "gamma" in name else 0.7), share
    assert found.elbo < best.elbo + 4 * error


def test_training_without_finite_gradients_is_an_error(double_precision, monkeypatch):
    monkeypatch.setattr(hierarchical, "BATCH_SIZE", 2)
    dataset = made_up(4)
    broken = dataset._replace(responses=np.full(4, np.nan, np.float32))
    guide = local.normals(build(dataset, 2).oracle_model)
    with pytest.raises(RuntimeError, match="50 of 50 steps"):
        hierarchical.train(jax.random.key(0), build(broken, 2).oracle_model, guide, 4, 50)


def test_data_are_standardised_and_a_quarter_of_them_noisy(folder):
    dataset = hierarchical.load("pol")
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
    assert abs(ratio / hierarchical.NOISE_SD - 1) < 4 / math.sqrt(2 * 100)
    np.testing.assert_array_equal(hierarchical.load("pol").responses, dataset.responses)


def test_stored_results_are_not_computed_again(folder, monkeypatch, capsys):
    calls = []

    def method(rng_key, dataset, num_steps):
        calls.append((len(dataset.responses), num_steps, jnp.zeros(1).dtype))
        return RESULT._replace(elbo=RESULT.elbo + num_steps)

    monkeypatch.setitem(METHODS, "mean-field", method)
    monkeypatch.setitem(METHODS, "oracle", method)
    out = folder / "results"
    first = hierarchical.run("pol", "oracle", 0, 7, out)
    assert hierarchical.run("pol", "oracle", 0, 7, out) == first == RESULT._replace(elbo=-116.25)
    assert calls == [(400, 7, jnp.float64)]
    arguments = ["--dataset=pol", "--methods=mean-field,oracle", "--steps=7", f"--out={out}"]
    for _ in range(2):
        hierarchical.main(arguments)
    assert len(calls) == 2
    assert "oracle                 -116.25" in capsys.readouterr().out
    hierarchical.run("pol", "oracle", 1, 7, out)
    hierarchical.run("pol", "oracle", 0, 8, out)
    assert len(calls) == 4
    assert sorted(path.name for path in out.iterdir()) == [
        "pol_mean-field_7_seed0.json",
        "pol_oracle_7_seed0.json",
        "pol_oracle_7_seed1.json",
        "pol_oracle_8_seed0.json",
    ]
    monkeypatch.setattr(hierarchical, "NOISE_SD", 9.0)
    hierarchical.run("pol", "oracle", 0, 7, out)
    assert len(calls) == 5


def test_what_is_not_a_result_is_neither_stored_nor_read(folder, monkeypatch):
    monkeypatch.setitem(METHODS, "oracle", lambda *_: RESULT._replace(elbo=math.nan))
    with pytest.raises(RuntimeError, match="nan; not stored"):
        hierarchical.run("pol", "oracle", 0, 7, folder)
    path = folder / "pol_oracle_7_seed0.json"
    assert not path.exists()
    path.write_text(json.dumps({"settings": {}})[:-1])
    with pytest.raises(ValueError, match="delete it"):
        hierarchical.run("pol", "oracle", 0, 7, folder)


def test_table_gives_gains_over_mean_field_and_fractions_of_the_gap():
    results = {"mean-field": RESULT, "half": RESULT._replace(elbo=-118.25)}
    assert "5.00    nan%" in hierarchical.table(results)
    results["oracle"] = RESULT._replace(elbo=-113.25)
    head, *rows = hierarchical.table(results).splitlines()
    assert {len(row) for row in rows} == {len(head)}
    assert rows[1].split() == [
        "half",
        "-118.25",
        "0.30",
        "5.00",
        "50.0%",
        "3.00",
        "333.333",
        "0.0%",
        "0.00",
    ]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="name must be one of 'pol', 'bike', got 'adult'"):
        hierarchical.load("adult")
    with pytest.raises(ValueError, match="dataset must be one of 'pol', 'bike'"):
        hierarchical.run("adult", "oracle", 0, 7, tmp_path)
    with pytest.raises(ValueError, match="method must be one of 'mean-field', 'oracle'"):
        hierarchical.run("pol", "magic", 0, 7, tmp_path)
    with pytest.raises(ValueError, match="batch_size must be from 1 to 4"):
        build(made_up(4), 5)
    with pytest.raises(ValueError, match="degrees_of_freedom must be a finite number above 0"):
        optimal_fraction(0.0, 0.5)
    with pytest.raises(ValueError, match="target_acceptance must be a number"):
        optimal_fraction(1.0, 0.0)
