import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density

from rvrs.experiments import _gradients, gradient_variance, logistic_model
from rvrs.experiments._gradients import Gradients, Moments
from rvrs.experiments.experiment import Result, Unit
from rvrs.proposals import DiagonalNormal

EPSILON = 0.01  # large, so that it shows
EXPERIMENT = gradient_variance.EXPERIMENT


@pytest.fixture(scope="module")
def posterior():
    """Two coefficients, a proposal that is off in every respect, and T."""
    data = logistic_model.load("breast_cancer", num_rows=12, dimension=2, seed=1)
    proposal = DiagonalNormal(jnp.array([-0.8, 0.3]), jnp.log(jnp.array([0.9, 0.4])))
    return data, proposal, 8.0


@pytest.fixture(scope="module")
def exact(posterior):
    return _exact_moments(*posterior)


@pytest.fixture(scope="module")
def sampled(posterior):
    return _gradients.sample(jax.random.key(0), *posterior, num_gradients=50_000, epsilon=EPSILON)


def _exact_moments(data, proposal, threshold):
    """Mean and variance of the gradients of both estimators, and Z, by quadrature.

    The grid is over pairs of draws of two coordinates each, in double precision, and the formulas
    are those of the paper: none of it shares code with the library.
    """
    loc, scale = (np.asarray(x, float) for x in (proposal.loc, jnp.exp(proposal.log_scale)))
    axis = np.linspace(-5.5, 5.5, 36)
    noise = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    q_mass = np.exp(-0.5 * np.sum(noise**2, axis=1))
    q_mass /= q_mass.sum()
    z = loc + scale * noise
    x, y = (np.asarray(each, float) for each in data)
    logits = z @ x.T
    log_p = np.sum(y * logits - np.logaddexp(0, logits), axis=1)
    log_p += np.sum(-0.5 * z**2, axis=1) - math.log(2 * math.pi)
    log_q = np.sum(-0.5 * noise**2 - np.log(scale), axis=1) - math.log(2 * math.pi)
    lw = log_p - log_q
    a = 1 / (1 + np.exp(-lw - threshold))
    a_e = EPSILON + (1 - EPSILON) * a
    zeta = EPSILON / (1 - EPSILON)
    kappa = (zeta + a**2) / (zeta + a)
    normalizer = np.sum(q_mass * a_e)
    r = q_mass * a_e / normalizer
    log_ratio = lw - np.log(a_e)

    # Derivatives with respect to (means, scales): of log q at fixed z, and of lw along z.
    score = np.hstack([noise / scale, (noise**2 - 1) / scale])
    d_lw = (y - 1 / (1 + np.exp(-logits))) @ x - z + noise / scale
    path = np.hstack([d_lw, d_lw * noise])
    # d kappa / d a, and d log(a_e), dA, d kappa along z.
    by_a = (2 * a * (zeta + a) - (zeta + a**2)) / (zeta + a) ** 2
    d_a = a * (1 - a)
    d_log_a = (1 - EPSILON) * d_a / a_e
    single = (1 - d_log_a) * kappa
    factor = kappa * d_log_a + by_a * d_a

    pairs = r[:, None] * r
    difference = (log_ratio[:, None] - log_ratio) / 2
    found = {}
    for name in ("vrs", "rvrs"):
        means, variances = [], []
        for k in range(4):
            if name == "vrs":
                u = kappa * score[:, k]
                gradient = difference * (u[:, None] - u)
            else:
                u, alone = factor * path[:, k], single * path[:, k]
                gradient = difference * (u[:, None] - u) + (alone[:, None] + alone) / 2
            mean = np.sum(pairs * gradient)
            means.append(mean)
            variances.append(np.sum(pairs * (gradient - mean) ** 2))
        found[name] = np.array(means), np.array(variances)
    return found, normalizer


def _z_scores(sampled, name, expected_mean, expected_variance):
    """Of the mean and of the variance of every coordinate, from the scatter of chunks."""
    moments, size = sampled.moments[name], _gradients._NUM_TARGETS
    mean_error = np.sqrt(expected_variance / (len(moments.mean) * size))
    mean = (moments.mean.mean(axis=0) - expected_mean) / mean_error
    per_chunk = moments.square / (size - 1)
    variance_error = per_chunk.std(axis=0, ddof=1) / math.sqrt(len(per_chunk))
    return mean, (per_chunk.mean(axis=0) - expected_variance) / variance_error


@pytest.mark.parametrize("name", ["vrs", "rvrs"])
def test_gradients_have_the_mean_and_the_variance_that_quadrature_gives(name, exact, sampled):
    expected, _ = exact
    mean, variance = _z_scores(sampled, name, *expected[name])
    assert np.abs(mean).max() < 3.5
    assert np.abs(variance).max() < 3.5


def test_both_estimators_have_the_same_exact_mean(exact):
    expected, _ = exact
    # As far as the grid reaches.
    np.testing.assert_allclose(expected["vrs"][0], expected["rvrs"][0], rtol=2e-5)


def test_the_z_scores_see_a_derivative_by_log_scale(exact, sampled, posterior):
    expected, _ = exact
    _, proposal, _ = posterior
    factor = np.concatenate([np.ones(2), np.exp(proposal.log_scale)])
    moments = sampled.moments["rvrs"]
    wrong = Moments(moments.mean * factor, moments.square * factor**2)
    _, variance = _z_scores(Gradients({"rvrs": wrong}, 0.5), "rvrs", *expected["rvrs"])
    assert np.abs(variance[:2]).max() < 3.5
    assert np.abs(variance[2:]).min() > 4


def test_ratios_are_those_of_quadrature_within_their_errors(exact, sampled):
    expected, _ = exact
    for part, columns in (("mean", slice(0, 2)), ("scale", slice(2, 4))):
        found = _gradients.variances(sampled, part)
        vrs, rvrs = (expected[name][1][columns].sum() for name in ("vrs", "rvrs"))
        assert abs(found.ratio - vrs / rvrs) < 3.5 * found.ratio_error
        assert found.ratio_error < 0.1 * found.ratio
        assert found.ratio == pytest.approx(found.vrs / found.rvrs)


def test_the_acceptance_is_that_of_quadrature(exact, sampled):
    _, normalizer = exact
    # At least two proposals for each gradient, and a standard deviation of at most 1/2 each.
    assert abs(sampled.acceptance - normalizer) < 3.5 * 0.5 / math.sqrt(2 * 50_000)


def test_variances_and_jackknife_agree_with_the_gradients_themselves():
    rng = np.random.default_rng(0)
    # Means far from zero, which a sum of squares would drown in.
    chunks = rng.normal(size=(20, _gradients._NUM_TARGETS, 6)) * np.arange(1, 7) + 1e4
    other = 2 * rng.normal(size=chunks.shape) * np.arange(1, 7)

    def moments(values):
        mean = values.mean(axis=1)
        return Moments(mean, np.sum((values - mean[:, None]) ** 2, axis=1))

    gradients = Gradients({"vrs": moments(other), "rvrs": moments(chunks)}, 0.5)
    found = _gradients.variances(gradients, "scale")

    def ratio(keep):
        spread = [x[keep, :, 3:].reshape(-1, 3).var(axis=0, ddof=1).sum() for x in (other, chunks)]
        return spread[0] / spread[1]

    every = np.arange(20)
    without = np.array([ratio(every != index) for index in every])
    error = math.sqrt(19 / 20 * np.sum((without - without.mean()) ** 2))
    assert found.ratio == pytest.approx(ratio(every), rel=1e-9)
    assert found.ratio_error == pytest.approx(error, rel=1e-6)
    # The variance of a ratio of two independent sample variances of normals.
    weights = np.array([4.0, 5.0, 6.0]) ** 4
    relative = math.sqrt(2 * 2 * weights.sum() / np.sum(weights**0.5) ** 2 / 10_000)
    assert found.ratio_error == pytest.approx(found.ratio * relative, rel=0.5)


def test_the_log_joint_is_that_of_the_numpyro_model():
    data = logistic_model.load("breast_cancer", num_rows=20, dimension=7)
    z = np.random.default_rng(0).normal(size=7).astype(np.float32)
    expected, _ = log_density(logistic_model.logistic_model, tuple(data), {}, {"coefficients": z})
    np.testing.assert_allclose(logistic_model.log_joint(data, jnp.asarray(z)), expected, rtol=1e-5)


def test_columns_of_a_small_dimension_are_among_those_of_a_larger_one():
    load = {d: logistic_model.load("breast_cancer", num_rows=9, dimension=d) for d in (5, 31, 40)}
    whole = logistic_model.load("breast_cancer", num_rows=9)
    np.testing.assert_array_equal(load[31].covariates, whole.covariates)
    for small, large in ((5, 31), (31, 40)):
        columns = {tuple(column) for column in load[large].covariates.T}
        assert {tuple(column) for column in load[small].covariates.T} <= columns
    assert load[40].covariates.shape == (9, 40)
    assert load[40].covariates.dtype == np.float32
    for data in load.values():
        np.testing.assert_array_equal(data.covariates[:, -1], 1.0)
        np.testing.assert_array_equal(data.responses, whole.responses)
    other = logistic_model.load("breast_cancer", num_rows=9, dimension=5, seed=1)
    assert not np.array_equal(other.covariates, load[5].covariates)


def _result(dimension, seed, mean_ratio, scale_ratio, failure=None):
    figures = {
        "dimension": dimension,
        "elbo": -50.0,
        "acceptance": 0.5,
        "mean_ratio": mean_ratio,
        "scale_ratio": scale_ratio,
        **{f"{part}_ratio_error": 0.1 for part in ("mean", "scale")},
        **{f"{p}_variance_{n}": 1.0 for p in ("mean", "scale") for n in ("vrs", "rvrs")},
    }
    unit = Unit(EXPERIMENT.name, "miniboone", f"D-{dimension}", seed)
    return Result(unit, {} if failure else figures, failure, 1.0)


def test_claims_hold_for_growing_ratios_and_fail_for_falling_ones():
    growing = [_result(d, s, 1 + d / 5 + s / 10, 2 + d / 3) for d in (2, 20, 62) for s in (0, 1)]
    assert [claim.holds for claim in EXPERIMENT.claims(growing)] == [True, True, True]
    falling = [_result(d, s, 8 - d / 10 + s / 10, 30 - d / 3) for d in (2, 20) for s in (0, 1)]
    assert [claim.holds for claim in EXPERIMENT.claims(falling)] == [True, False]
    below = [_result(2, 0, 0.9, 2.0)]
    assert [claim.holds for claim in EXPERIMENT.claims(below)] == [False, None]


def test_a_failed_unit_is_left_out_and_named(tmp_path):
    results = [_result(2, 0, 2.0, 3.0), _result(5, 0, 0, 0, failure="all is lost")]
    tables = EXPERIMENT.tables(results)
    assert "| 2 | 1 | 2.00 ± 0.10 | 3.00 ± 0.10 |" in tables
    assert "D-5, seed 0: all is lost" in tables
    (path,) = EXPERIMENT.plot(results, tmp_path)
    assert path.stat().st_size > 10_000
    assert EXPERIMENT.plot(results[1:], tmp_path) == []
    assert EXPERIMENT.claims(results[1:]) == []


def test_a_unit_gives_its_figures_again_for_the_same_seed():
    preset = EXPERIMENT.presets["quick"]
    tiny = dict(preset.settings) | {"num_steps": 100, "num_gradients": 1, "num_rows": 10}
    tiny["num_evaluation_proposals"] = 1000
    shares = []
    unit = Unit(EXPERIMENT.name, "breast_cancer", "D-2", 0)
    first, second = (
        EXPERIMENT.run(unit, tiny, {}, lambda share, words: shares.append(share)) for _ in range(2)
    )
    assert first == second
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(1)
    assert first.figures["threshold"] == -first.figures["elbo"]
    other = EXPERIMENT.run(unit._replace(seed=1), tiny, {}, lambda share, words: None)
    assert other.figures != first.figures


def test_every_preset_asks_for_what_the_experiment_has():
    for preset in EXPERIMENT.presets.values():
        assert set(preset.methods) <= set(EXPERIMENT.methods)
        assert set(preset.datasets) <= set(EXPERIMENT.datasets)
