import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.experiments import catalogue, hierarchical, hierarchical_summary, runner
from rvrs.experiments.experiment import DivergedError, Result, Unit
from rvrs.experiments.hierarchical import EXPERIMENT, budget_method
from rvrs.experiments.hierarchical_methods import METHODS, Effort, Measured
from rvrs.experiments.hierarchical_summary import BASE, ORACLE, ORDER, fraction, lead

MEASURED = Measured(-123.25, 0.3, 3.0, 0.001, 2.0)
SETTINGS = EXPERIMENT.presets["quick"].settings


def run(method, dataset="made-up", seed=3, **settings):
    unit = Unit("hierarchical", dataset, method, seed)
    return EXPERIMENT.run(unit, SETTINGS | settings, {}, lambda _share, _words: None)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("mean-field", "mean-field"),
        ("oracle", "oracle"),
        ("semi-dais-16", "semi-dais"),
        ("semi-rvrs-0.1-budget-40", "semi-rvrs"),
        ("optimum-0.5", "optimum"),
    ],
)
def test_a_unit_is_a_fit_of_its_data_in_double_precision_with_the_steps_of_its_kind(
    method, kind, monkeypatch
):
    calls = []

    def fit(rng_key, dataset, effort, report):
        calls.append((rng_key, dataset, effort, jnp.zeros(1).dtype))
        report(0.5, "half")
        return MEASURED._replace(dropped=0.25)

    monkeypatch.setitem(METHODS, method, fit)
    steps = {name: number for number, name in enumerate(SETTINGS["steps"], start=7)}
    found = run(method, steps=steps)
    ((rng_key, dataset, effort, dtype),) = calls
    assert rng_key == jax.random.key(3)
    assert dataset.name == "made-up"
    assert dtype == jnp.float64
    assert effort == Effort(
        steps[kind], **{name: value for name, value in SETTINGS.items() if name != "steps"}
    )
    assert found.figures == {
        "elbo": -123.25,
        "elbo_error": 0.3,
        "degrees_of_freedom": 3.0,
        "seconds_per_step": 0.001,
        "training_seconds": 2.0,
        "dropped": 0.25,
        "batch_size": 50,
    }
    with_shortfall = MEASURED._replace(shortfall=1.5)
    monkeypatch.setitem(METHODS, method, lambda *_: with_shortfall)
    assert run(method).figures["shortfall"] == 1.5


def test_what_is_not_finite_is_a_failure_with_its_reason(monkeypatch):
    monkeypatch.setitem(METHODS, "oracle", lambda *_: MEASURED._replace(elbo=math.nan))
    with pytest.raises(DivergedError, match="oracle: elbo not finite"):
        run("oracle")


def test_the_runner_stores_failures_with_their_reason(monkeypatch, tmp_path):
    def diverging(*_):
        raise DivergedError("50 of 50 steps")

    monkeypatch.setitem(METHODS, "oracle", diverging)
    monkeypatch.setitem(METHODS, "mean-field", lambda *_: MEASURED)
    address = "rvrs.experiments.hierarchical:EXPERIMENT"
    monkeypatch.setitem(catalogue.NAMES, "hierarchical", address)
    done = runner.run("hierarchical", "quick", methods=["mean-field", "oracle"], out=tmp_path)
    assert done.computed == 2
    assert [result.failure for result in done.failures] == ["50 of 50 steps"]


# ELBOs, shares of dropped points and seconds per step that agree with all claims.
ELBOS = {
    "mean-field": 0.0,
    "semi-dais-8": 25.0,
    "semi-dais-16": 50.0,
    "semi-dais-32": 70.0,
    "semi-rvrs-0.5": 81.0,
    "semi-rvrs-0.1": 98.0,
    "semi-rvrs-0.5-gamma": 97.0,
    "semi-rvrs-0.1-gamma": 99.5,
    "oracle": 100.0,
    "optimum-1": 0.5,
    "optimum-0.5": 81.9,
    "optimum-0.1": 98.9,
    # With many points left out; no claim is about that.
    "semi-rvrs-0.5-budget-4": 70.0,
    "semi-rvrs-0.5-budget-8": 80.9,
    "semi-rvrs-0.1-budget-40": 98.1,
    "semi-rvrs-0.1-budget-60": 98.0,
}
DROPPED = {"semi-rvrs-0.5-budget-4": 0.31, "semi-rvrs-0.5-budget-8": 0.035}
DROPPED |= {"semi-rvrs-0.1-budget-40": 0.08, "semi-rvrs-0.1-budget-60": 0.014}
SECONDS = {"semi-rvrs-0.5": 0.004, "semi-rvrs-0.1": 0.008}
# Beyond the rule of thumb, Algorithm 3 may well be slower.
SECONDS |= {"semi-rvrs-0.1-budget-60": 0.009}


def results(elbos=ELBOS, *, num_seeds=2, dropped=DROPPED, seconds=SECONDS, datasets=("pol",)):
    """Of ``{method: elbo}``; seeds are 0.4 apart, and None is a failure."""
    found = []
    for dataset in datasets:
        for method, elbo in elbos.items():
            for seed in range(num_seeds):
                figures = {
                    "elbo": (elbo or 0.0) + 0.4 * (seed - (num_seeds - 1) / 2),
                    "elbo_error": 0.1,
                    "degrees_of_freedom": 2.0,
                    "seconds_per_step": seconds.get(method, 0.002),
                    "training_seconds": 60.0,
                    "dropped": dropped.get(method, 0.0),
                    "batch_size": 256,
                }
                if method.startswith("semi-rvrs") and "gamma" not in method:
                    figures["shortfall"] = 0.5
                unit = Unit("hierarchical", dataset, method, seed)
                failure = "diverged" if elbo is None else None
                found.append(Result(unit, {} if failure else figures, failure, 1.0))
    return found


def test_a_lead_has_the_errors_of_both_methods_over_seeds():
    above = lead(results(), "pol", "semi-dais-8", BASE)
    assert above.mean == pytest.approx(25.0)
    # Two seeds 0.4 apart: a standard error of 0.2 for either method.
    assert above.error == pytest.approx(math.hypot(0.2, 0.2))
    assert lead(results({"oracle": 1.0, BASE: None}), "pol", ORACLE, BASE) is None


def test_the_error_of_an_elbo_is_not_below_that_of_its_estimation():
    alone = lead(results(num_seeds=1), "pol", "semi-dais-8", BASE)
    assert alone.error == pytest.approx(math.hypot(0.1, 0.1))
    same = [r._replace(figures=r.figures | {"elbo": 1.0}) for r in results(num_seeds=4)]
    # The mean of four has half the error of one.
    assert lead(same, "pol", ORACLE, BASE).error == pytest.approx(math.hypot(0.05, 0.05))


def test_a_fraction_is_that_of_the_gap_with_the_error_of_a_ratio():
    found = fraction(results(), "pol", "semi-dais-8")
    assert found.mean == pytest.approx(25.0)

    def ratio(own, base, best):
        return 100 * (own - base) / (best - base)

    step = 1e-4
    slopes = [
        (ratio(*(25.0 + step * (i == 0), step * (i == 1), 100.0 + step * (i == 2))) - 25.0) / step
        for i in range(3)
    ]
    assert found.error == pytest.approx(0.2 * math.hypot(*slopes), rel=1e-3)
    for missing in (BASE, ORACLE, "semi-dais-8"):
        assert fraction(results(ELBOS | {missing: None}), "pol", "semi-dais-8") is None
    assert fraction(results(ELBOS | {ORACLE: -1.0}), "pol", "semi-dais-8") is None


def test_claims_hold_for_results_like_the_papers():
    claims = EXPERIMENT.claims(results(datasets=("pol", "bike")))
    assert [claim.holds for claim in claims] == [True] * 6
    order, optimum, _, gamma, bias, speed = (claim.measured for claim in claims)
    assert order.startswith("bike, % of gap: semi-dais-8 25.0 ± 0.3, semi-dais-16 50.0 ± ")
    assert "; pol, % of gap: semi-dais-8 25.0" in order
    assert "pol: 81.0 ± 0.3, with the best proposals 81.5, optimum" in optimum
    assert optimum.endswith("81.9 ± 0.3")
    assert "pol, Z = 0.5: +16.0 ± 0.3 nats (97.0 ± 0.3 % of the gap, not 81.0 ± 0.3 %)" in gamma
    assert "pol, Z = 0.5, S' = 8 (96 % kept): -0.10 ± 0.28 nats" in bias
    assert "S' = 4 " not in bias
    assert "pol, Z = 0.5, S' = 4: 0.50 of the time" in speed
    assert "S' = 60" not in speed


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"elbos": {"semi-dais-16": 20.0}}, 0),
        ({"elbos": {"semi-dais-32": 82.0}}, 0),
        ({"elbos": {"optimum-0.5": 83.0}}, 1),
        ({"elbos": {"optimum-0.1": 99.3}}, 2),
        ({"elbos": {"semi-rvrs-0.1-gamma": 96.0}}, 3),
        ({"elbos": {"semi-rvrs-0.5-budget-8": 80.6}}, 4),
        ({"elbos": {"semi-rvrs-0.1-budget-60": 98.4}}, 4),
        ({"dropped": {"semi-rvrs-0.5-budget-4": 0.09}}, 4),
        ({"seconds": {"semi-rvrs-0.1-budget-40": 0.0081}}, 5),
    ],
)
def test_each_claim_fails_where_its_figures_say_so(changes, broken):
    found = results(
        ELBOS | changes.get("elbos", {}),
        dropped=DROPPED | changes.get("dropped", {}),
        seconds=SECONDS | changes.get("seconds", {}),
    )
    holds = [claim.holds for claim in EXPERIMENT.claims(found)]
    assert holds == [index != broken for index in range(6)]


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        ({"semi-dais-16"}, {0}),
        ({"optimum-0.5"}, {1}),
        ({"optimum-0.1"}, {2}),
        ({"semi-rvrs-0.5-gamma", "semi-rvrs-0.1-gamma"}, {3}),
        ({name for name in ELBOS if "budget" in name}, {4, 5}),
        ({BASE}, {0, 1, 2}),
        ({ORACLE}, {0, 1, 2}),
        (set(ELBOS), set(range(6))),
    ],
)
def test_without_their_results_claims_are_open(missing, unknown):
    claims = EXPERIMENT.claims(results(ELBOS | dict.fromkeys(missing)))
    assert [claim.holds for claim in claims] == [
        None if index in unknown else True for index in range(6)
    ]


def test_differences_within_two_standard_errors_leave_a_claim_open():
    # Errors of differences are 0.28 nats.
    close = ELBOS | {"semi-dais-32": 80.5, "semi-rvrs-0.1-gamma": 98.5}
    holds = [claim.holds for claim in EXPERIMENT.claims(results(close))]
    assert holds == [None, True, True, None, True, True]
    # One data set that says no is enough.
    other = results(ELBOS | {"semi-dais-16": 20.0}, datasets=("bike",))
    assert EXPERIMENT.claims([*results(close), *other])[0].holds is False


def test_tables_have_the_papers_figures_beside_ours():
    failed = results({"semi-dais-16": None}, datasets=("bike",), num_seeds=1)
    text = EXPERIMENT.tables([*results(), *failed])
    assert (
        "| semi-rvrs-0.5 | 2 | 81.0 ± 0.3 | 116.9 | 81.0 ± 0.3 | 81.7 | 2.00 ± 0.00 | 4.00 ± 0.00 "
        "| 0.5 ± 0.0 |"
    ) in text
    assert "| semi-rvrs-0.5-gamma | 2 | 97.0 ± 0.3 |  | 97.0 ± 0.3 |  |" in text
    assert "| oracle | 2 | 100.0 ± 0.3 | 143.1 |  |  |" in text
    assert "| mean-field | 2 |  |  |  |  | 2.00 ± 0.00 |" in text
    assert "| 0.5 | 8 | -0.10 ± 0.28 | 247.0 (96.5 %) | 0.50 |" in text
    assert "| 0.1 | 60 | 0.00 ± 0.28 | 252.4 (98.6 %) | 1.12 |" in text
    assert "Data set bike" not in text
    assert text.count("- bike, semi-dais-16, seed 0: diverged") == 1
    # All columns are filled, be it with nothing.
    for line in text.splitlines():
        if line.startswith(("| semi", "| oracle")):
            assert line.count("|") == 10


def test_methods_that_the_table_lacks_are_in_the_one_of_algorithm_3():
    rows = {*hierarchical_summary.TABLE}
    rows |= {
        budget_method(z, number) for z, all_ in hierarchical.BUDGETS.items() for number in all_
    }
    assert rows == set(METHODS)
    for gains in hierarchical_summary.PAPER_GAINS.values():
        assert list(gains) == [*ORDER, ORACLE]
        assert list(gains.values()) == sorted(gains.values())


ALL = ["hierarchical-gains.png", "hierarchical-budget.png", "hierarchical-times.png"]


@pytest.mark.parametrize(
    ("elbos", "names"),
    [
        ({}, []),
        ({BASE: None}, []),
        ({BASE: 0.0}, ALL[2:]),
        ({"semi-rvrs-0.5": 3.0, "semi-rvrs-0.5-budget-8": 2.0, BASE: None}, ALL[2:]),
        ({"optimum-1": 1.0}, []),
        ({BASE: 0.0, "semi-rvrs-0.5-budget-8": 2.0}, ALL[1:]),
        ({BASE: 0.0, ORACLE: 2.0}, [ALL[0], ALL[2]]),
        (ELBOS, ALL),
    ],
    ids=["nothing", "failed", "base", "no base", "optimum", "budget", "no budget", "all"],
)
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_whatever_is_there_is_shown(elbos, names, num_seeds, tmp_path):
    found = results(elbos, num_seeds=num_seeds)
    paths = EXPERIMENT.plot(found, tmp_path)
    assert [path.name for path in paths] == names
    assert all(path.stat().st_size > 10_000 for path in paths)
    text = EXPERIMENT.tables(found)
    assert text.count("diverged") == num_seeds * list(elbos.values()).count(None)
    assert ("beside Algorithm 2" in text) == any("budget" in name for name in elbos)
    assert len(EXPERIMENT.claims(found)) == 6


def test_times_are_those_of_bike_if_it_is_there():
    def title(datasets):
        figure = hierarchical_summary._plot_times(results(datasets=datasets))
        return figure.axes[0].get_title()

    assert title(("pol", "bike", "made-up")) == "bike"
    assert title(("made-up",)) == "made-up"


def test_the_figure_of_algorithm_3_has_its_gains_and_batch_sizes():
    figure = hierarchical_summary._plot_budgets(results(datasets=("bike", "pol")))
    titles = [axes.get_title() for axes in figure.axes[:4]]
    assert titles == ["bike, Z = 0.5", "pol, Z = 0.5", "bike, Z = 0.1", "pol, Z = 0.1"]
    panel = figure.axes[0]
    (budget, *_), exact = panel.containers[0], panel.lines[-1]
    np.testing.assert_allclose(budget.get_xydata(), [[4, 70.0], [8, 80.9]])
    assert exact.get_ydata() == pytest.approx([81.0, 81.0])
    sizes = next(axes for axes in figure.axes[4:] if axes.bbox.bounds == panel.bbox.bounds)
    assert sizes.lines[0].get_ydata() == pytest.approx([0.69 * 256, 0.965 * 256])


def test_presets_ask_for_what_the_experiment_knows():
    assert set(EXPERIMENT.presets) == {"quick", "cpu", "paper"}
    for preset in EXPERIMENT.presets.values():
        assert set(preset.datasets) <= set(EXPERIMENT.datasets)
        assert set(preset.methods) <= set(EXPERIMENT.methods)
        assert set(preset.settings) == set(SETTINGS)
        assert set(preset.settings["steps"]) == set(hierarchical.methods.KINDS)
        assert {BASE, ORACLE} < set(preset.methods)
        json.dumps(dict(preset.settings))
    assert EXPERIMENT.presets["quick"].datasets == ("made-up",)
    assert set(EXPERIMENT.presets["cpu"].methods) == set(METHODS)
