import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import subjaxprs
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy import stats

import rvrs
from rvrs import run
from rvrs.core.acceptance import log_acceptance
from rvrs.experiments import gaussian_process, process_model
from rvrs.experiments.experiment import Result, Unit
from rvrs.experiments.gaussian_process import EXPERIMENT
from rvrs.experiments.process_model import Data
from rvrs.proposals import FullRankNormal


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


RANDOM = np.random.RandomState(0)
SMALL = Data(RANDOM.standard_normal((6, 3)), (RANDOM.random_sample(6) < 0.5).astype(float))
PARAMETERS = {"amplitude": np.array(1.3), "length_scales": np.array([0.7, 1.5, 2.0])}


def kernel_by_hand(data):
    amplitude, scales = float(PARAMETERS["amplitude"]), np.asarray(PARAMETERS["length_scales"])
    size = len(data.inputs)
    kernel = np.empty((size, size))
    for i in range(size):
        for j in range(size):
            difference = (data.inputs[i] - data.inputs[j]) / scales
            kernel[i, j] = amplitude**2 * math.exp(-0.5 * difference @ difference)
    return kernel + 1e-6 * np.eye(size)


def test_the_factor_is_that_of_the_kernel_matrix():
    factor = np.asarray(process_model.kernel_factor(PARAMETERS, SMALL.inputs))
    assert factor.dtype == np.float64
    np.testing.assert_allclose(factor @ factor.T, kernel_by_hand(SMALL), rtol=1e-12)
    assert np.all(np.triu(factor, 1) == 0)


def test_the_models_density_is_that_of_a_process_with_bernoulli_labels():
    v = np.random.RandomState(1).standard_normal(6)
    kernel = kernel_by_hand(SMALL)
    factor = np.linalg.cholesky(kernel)
    f = factor @ v
    # The density of f, and the volume that the map from v to f makes.
    prior = stats.multivariate_normal(np.zeros(6), kernel).logpdf(f)
    prior += np.linalg.slogdet(factor)[1]
    likelihood = stats.bernoulli(1 / (1 + np.exp(-f))).logpmf(SMALL.labels.astype(int)).sum()
    expected = prior + likelihood
    assert process_model.log_joint(PARAMETERS, SMALL, jnp.asarray(v)) == pytest.approx(expected)
    model = process_model.gaussian_process(SMALL)
    by_numpyro, _ = log_density(model, (), {}, PARAMETERS | {"v": v})
    assert by_numpyro == pytest.approx(expected)


def test_parameters_are_positive_and_start_where_rows_are_neither_near_nor_far():
    data = process_model.load("breast_cancer", 50)
    assert data.inputs.shape == (50, 30)
    assert np.abs(data.inputs - 1).min(axis=0).max() > 0  # no column of ones
    trace = handlers.trace(handlers.seed(process_model.gaussian_process(data), 0)).get_trace()
    assert trace["amplitude"]["kwargs"]["constraint"] is not None
    scales = trace["length_scales"]["value"]
    assert scales.dtype == jnp.float64
    np.testing.assert_allclose(scales, math.sqrt(30))
    factor = np.asarray(process_model.kernel_factor(process_model.initial_parameters(30), data[0]))
    correlations = (factor @ factor.T)[np.triu_indices(50, 1)]
    assert 0.05 < np.median(correlations) < 0.95


def cholesky_shapes(jaxpr):
    """Shapes of the Cholesky factors that a program computes, those in loops once."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cholesky":
            yield equation.outvars[0].aval.shape
    for inner in subjaxprs(jaxpr):
        yield from cholesky_shapes(inner)


def test_proposals_share_the_cholesky_factor_of_their_block():
    guide = rvrs.AutoRVRS(process_model.gaussian_process(SMALL), proposal="mvn")
    with handlers.seed(rng_seed=0):
        guide._setup_prototype()
    phi = guide.proposal.family.init(jnp.zeros(6), 1.0)
    state = guide.first_state(phi, PARAMETERS, ((), {}))

    def loss(phi, parameters, key):
        return guide.surrogate_step(key, phi, parameters, state, ((), {}))[2]

    step = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))
    shapes = list(cholesky_shapes(step(phi, PARAMETERS, jax.random.key(0)).jaxpr))
    # One for the first block, one for the body of the loop over later ones, one for the gradient;
    # a factor for each of the 20 proposals would have another shape.
    assert 1 <= len(shapes) <= 3
    assert set(shapes) == {(6, 6)}


# One row: v is a number, so that integrals over it are sums over a grid.
ONE = Data(np.array([[0.0]]), np.array([1.0]))
ONE_PARAMETERS = {"amplitude": np.array(2.5), "length_scales": np.array([1.0])}
PROPOSAL = FullRankNormal(np.array([0.2]), np.array([math.log(1.1)]), np.zeros((1, 1)))
GRID = np.linspace(-12, 12, 20_001)
EPSILON = 1e-6


def on_grid(log_amplitude):
    """Log density of model and proposal."""
    parameters = ONE_PARAMETERS | {"amplitude": jnp.exp(log_amplitude)}
    factor = process_model.kernel_factor(parameters, ONE.inputs)[0, 0]
    log_p = jax.scipy.stats.norm.logpdf(GRID) + jax.nn.log_sigmoid(factor * GRID)
    return log_p, jax.scipy.stats.norm.logpdf(GRID, PROPOSAL.loc[0], 1.1)


def elbo(log_amplitude, t):
    """By quadrature."""
    log_p, log_q = on_grid(log_amplitude)
    log_a = log_acceptance(log_p - log_q, jnp.full_like(log_p, t), EPSILON)
    width = GRID[1] - GRID[0]
    z = jnp.sum(jnp.exp(log_q + log_a)) * width
    r = jnp.exp(log_q + log_a) / z
    return jnp.sum(r * (log_p - log_q - log_a)) * width + jnp.log(z)


def threshold_of(acceptance):
    log_p, log_q = on_grid(jnp.log(2.5))

    def rate(t):
        log_a = log_acceptance(log_p - log_q, jnp.full_like(log_p, t), EPSILON)
        return float(jnp.sum(jnp.exp(log_q + log_a)) * (GRID[1] - GRID[0]))

    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) < acceptance else (low, middle)
    return low


def test_gradients_agree_with_quadrature_and_the_truncated_one_is_biased():
    log_amplitude, t = jnp.log(2.5), threshold_of(0.1)
    exact = jax.grad(elbo)(log_amplitude, t)
    log_p, log_q = on_grid(log_amplitude)
    r = jnp.exp(log_q + log_acceptance(log_p - log_q, jnp.full_like(log_p, t), EPSILON))
    by_amplitude = jax.jacfwd(lambda x: on_grid(x)[0])(log_amplitude)
    truncated = jnp.sum(r * by_amplitude) / jnp.sum(r)
    found = process_model.model_gradients(jax.random.key(3), ONE, PROPOSAL, ONE_PARAMETERS, 1000)
    unbiased, covariance = found.unbiased[:, 0], found.covariance[:, 0]
    for estimates, expected in ((unbiased, exact), (covariance, exact - truncated)):
        error = estimates.std(ddof=1) / math.sqrt(len(estimates))
        assert abs(estimates.mean() - expected) < 4 * error
    # What is tested is there: the bias is many errors away from none.
    assert abs(exact - truncated) > 10 * covariance.std(ddof=1) / math.sqrt(len(covariance))
    # With one row the length scale does not matter.
    np.testing.assert_allclose(found.unbiased[:, 1], 0.0, atol=1e-12)


def test_the_error_of_a_norm_is_what_noise_alone_would_give():
    noise = np.random.RandomState(2).standard_normal((400, 5))
    norm = process_model.norm_of_mean(noise)
    assert norm.error == pytest.approx(math.sqrt(5 / 400), rel=0.1)
    assert norm.value < 3 * norm.error
    shifted = process_model.norm_of_mean(noise + 3)
    assert shifted.error == pytest.approx(norm.error)
    assert shifted.value == pytest.approx(3 * math.sqrt(5), rel=0.05)


def figures(method, elbo):
    if method == "gradient-bias":
        return {
            f"{state}_{group}_{part}": 0.5
            for state in ("start", "trained")
            for group in ("amplitude", "length_scales")
            for part in ("gradient", "gradient_error", "bias", "bias_error")
        }
    return {
        "elbo": elbo,
        "elbo_error": 0.01,
        "seconds_per_step": 0.005,
        "amplitude": 2.0,
        "shortest_length_scale": 1.0,
        "longest_length_scale": 9.0,
    }


def made_up(elbos, num_seeds=2):
    """Results of ``{method: elbo}`` on one data set; None is a failure."""
    return [
        Result(
            Unit(EXPERIMENT.name, "susy", method, seed),
            {} if elbo is None else figures(method, elbo + 0.01 * seed),
            "diverged" if elbo is None else None,
            1.0,
        )
        for method, elbo in elbos.items()
        for seed in range(num_seeds)
    ]


GOOD = {
    "mvn": -136.7,
    "rvrs-0.3": -136.62,
    "rvrs-0.1": -136.6,
    "rvrs-0.1-truncated": -136.6,
    "iwae-8": -136.65,
    "iwae-128": -136.6,
    "uha-3": -136.64,
    "uha-6": -136.64,
    "gradient-bias": 0.0,
}


def test_claims_hold_for_results_like_the_papers_and_fail_for_others():
    assert [claim.holds for claim in EXPERIMENT.claims(made_up(GOOD))] == [True, True, True]
    bad = GOOD | {"iwae-128": -136.0, "uha-6": -135.0, "rvrs-0.1-truncated": -137.0}
    assert [claim.holds for claim in EXPERIMENT.claims(made_up(bad))] == [False, False, False]


@pytest.mark.parametrize(
    "elbos",
    [
        {},
        {"mvn": None},
        {"mvn": -3.0},
        {"rvrs-0.1": -3.0, "mvn": None},
        {"gradient-bias": 0.0},
        GOOD | {"uha-6": None},
        GOOD,
    ],
    ids=["nothing", "failed", "baseline", "no baseline", "bias", "one failed", "all"],
)
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_whatever_is_there_is_shown(elbos, num_seeds, tmp_path):
    results = made_up(elbos, num_seeds)
    paths = EXPERIMENT.plot(results, tmp_path)
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert len(paths) == (2 if any(e is not None for m, e in elbos.items() if m[0] != "g") else 0)
    text = EXPERIMENT.tables(results)
    assert text.count("diverged") == num_seeds * list(elbos.values()).count(None)
    assert ("bias / gradient" in text) == ("gradient-bias" in elbos)
    EXPERIMENT.claims(results)


def test_presets_ask_for_what_the_experiment_knows():
    assert set(EXPERIMENT.presets) == {"quick", "cpu", "paper"}
    names = [set(preset.settings) for preset in EXPERIMENT.presets.values()]
    assert names[0] == names[1] == names[2]
    for preset in EXPERIMENT.presets.values():
        assert set(preset.datasets) <= set(EXPERIMENT.datasets)
        assert set(preset.methods) <= set(EXPERIMENT.methods)
        assert "mvn" in preset.methods
        json.dumps(dict(preset.settings))


@pytest.mark.slow
def test_the_bias_is_measured_at_the_start_and_after_training(monkeypatch):
    monkeypatch.setattr(run, "_WARM_UP_STEPS", 10)
    shares = []
    found = gaussian_process.gradient_bias(
        jax.random.key(0),
        SMALL,
        num_steps=10,
        num_gradients=20,
        report=lambda share, _: shares.append(share),
    )
    assert set(found) == set(figures("gradient-bias", 0.0))
    assert all(math.isfinite(value) for value in found.values())
    assert shares == sorted(shares)
    # At the start there is a lot to gain; afterwards less, be it after a few steps.
    assert found["start_amplitude_gradient"] > 5 * found["start_amplitude_gradient_error"]
