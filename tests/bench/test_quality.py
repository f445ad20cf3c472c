"""Time to quality, on curves that are made up and on a small work."""

import math
import sys

import jax
import numpy as np
import pytest

from rvrs.bench import quality, works
from rvrs.bench.peers import Estimate
from rvrs.bench.quality import Gap, Result, best_of, judge
from rvrs.bench.snapshots import Curve, Snapshot

# Mean-field at -12, log evidence at -10: a share s is a bound of -12 + 2 s.
GAP = Gap.between(Estimate(-12.0, 1e-3), Estimate(-10.0, 1e-3))


def curve(shares, error=1e-6, noise=0.0):
    """One snapshot per second, with bounds of known shares."""
    calls = []

    def bound(key, parameters):
        calls.append(parameters)
        value = -12.0 + 2 * (parameters + noise * float(jax.random.normal(key)))
        return Estimate(value, 2 * error)

    snapshots = [Snapshot(float(i), f"step {i}", share) for i, share in enumerate(shares)]
    return Curve(snapshots, bound), calls


def test_a_level_is_reached_by_the_first_snapshot_at_or_above_it():
    found, calls = curve([-5.0, 0.5, 0.8001, 0.7, 0.96, 0.94, 0.985, 0.97])
    result = judge(found, GAP)
    assert result.seconds == (2.0, 4.0, 6.0)
    assert result.labels == ("step 2", "step 4", "step 6")
    assert result.final == pytest.approx(0.97)
    assert result.total_seconds == 7.0
    # Nothing is judged after the highest level but the last snapshot.
    assert calls == [-5.0, 0.5, 0.8001, 0.7, 0.96, 0.94, 0.985, 0.97]


def test_one_snapshot_may_reach_several_levels_and_later_ones_are_not_judged():
    found, calls = curve([0.1, 0.99, 0.5, 0.6])
    assert judge(found, GAP).seconds == (1.0, 1.0, 1.0)
    assert calls == [0.1, 0.99, 0.6]


def test_a_level_that_is_never_reached_has_no_time():
    result = judge(curve([0.0, 0.81, 0.9])[0], GAP)
    assert result.seconds == (1.0, None, None)
    assert result.labels == ("step 1", None, None)


def test_a_bound_that_is_not_a_number_reaches_nothing():
    result = judge(curve([math.nan, 0.9, math.nan])[0], GAP)
    assert result.seconds == (1.0, None, None)
    assert math.isnan(result.final)


def test_noisy_bounds_are_averaged_until_they_are_clear_of_the_levels():
    # Far from all levels one estimate is enough; close to one, and at the end, it takes 25 of
    # them to get from a standard error of 0.02 to one of 0.004.
    found, calls = curve([0.2, 0.81, 0.5], error=0.02, noise=0.02)
    result = judge(found, GAP)
    counts = [calls.count(share) for share in (0.2, 0.81, 0.5)]
    assert counts[0] == 1
    assert 2 <= counts[1] <= 25
    assert counts[2] == 26
    assert result.seconds[0] == 1.0
    assert abs(result.final - 0.5) < 4 * 0.004


def test_the_best_of_several_is_the_best_at_every_level():
    slow = Result((5.0, 6.0, 7.0), ("a", "b", "c"), 0.99, 10.0)
    fast = Result((1.0, None, None), ("d", None, None), 0.9, 3.0)
    failed = Result((None, None, None), (None, None, None), math.nan, 1.0)
    assert best_of([failed, slow, fast]) == Result((1.0, 6.0, 7.0), ("d", "b", "c"), 0.99, 10.0)
    assert best_of([failed, failed]).seconds == (None, None, None)


def test_a_ratio_needs_both_times():
    ours = Result((2.0, 4.0, None), ("a", "b", None), 0.97, 10.0)
    theirs = Result((1.0, None, 3.0), ("a", None, "b"), 0.97, 10.0)
    ratios = quality._ratios(theirs, ours)
    assert ratios == {"80 %": 0.5, "95 %": None, "98 %": None}


def test_a_gap_that_is_within_its_errors_is_refused():
    with pytest.raises(ValueError, match="there is no gap to close"):
        Gap.between(Estimate(-10.0, 0.1), Estimate(-9.5, 0.1))
    with pytest.raises(ValueError, match="there is no gap to close"):
        Gap.between(Estimate(-10.0, 0.1), Estimate(math.nan, math.nan))


@pytest.mark.slow
def test_rvrs_closes_a_gap_that_mean_field_leaves_and_that_a_normal_closes_in_part():
    effort = quality._QUICK._replace(peers=("AutoDiagonalNormal", "AutoMultivariateNormal"))
    texts = []
    rows = quality.measure_work(works.made_up_logistic(40, 5), effort, texts.append)
    figures = {row.contestant: row.figures for row in rows}
    assert list(figures) == [
        *("log evidence", "mean-field ELBO", "RVRS mvn 0.1", "best of RVRS"),
        *("AutoDiagonalNormal", "AutoMultivariateNormal", "best of peers"),
        "best of peers / default",
    ]
    evidence, mean_field = figures["log evidence"], figures["mean-field ELBO"]
    assert evidence["error"] < 0.02 * (evidence["nats"] - mean_field["nats"])
    default, normal = figures["RVRS mvn 0.1"], figures["AutoMultivariateNormal"]
    assert abs(figures["AutoDiagonalNormal"]["end %"]) < 15
    assert figures["AutoDiagonalNormal"]["80 %"] is None
    assert 97 < default["end %"] < 103
    assert 60 < normal["end %"] < default["end %"]
    assert mean_field["nats"] < normal["nats"] < default["nats"]
    assert 0 < default["80 %"] <= default["95 %"] <= default["98 %"] < default["total s"]
    assert texts


def test_without_blackjax_the_suite_says_so_before_any_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    monkeypatch.setattr(quality, "measure_work", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(ImportError, match=r"rvrs\[bench\]"):
        quality.measure(quick=True, progress=lambda _: None)


def test_the_notes_tell_what_was_tried(monkeypatch):
    monkeypatch.setattr(quality, "measure_work", lambda *_: [])
    suite = quality.measure(quick=True, progress=lambda _: None)
    assert suite.name == quality.NAME == "quality"
    assert "RVRS mvn 0.1" in suite.notes
    assert "{" not in suite.notes
    assert np.all(np.diff(quality.LEVELS) > 0)
