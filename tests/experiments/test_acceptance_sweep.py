import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.experiments import acceptance_sweep, logistic_model
from rvrs.experiments.experiment import Result, Unit
from rvrs.proposals import DiagonalNormal

EXPERIMENT = acceptance_sweep.EXPERIMENT
TINY = {"num_rows": 20, "num_steps": 1500, "num_evaluation_proposals": 100_000}


def _unit(method, seed=0):
    return Unit(EXPERIMENT.name, "breast_cancer", method, seed)


@pytest.fixture(scope="module")
def rejecting():
    """The figures of a fit with rejection, and what was reported meanwhile."""
    reports = []
    outcome = EXPERIMENT.run(_unit("rvrs-0.2"), TINY, {}, lambda *report: reports.append(report))
    return outcome.figures, reports


@pytest.fixture(scope="module")
def plain():
    """The figures of a fit without rejection."""
    return EXPERIMENT.run(_unit("mean-field"), TINY, {}, lambda *report: None).figures


@pytest.mark.slow
def test_rejection_gains_elbo_and_widens_the_proposal(plain, rejecting):
    figures, _ = rejecting
    error = math.hypot(plain["elbo_error"], figures["elbo_error"])
    assert figures["elbo"] - plain["elbo"] > 5 * error
    assert figures["scale"] > 1.05 * plain["scale"]


@pytest.mark.slow
def test_mean_field_has_no_threshold_and_accepts_everything(plain):
    assert "threshold" not in plain
    assert plain["acceptance"] == plain["acceptance_while_training"] == 1


@pytest.mark.slow
def test_the_acceptance_is_near_its_target_without_solving_for_it_again(rejecting):
    figures, _ = rejecting
    # A short training; 5 % is what the claim asks of a long one.
    assert figures["acceptance"] == pytest.approx(0.2, rel=0.15)
    assert figures["acceptance_while_training"] == pytest.approx(0.2, rel=0.05)
    assert 0 < figures["acceptance_error"] < 0.01


@pytest.mark.slow
def test_progress_is_reported_while_training(rejecting):
    _, reports = rejecting
    shares = [share for share, _ in reports]
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    assert any("step 1000 of 1500" in words for _, words in reports)


def test_the_evaluation_is_at_the_given_threshold_and_right():
    """Against plain NumPy: ELBO and Z of two coefficients by a sum over a grid."""
    data = logistic_model.load("breast_cancer", num_rows=12, dimension=2, seed=1)
    proposal = DiagonalNormal(jnp.array([-0.8, 0.3]), jnp.log(jnp.array([0.9, 0.4])))
    axis = np.linspace(-7, 7, 141)
    noise = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    mass = np.exp(-0.5 * np.sum(noise**2, axis=1))
    mass /= mass.sum()
    scale = np.exp(np.asarray(proposal.log_scale, float))
    z = np.asarray(proposal.loc, float) + scale * noise
    x, y = (np.asarray(each, float) for each in data)
    logits = z @ x.T
    lw = np.sum(y * logits - np.logaddexp(0, logits), axis=1) - 0.5 * np.sum(z**2, axis=1)
    lw += np.sum(0.5 * noise**2 + np.log(scale), axis=1)
    for t in (5.0, 9.0):
        a = 0.01 + 0.99 / (1 + np.exp(-lw - t))
        normalizer = np.sum(mass * a)
        elbo = np.sum(mass * a * (lw - np.log(a))) / normalizer + math.log(normalizer)
        found = logistic_model.evaluate(
            jax.random.key(0), data, proposal, t, num_proposals=100_000, epsilon=0.01
        )
        assert abs(found.elbo - elbo) < 3.5 * found.elbo_error
        assert abs(found.log_normalizer - math.log(normalizer)) < 3.5 * found.log_normalizer_error
        assert found.elbo_error < 0.02


def _result(target, seed, elbo, *, scale=None, acceptance=None, failure=None):
    method = "mean-field" if target == 1 else f"rvrs-{target:g}"
    figures = {
        "target_acceptance": target,
        "elbo": elbo,
        "elbo_error": 0.01,
        "acceptance": target if acceptance is None else acceptance,
        "acceptance_error": 0.001,
        "acceptance_while_training": target,
        "scale": 1 - target / 2 if scale is None else scale,
    }
    if target < 1:
        figures["threshold"] = 40.0
    unit = Unit(EXPERIMENT.name, "miniboone", method, seed)
    return Result(unit, {} if failure else figures, failure, 1.0)


def _good():
    return [
        _result(target, seed, elbo + 0.01 * seed)
        for target, elbo in ((1, -53.0), (0.4, -46.0), (0.1, -42.0), (0.004, -39.0))
        for seed in (0, 1)
    ]


def test_claims_hold_for_gains_that_grow_as_the_target_falls():
    claims = EXPERIMENT.claims(_good())
    assert [claim.holds for claim in claims] == [True, True, True]
    assert "-46.00 at Z_target = 0.4" in claims[0].measured.replace("45.99", "46.00")


@pytest.mark.parametrize(
    ("spoilt", "which"),
    [
        (_result(0.1, 0, -47.0), 0),
        (_result(0.004, 0, -39.0, scale=0.3), 1),
        (_result(0.1, 0, -42.0, acceptance=0.106), 2),
    ],
)
def test_each_claim_fails_where_its_figures_say_so(spoilt, which):
    others = [result for result in _good() if result.unit.method != spoilt.unit.method]
    holds = [claim.holds for claim in EXPERIMENT.claims([*others, spoilt])]
    assert holds == [index != which for index in range(3)]


def test_without_mean_field_there_are_no_gains_but_the_rest(tmp_path):
    results = [
        *(result for result in _good() if result.unit.method != "mean-field"),
        _result(1, 0, 0.0, failure="the fit came to an ELBO of nan"),
    ]
    tables = EXPERIMENT.tables(results)
    assert "| 0.004 | 2 | -38.995 ± 0.005 |  | 0.9980 ± 0.0000 |" in tables
    assert "mean-field, seed 0: the fit came to an ELBO of nan" in tables
    assert [claim.holds for claim in EXPERIMENT.claims(results)] == [True, None, True]
    assert len(EXPERIMENT.plot(results, tmp_path)) == 2


def test_tables_and_figures_show_every_target(tmp_path):
    tables = EXPERIMENT.tables(_good())
    assert "| 0.004 | 2 | -38.995 ± 0.005 | 14.000 ± 0.007 |" in tables
    paths = EXPERIMENT.plot(_good(), tmp_path)
    assert [path.name for path in paths] == [
        "acceptance-miniboone.png",
        "acceptance-threshold-miniboone.png",
    ]
    assert all(path.stat().st_size > 10_000 for path in paths)
    only_failures = [_result(0.1, 0, 0.0, failure="no")]
    assert EXPERIMENT.plot(only_failures, tmp_path) == []
    assert EXPERIMENT.claims(only_failures) == []


def test_every_preset_asks_for_what_the_experiment_has():
    for preset in EXPERIMENT.presets.values():
        assert set(preset.methods) <= set(EXPERIMENT.methods)
        assert set(preset.datasets) <= set(EXPERIMENT.datasets)
