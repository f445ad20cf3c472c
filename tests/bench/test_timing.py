import jax
import numpy as np
import pytest

from rvrs.bench import timing


def contestants(log):
    def contestant(name):
        return lambda key: log.append((name, int(jax.random.key_data(key)[1])))

    return {name: contestant(name) for name in "abc"}


def test_the_turn_that_compiles_is_left_out():
    log = []
    times = timing.interleaved(contestants(log), repeats=2)
    assert {name: len(record) for name, record in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert len(log) == 3 * 3


def test_contestants_take_turns_that_begin_with_another_one_each():
    log = []
    timing.interleaved(contestants(log), repeats=2)
    assert "".join(name for name, _ in log) == "abc" + "bca" + "cab"


def test_all_contestants_of_a_turn_have_the_same_key_and_every_turn_another():
    log = []
    timing.interleaved(contestants(log), repeats=2)
    assert [turn for _, turn in log] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_time_is_that_of_the_result_not_of_its_dispatch(monkeypatch):
    now = 0.0

    def blocked(result):
        nonlocal now
        now += result
        return result

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(jax, "block_until_ready", blocked)
    times = timing.interleaved({"slow": lambda _: 3.0, "fast": lambda _: 1.0}, repeats=1)
    assert times == {"slow": [3.0], "fast": [1.0]}


def test_the_ratio_is_the_median_of_the_turns_own_ratios():
    # Whatever slows down a whole turn does not count.
    times, reference = np.array([[2.0, 1.0], [60.0, 20.0], [4.0, 1.0], [5.0, 1.0], [1.0, 1.0]]).T
    assert timing.median_ratio(times.tolist(), reference.tolist()) == timing.Ratio(3.0, 2.0, 4.0)


@pytest.mark.parametrize(("times", "reference"), [([], []), ([1.0, 2.0], [1.0])])
def test_a_ratio_needs_times_of_the_same_turns(times, reference):
    with pytest.raises(ValueError, match="the same turns"):
        timing.median_ratio(times, reference)


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="repeats"):
        timing.interleaved({}, repeats=0)
