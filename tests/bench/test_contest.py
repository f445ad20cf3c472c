import pytest

from rvrs.bench import contest
from rvrs.bench.contest import Entry


def test_steps_are_compared_whatever_their_number(monkeypatch):
    times = {"RVRS": [4.0, 8.0], "bare": [1.0, 2.0], "peer": [1.0, 4.0]}
    monkeypatch.setattr(contest, "interleaved", lambda contestants, repeats: times)
    entries = {
        "RVRS": Entry(lambda _: None, 4, {"over bare": "bare", "over peer": "peer"}, 19, 2),
        "bare": Entry(lambda _: None, 2, {}),
        "peer": Entry(lambda _: None, 1, {"over bare": "bare"}),
    }
    rows = contest.contest("work", entries, repeats=2)
    assert [(row.work, row.contestant) for row in rows] == [
        ("work", "RVRS"),
        ("work", "bare"),
        ("work", "peer"),
    ]
    assert rows[0].figures == {
        "over bare": 2.0,
        "lower quartile": 2.0,
        "upper quartile": 2.0,
        "over peer": pytest.approx((1.0 + 0.5) / 2),
        "proposals per step": 19,
        "proposals per draw": 9.5,
        "µs per step": 1.5e6,
    }
    assert rows[1].figures == {
        "proposals per step": None,
        "proposals per draw": None,
        "µs per step": 0.75e6,
    }
    assert rows[2].figures["over bare"] == pytest.approx((2.0 + 4.0) / 2)
