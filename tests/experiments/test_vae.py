import base64

import numpy as np
import pytest

from rvrs.experiments import runner, vae
from rvrs.experiments.experiment import Result, Unit

EXPERIMENT = vae.EXPERIMENT
BOUNDS = {
    "standard": -98.0,
    "iwae-10": -93.0,
    "iwae-20": -92.0,
    "iwae-10-warm": -92.9,
    "iwae-20-warm": -91.9,
    "uha-20": -90.0,
    "rvrs-0.1": -92.5,
    "rvrs-0.05": -91.5,
}
TIMES = {"iwae-10": 14.0, "iwae-20": 27.0, "uha-20": 80.0, "rvrs-0.1": 12.0, "rvrs-0.05": 20.0}
SAMPLES = base64.b64encode(np.arange(25 * 64, dtype=np.uint8).tobytes()).decode()


def result(method, seed=0, failure=None, dataset="mnist_binarized", **figures):
    unit = Unit("vae", dataset, method, seed)
    return Result(unit, {} if failure else figures, failure, 1.0)


def results(bounds=BOUNDS, times=TIMES, likelihoods=None, num_seeds=1, **options):
    likelihoods = {m: b + 2 for m, b in bounds.items()} | (likelihoods or {})
    found = [
        result(
            method,
            seed,
            train_bound=bound + 2,
            train_bound_error=0.01,
            test_bound=bound + 0.02 * seed,
            test_bound_error=0.01,
            log_likelihood=likelihoods[method],
            seconds_per_step=0.01,
            samples=SAMPLES,
            **options,
        )
        for method, bound in bounds.items()
        for seed in range(num_seeds)
    ]
    return [*found, result("step-times", milliseconds=times, **options)]


def test_claims_hold_for_results_like_the_paper_s():
    claims = EXPERIMENT.claims(results())
    assert len(claims) == 8
    assert all(claim.holds for claim in claims)
    assert "+0.50 ± 0.01 nats" in claims[0].measured


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"bounds": BOUNDS | {"rvrs-0.1": -93.5}}, [0, 1]),
        ({"bounds": BOUNDS | {"iwae-20-warm": -91.0}}, [4]),
        ({"times": TIMES | {"rvrs-0.05": 28.0}}, [5]),
        ({"times": TIMES | {"uha-20": 50.0}}, [6]),
        ({"likelihoods": {"standard": -80.0}}, [7]),
    ],
)
def test_each_claim_fails_where_its_figures_say_so(changes, broken):
    holds = [claim.holds for claim in EXPERIMENT.claims(results(**changes))]
    assert [index for index, held in enumerate(holds) if not held] == broken


def test_a_difference_within_its_error_tells_nothing():
    close = results(BOUNDS | {"rvrs-0.1": -93.01})
    assert EXPERIMENT.claims(close)[0].holds is None
    assert EXPERIMENT.claims([]) == []


def test_tables_have_the_paper_s_figures_beside_ours():
    text = EXPERIMENT.tables([*results(num_seeds=2), result("uha-10", failure="it fell")])
    assert "| rvrs-0.1 | 2 | 90.50 ± 0.00 | 92.49 ± 0.01 | 90.50 ± 0.00 | 12.00 | 87.58 |" in text
    assert "| iwae-10-warm | 2 |" in text
    assert "- mnist_binarized, uha-10, seed 0: it fell" in text
    other = EXPERIMENT.tables(results({"standard": -20.0}, {}, dataset="digits"))
    assert "| standard | 1 | 18.00 ± 0.01 | 20.00 ± 0.01 | 18.00 |  |  |  |  |" in other


def test_figures_show_bounds_and_samples(tmp_path):
    paths = EXPERIMENT.plot(results(), tmp_path)
    assert [path.name for path in paths] == [
        "vae-mnist_binarized.png",
        "vae-samples-mnist_binarized.png",
    ]
    assert all(path.stat().st_size > 10_000 for path in paths)
    only_times = [result("step-times", milliseconds=TIMES)]
    assert EXPERIMENT.plot(only_times, tmp_path) == []


def test_presets_ask_for_what_the_experiment_knows(tmp_path):
    plan = runner.plan("vae", "quick", out=tmp_path)
    assert [unit.method for unit in plan.first] == ["standard"]
    names = [set(preset.settings) for preset in EXPERIMENT.presets.values()]
    assert names[0] == names[1] == names[2]
    for preset in EXPERIMENT.presets.values():
        assert set(preset.methods) <= set(EXPERIMENT.methods)


def test_missing_images_are_told_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("RVRS_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RVRS_DATA_URL", raising=False)
    with pytest.raises(OSError, match="mnist_binarized"):
        runner.plan("vae", "cpu", out=tmp_path)
