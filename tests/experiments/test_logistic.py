import math

import jax
import numpy as np
import pytest

from rvrs import baselines
from rvrs.baselines import Fitted
from rvrs.experiments import logistic, logistic_model, runner
from rvrs.experiments.experiment import Result, Unit

EXPERIMENT = logistic.EXPERIMENT
SETTINGS = {
    "steps": 30,
    "paper_steps": 90,
    "evaluation_draws": 50,
    "projections": 20,
    "nuts_draws": 400,
    "nuts_warmup": 7,
    "nuts_thinning": 2,
    "wasserstein_draws": 100,
}


@pytest.fixture
def asked(monkeypatch):
    """What methods were asked for, by a fit that only draws standard normals."""
    calls = []

    def fit(rng_key, method, task, **options):
        calls.append((method, options))
        bounded = not method.startswith("nuts")

        def draw(rng_key, num_samples):
            return {logistic_model.SITE: jax.random.normal(rng_key, (num_samples, 3))}

        return Fitted(
            method=method,
            elbo=-50.0 if bounded else None,
            elbo_error=0.01 if bounded else None,
            seconds_per_step=1e-5,
            params={},
            losses=np.zeros(0),
            details={"khat": 0.5},
            draw=draw,
        )

    monkeypatch.setattr(baselines, "fit", fit)
    return calls


def run(method, arrays=None):
    unit = Unit("logistic", "breast_cancer", method, 0)
    return EXPERIMENT.run(unit, SETTINGS, arrays or {}, lambda _share, _words: None)


@pytest.mark.parametrize(
    ("method", "steps"),
    [("mf", 30), ("rvrs-0.1@paper", 90), ("flow", 10), ("flow@paper", 30), ("nuts", 400)],
)
def test_every_method_has_its_number_of_steps(asked, method, steps):
    run(method)
    (name, options), *_ = asked
    assert name == method
    assert options["num_steps"] == steps
    assert options["num_evaluation_draws"] == 50
    assert options["thinning"] == 2
    assert options["num_warmup"] == 7


@pytest.mark.usefixtures("asked")
def test_nuts_leaves_draws_that_others_are_compared_with():
    reference = run("nuts")
    assert reference.arrays["draws"].shape == (100, 3)
    assert "elbo" not in reference.figures
    close = run("rvrs-0.1", reference.arrays)
    far = run("rvrs-0.1", {"draws": reference.arrays["draws"] + np.array([2.0, 0.0, 0.0])})
    assert close.figures["elbo"] == -50.0
    assert close.figures["khat"] == 0.5
    # Two sets of draws of one distribution are some way apart, a shift by 2 about 2.
    assert close.figures["wasserstein"] < 3 * reference.figures["wasserstein"] < 1.5
    assert far.figures["wasserstein"] == pytest.approx(2, rel=0.2)
    for method in ("iwae-8", "flow"):
        assert "wasserstein" not in run(method, reference.arrays).figures
    assert "wasserstein" not in run("rvrs-0.1").figures


def test_the_model_is_a_regression_on_the_same_rows_for_all():
    first, second = (logistic_model.load("breast_cancer", num_rows=100) for _ in range(2))
    np.testing.assert_array_equal(first.covariates, second.covariates)
    assert first.covariates.shape[0] == logistic.NUM_ROWS


def result(dataset, method, seed=0, failure=None, **figures):
    figures = {"elbo_error": 0.001, "seconds_per_step": 3e-5} | figures
    unit = Unit("logistic", dataset, method, seed)
    return Result(unit, {} if failure else figures, failure, 1.0)


def results(elbos, distances=None, num_seeds=2):
    """Of ``{method: elbo}`` and ``{method: distance}`` on two data sets."""
    found = []
    for dataset in ("adult", "bank"):
        for method, elbo in elbos.items():
            for seed in range(num_seeds):
                figures = {"elbo": elbo + 0.001 * seed}
                if method in (distances or {}):
                    distance = distances[method] + 0.001 * seed
                    figures |= {"wasserstein": distance, "wasserstein_sd": 0.001}
                found.append(result(dataset, method, seed, **figures))
    return found


ELBOS = {
    "mf": -45.0,
    "flow": -44.2,
    "iwae-24": -44.0,
    "uha-24": -44.1,
    "uha-8": -44.3,
    "rvrs-0.3": -44.2,
    "rvrs-0.1": -43.9,
}
DISTANCES = {"uha-8": 0.1, "uha-24": 0.05, "rvrs-0.3": 0.09, "rvrs-0.1": 0.04}


def test_a_gain_is_over_mean_field_with_the_errors_of_both():
    gain = logistic.gain(results(ELBOS), "adult", "rvrs-0.1")
    assert gain.mean == pytest.approx(1.1)
    # Two seeds 0.001 apart: a standard error of 0.0005 for either method.
    assert gain.error == pytest.approx(math.hypot(0.0005, 0.0005))
    alone = logistic.gain(results(ELBOS, num_seeds=1), "adult", "rvrs-0.1")
    assert alone.error == pytest.approx(math.hypot(0.001, 0.001))
    assert logistic.gain(results({"rvrs-0.1": -43.0}), "adult", "rvrs-0.1") is None


def test_the_paper_s_way_is_compared_with_its_own_mean_field():
    found = results({"mf": -45.0, "mf@paper": -46.0, "rvrs-0.1@paper": -44.0})
    assert logistic.gain(found, "adult", "rvrs-0.1@paper").mean == pytest.approx(2.0)


def test_claims_hold_for_results_like_the_paper_s():
    claims = EXPERIMENT.claims(results(ELBOS, DISTANCES))
    assert [claim.holds for claim in claims] == [True] * 5
    assert claims[0].measured.startswith("2 of 2: adult +0.100 ± 0.001")


@pytest.mark.parametrize(
    ("elbos", "distances", "broken"),
    [
        ({"iwae-24": -43.8}, {}, 0),
        ({"flow": -43.8}, {}, 1),
        ({"uha-24": -43.8}, {}, 2),
        ({}, {"uha-24": 0.03}, 3),
        ({}, {"uha-8": 0.05}, 4),
    ],
)
def test_each_claim_fails_where_its_figures_say_so(elbos, distances, broken):
    claims = EXPERIMENT.claims(results(ELBOS | elbos, DISTANCES | distances))
    assert [claim.holds for claim in claims] == [index != broken for index in range(5)]


def test_differences_within_two_standard_errors_are_chance():
    close = ELBOS | {"iwae-24": -43.899}
    assert EXPERIMENT.claims(results(close, DISTANCES))[0].holds
    assert EXPERIMENT.claims([])[0].holds is None


def test_one_data_set_may_go_to_the_flow():
    found = results(ELBOS, DISTANCES)
    better = [result("adult", "flow", seed, elbo=-43.0) for seed in range(2)]
    found = [r for r in found if r.unit[1:3] != ("adult", "flow")] + better
    assert EXPERIMENT.claims(found)[1].holds


def test_figures_and_tables_show_what_there_is(tmp_path):
    found = [*results(ELBOS, DISTANCES), result("bank", "mvn", failure="it fell")]
    paths = EXPERIMENT.plot(found, tmp_path)
    assert [path.name for path in paths] == [
        "logistic-gains.png",
        "logistic-times.png",
        "logistic-wasserstein.png",
    ]
    assert all(path.stat().st_size > 10_000 for path in paths)
    text = EXPERIMENT.tables(found)
    assert "| rvrs-0.1 | 1.100 ± 0.001 | 1.100 ± 0.001 |" in text
    assert "| rvrs-0.1 | 30 | 30 |" in text
    assert "| uha-24 | 0.051 ± 0.001 | 0.051 ± 0.001 |" in text
    assert "- bank, mvn, seed 0: it fell" in text
    # Without distances there is no figure of them.
    assert len(EXPERIMENT.plot(results(ELBOS), tmp_path)) == 2
    assert EXPERIMENT.plot([], tmp_path) == []


def test_the_quick_preset_needs_no_file_of_data(tmp_path):
    plan = runner.plan("logistic", "quick", out=tmp_path)
    assert [unit.method for unit in plan.first] == ["nuts"]
    for preset in EXPERIMENT.presets.values():
        assert set(preset.methods) <= set(EXPERIMENT.methods)
        assert set(preset.datasets) <= set(EXPERIMENT.datasets)
        assert set(preset.settings) == set(SETTINGS)
