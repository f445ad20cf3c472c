import numpy as np
import pytest

from rvrs.experiments import training_curves
from rvrs.experiments.experiment import Result, Unit

EXPERIMENT = training_curves.EXPERIMENT
TINY = dict(EXPERIMENT.presets["quick"].settings) | {
    "num_rows": 30,
    "num_steps": 3000,
    "evaluate_every": 100,
    "num_evaluation_proposals": 2000,
    "learning_rate": 5e-3,
}


def _train(method, report=lambda share, words: None):
    unit = Unit(EXPERIMENT.name, "breast_cancer", method, 0)
    return Result(unit, EXPERIMENT.run(unit, TINY, {}, report).figures, None, 1.0)


@pytest.fixture(scope="module")
def rvrs():
    """A training, and what was reported meanwhile."""
    reports = []
    return _train("rvrs", lambda *report: reports.append(report)), reports


@pytest.mark.slow
def test_both_curves_begin_at_the_same_state_and_rvrs_rises_faster(rvrs):
    results = [rvrs[0], _train("vrs")]
    fast, slow = (result.figures for result in results)
    assert fast["elbo"][0] == slow["elbo"][0]
    assert fast["threshold"][0] == slow["threshold"][0]
    level = 0.5 * (fast["elbo"][0] + slow["final_elbo"])
    steps = [training_curves.steps_to(level, figures) for figures in (fast, slow)]
    assert steps[1] > 1.5 * steps[0]
    assert EXPERIMENT.claims(results)[0].holds


def test_a_curve_has_a_point_at_the_start_and_after_every_interval(rvrs):
    figures, reports = rvrs[0].figures, rvrs[1]
    assert figures["steps"] == list(range(0, 3001, 100))
    for name in ("elbo", "threshold", "acceptance"):
        assert len(figures[name]) == 31
        assert all(float(f"{value:.5g}") == value for value in figures[name])
    assert [share for share, _ in reports] == [step / 3000 for step in figures["steps"]]


def test_the_acceptance_ends_at_its_target(rvrs):
    figures = rvrs[0].figures
    # The mean of three points with 2000 proposals each.
    assert figures["final_acceptance"] == pytest.approx(0.25, rel=0.1)
    assert figures["num_capped"] == 0


def test_the_rate_falls_so_that_the_curve_comes_to_rest(rvrs):
    # T follows the proposal, and is free of the noise that evaluations have.
    moves = np.abs(np.diff(rvrs[0].figures["threshold"]))
    assert moves[-10:].mean() < 0.1 * moves[:10].mean()


def test_steps_to_a_level_lie_between_evaluations_on_a_straight_line():
    figures = {"steps": [0, 10, 20, 30], "elbo": [-10.0, -8.0, -4.0, -5.0]}
    assert training_curves.steps_to(-11.0, figures) == 0
    assert training_curves.steps_to(-9.0, figures) == pytest.approx(5)
    assert training_curves.steps_to(-5.0, figures) == pytest.approx(17.5)
    assert training_curves.steps_to(-4.0, figures) == pytest.approx(20)
    assert training_curves.steps_to(-3.0, figures) is None


def _result(method, seed, pace, *, acceptance=0.25, last=-40.0, failure=None):
    """A curve from -160 to ``last`` in a straight line over ``pace`` steps."""
    steps = np.arange(0, 100_001, 1000)
    elbo = np.minimum(-160 + (last + 160) * steps / pace, last)
    figures = {
        "target_acceptance": 0.25,
        "num_capped": 0,
        "final_elbo": last,
        "final_threshold": 45.0,
        "final_acceptance": acceptance,
        "steps": steps.tolist(),
        "elbo": elbo.tolist(),
        "threshold": (-elbo).tolist(),
        "acceptance": [acceptance] * len(steps),
    }
    unit = Unit(EXPERIMENT.name, "miniboone", method, seed)
    return Result(unit, {} if failure else figures, failure, 1.0)


def _good():
    paces = {"rvrs": (20_000, 22_000), "vrs": (60_000, 66_000)}
    return [_result(name, seed, paces[name][seed]) for name in paces for seed in (0, 1)]


def test_tables_tell_the_steps_to_the_levels_of_the_paper():
    tables = EXPERIMENT.tables(_good())
    assert "| -100.00 | the paper's | 10500 ± 500 | 31500 ± 1500 | 3.00 |" in tables
    assert "| -50.00 | the paper's | 19250 ± 917 | 57750 ± 2750 | 3.00 |" in tables
    assert "| RVRS | 2 | -160.00 ± 0.00 | -40.000 ± 0.000 |" in tables


def test_claims_hold_where_rvrs_is_first_and_fail_where_it_is_not():
    assert [claim.holds for claim in EXPERIMENT.claims(_good())] == [True, True]
    assert "(paper: 24000 and 69000)" in EXPERIMENT.claims(_good())[0].measured
    slow = [_result("rvrs", 0, 90_000), _result("vrs", 0, 60_000, acceptance=0.3)]
    assert [claim.holds for claim in EXPERIMENT.claims(slow)] == [False, False]


def test_a_failed_unit_is_left_out_and_named(tmp_path):
    results = [*_good()[:2], _result("vrs", 0, 1, failure="the ELBO is nan after 1000 steps")]
    tables = EXPERIMENT.tables(results)
    assert "vrs, seed 0: the ELBO is nan after 1000 steps" in tables
    assert "steps of VRS" not in tables
    assert [claim.holds for claim in EXPERIMENT.claims(results)] == [True]
    (path,) = EXPERIMENT.plot(results, tmp_path)
    assert path.stat().st_size > 10_000
    assert EXPERIMENT.plot(results[2:], tmp_path) == []


def test_every_preset_asks_for_what_the_experiment_has_and_evaluates_at_its_end():
    for preset in EXPERIMENT.presets.values():
        assert set(preset.methods) <= set(EXPERIMENT.methods)
        assert set(preset.datasets) <= set(EXPERIMENT.datasets)
        assert preset.settings["num_steps"] % preset.settings["evaluate_every"] == 0
