import pytest

from rvrs.bench import logistic, sampling, works
from rvrs.bench.report import Row
from rvrs.bench.sampling import _Found, _rows


def test_effective_draws_per_second_are_compared_with_the_better_nuts():
    times = {"RVRS": [0.5, 0.5, 1.0], "few": [1.0, 1.0, 2.0], "many": [4.0, 4.0, 8.0]}
    found = {
        "RVRS": _Found(1000, 1000, 3.0),
        "few": _Found(200, 100, 0.5),
        "many": _Found(2000, 800, 2.0),
    }
    rows = {row.contestant: row.figures for row in _rows("work", times, found, 0.9)}
    assert rows["RVRS"]["draws / s"] == rows["RVRS"]["effective / s"] == 2000
    assert rows["few"]["effective / s"] == 100
    assert rows["many"]["draws / s"] == 500
    assert rows["many"]["effective / s"] == 200
    assert rows["RVRS"]["/ best NUTS"] == pytest.approx(10)
    assert rows["RVRS"]["weighted / best NUTS"] == pytest.approx(9)
    assert rows["few"]["/ best NUTS"] == pytest.approx(0.5)
    assert rows["many"]["/ best NUTS"] == 1
    assert rows["many"]["weighted"] is None
    assert rows["RVRS"]["s to 10,000 effective"] == pytest.approx(8)
    assert rows["many"]["s to 10,000 effective"] == pytest.approx(52)


@pytest.mark.slow
def test_a_fit_and_nuts_draw_in_turns():
    effort = sampling._QUICK._replace(num_steps=200, num_draws=2000, repeats=1)
    rows = sampling.measure_work(works.made_up_logistic(20, 3), effort, lambda _: None)
    assert [row.contestant for row in rows] == ["RVRS", "NUTS, 4 chains"]
    ours, nuts = (row.figures for row in rows)
    assert 0.9 < ours["weighted"] <= 1.0
    assert 0 < nuts["effective / s"] < 2 * nuts["draws / s"]
    assert ours["/ best NUTS"] > 0
    assert all(figures["ready s"] > 0 for figures in (ours, nuts))


@pytest.mark.parametrize("missing", [(), ("bank", "thyroid")])
def test_data_sets_that_are_not_there_are_left_out_and_named(monkeypatch, missing):
    def load(name):
        if name in missing:
            raise FileNotFoundError(name)
        return works.made_up_logistic(2, 2)._replace(name=name)

    monkeypatch.setattr(works, "logistic", load)
    rows, text = logistic.measure_each(lambda work: [Row(work.name, "x", {})], quick=False)
    assert [row.work for row in rows] == [n for n in works.LOGISTIC if n not in missing]
    assert all(name in text for name in missing)
    assert bool(text) == bool(missing)


def test_no_data_set_at_all_is_an_error(monkeypatch):
    def load(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(works, "logistic", load)
    with pytest.raises(FileNotFoundError):
        logistic.measure_each(lambda work: [], quick=False)
    assert logistic.measure_each(lambda work: [Row(work.name, "x", {})], quick=True)[0]
