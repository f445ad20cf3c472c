"""A soak: what has grown is told from what only goes up and down."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rvrs.bench import soak
from rvrs.bench.soak import Round

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/statm").is_file(), reason="the figures come from /proc"
)


def rounds(count=100, **changed):
    """Rounds that hold the same, but for what is given for each of them."""
    usual = {"megabytes": 1000.0, "programs": 3, "open_files": 40, "threads": 9, "seconds": 2.0}
    series = {name: np.broadcast_to(changed.get(name, usual[name]), count) for name in usual}
    return [Round(*[series[name][number].item() for name in usual]) for number in range(count)]


def at_the_end(before, after, count=100):
    """A change in the last quarter of what follows after the warm-up."""
    return np.where(np.arange(count) < count - 20, before, after)


def test_rounds_that_hold_the_same_have_no_problems():
    assert soak.problems(rounds()) == []
    assert soak.problems(rounds(2), warm_up=1) == []


def test_memory_that_grows_is_said():
    assert soak.problems(rounds(megabytes=at_the_end(1000.0, 1051.0))) == [
        "memory grew from 1000 to 1051 MB"
    ]
    assert soak.problems(rounds(megabytes=at_the_end(1000.0, 1050.0))) == []
    # A little with every round: medians of the first and the last 20 of 80.
    assert soak.problems(rounds(megabytes=1000.0 + np.arange(100))) == [
        "memory grew from 1030 to 1090 MB"
    ]


def test_programs_that_are_compiled_anew_are_said():
    assert soak.problems(rounds(programs=at_the_end(3, 4))) == [
        "programs per round grew from 3 to 4"
    ]
    assert soak.problems(rounds(programs=at_the_end(0, 1))) == [
        "programs per round grew from 0 to 1"
    ]


def test_files_that_stay_open_are_said():
    assert soak.problems(rounds(open_files=np.arange(100))) == ["open files grew from 39 to 99"]


def test_everything_that_has_grown_is_said():
    found = soak.problems(
        rounds(
            megabytes=at_the_end(500.0, 600.0),
            programs=at_the_end(1, 2),
            open_files=at_the_end(5, 6),
        )
    )
    assert found == [
        "memory grew from 500 to 600 MB",
        "programs per round grew from 1 to 2",
        "open files grew from 5 to 6",
    ]


def test_what_goes_up_and_down_is_no_growth():
    random = np.random.default_rng(0)
    assert soak.problems(rounds(megabytes=random.normal(1000, 50, 100))) == []
    turns = np.arange(100) % 5
    assert soak.problems(rounds(programs=turns, open_files=40 + turns, threads=turns)) == []
    # Nor are a few rounds of the last quarter that held much more.
    sudden = np.where(np.arange(100) % 10 == 9, 5000.0, 1000.0)
    assert soak.problems(rounds(megabytes=sudden)) == []
    # Nor is what has become less.
    assert (
        soak.problems(rounds(megabytes=at_the_end(1000.0, 500.0), programs=at_the_end(9, 0))) == []
    )


def test_what_grows_until_caches_are_full_does_not_count():
    early = np.minimum(np.arange(40), 20)
    grown = rounds(40, megabytes=100.0 + early, programs=early, open_files=early)
    assert soak.problems(grown) == []
    assert len(soak.problems(grown, warm_up=0)) == 3


def test_a_summary_has_medians_of_the_first_and_the_last_quarter():
    series = np.arange(100)
    found = soak.summary(rounds(megabytes=series, seconds=0.5 * series, open_files=series))
    # Of rounds 20 to 39 and 80 to 99.
    first, last = found["first_quarter"], found["last_quarter"]
    assert (first["megabytes"], last["megabytes"]) == (29.5, 89.5)
    assert (first["seconds"], last["seconds"]) == (14.75, 44.75)
    assert (first["threads"], last["programs"]) == (9.0, 3.0)
    assert (found["rounds"], found["seconds"]) == (100, 0.5 * 99 * 100 / 2)
    assert found["problems"] == soak.problems(rounds(megabytes=series, open_files=series))
    assert json.loads(json.dumps(found)) == found


def test_the_shortest_soak_has_a_summary():
    found = soak.summary(rounds(soak._WARM_UP + 2, megabytes=np.r_[np.zeros(20), 100.0, 200.0]))
    assert found["first_quarter"]["megabytes"] == 100
    assert found["problems"] == ["memory grew from 100 to 200 MB"]


@needs_linux
def test_open_files_are_those_of_this_process(tmp_path):
    before = soak.measure(0, 0.0)
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        during = soak.measure(7, 1.5)
    assert during.open_files == before.open_files + 2
    assert soak.measure(0, 0.0).open_files == before.open_files
    assert (during.programs, during.seconds) == (7, 1.5)
    assert during.threads >= 1


@needs_linux
def test_resident_memory_is_that_of_this_process():
    before = soak.measure(0, 0.0).megabytes
    ballast = np.ones(25_000_000)
    # Other memory may come and go.
    assert 190 < soak.measure(0, 0.0).megabytes - before < 300
    assert ballast.nbytes == 200_000_000


@needs_linux
def test_rounds_go_on_until_the_time_is_over_and_all_jobs_are_in_each(monkeypatch):
    called, lines = [], []

    def job(name):
        def run(number, folder):
            assert folder.is_dir()
            called.append((name, number, folder))

        return run

    found = soak.run(0.0, {"a": job("a"), "b": job("b")}, report=lines.append, least_rounds=3)
    assert [(name, number) for name, number, _ in called] == [
        (name, number) for number in range(3) for name in "ab"
    ]
    # One folder for all of them, which is gone in the end.
    assert len({folder for *_, folder in called}) == 1
    assert not called[0][2].exists()
    assert len(found) == len(lines) == 3
    assert [one.programs for one in found] == [0, 0, 0]
    # A clock that moves on by a second whenever it is looked at: four times in a round.
    clock = SimpleNamespace(perf_counter=map(float, itertools.count()).__next__)
    monkeypatch.setattr(soak, "time", clock)
    longer = soak.run(10.0, {"a": job("a")}, report=lines.append, least_rounds=1)
    assert [one.seconds for one in longer] == [1.0] * 3


@needs_linux
def test_a_round_of_a_real_job_is_measured():
    (found,) = soak.run(0.0, {"vae": soak.jobs()["vae"]}, report=lambda _: None, least_rounds=1)
    assert found.programs > 0
    assert found.seconds > 0
    # A process with JAX in it, in millions of bytes.
    assert 50 < found.megabytes < 1e5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes must be above 0."),
        (["--minutes", "-1"], "--minutes must be above 0."),
        (["--minutes", "nan"], "--minutes must be above 0."),
        (["--minutes", "long"], "argument --minutes: invalid float value: 'long'"),
        (["--out", "{folder}/no/soak.json"], "--out {folder}/no/soak.json: the folder does not"),
        (["--out", "{folder}"], "--out {folder}: this is a folder; name a file in it."),
        (["--jobs", "3"], "unrecognized arguments: --jobs 3"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    monkeypatch, capsys, tmp_path, arguments, message
):
    monkeypatch.setattr(soak, "run", None)
    with pytest.raises(SystemExit) as info:
        soak.main([argument.format(folder=tmp_path) for argument in arguments])
    assert info.value.code == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


@needs_linux
def test_figures_are_printed_and_stored(monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(soak, "jobs", dict)
    monkeypatch.setattr(soak, "run", lambda *args: asked.append(args) or rounds())
    path = tmp_path / "soak.json"
    soak.main(["--minutes", "2.5", "--out", str(path)])
    assert asked == [(150.0, {})]
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text()) == soak.summary(rounds())


@needs_linux
def test_the_command_ends_in_an_error_where_something_has_grown(monkeypatch, tmp_path):
    grown = rounds(megabytes=at_the_end(1000.0, 2000.0), open_files=at_the_end(1, 2))
    monkeypatch.setattr(soak, "run", lambda *_: grown)
    path = tmp_path / "soak.json"
    with pytest.raises(SystemExit) as info:
        soak.main(["--out", str(path)])
    assert info.value.code == (
        "soak: memory grew from 1000 to 2000 MB; open files grew from 1 to 2."
    )
    # The figures are there all the same.
    assert len(json.loads(path.read_text())["problems"]) == 2
