"""Checkpoints of several processes: whose file is whose, and from which steps all can go on."""

import numpy as np
import pytest

from rvrs import processes, storage
from rvrs.storage import Checkpoint
from tests import several


def checkpoint(steps, mark=0.0):
    """As of a run that has taken so many steps; a file says no more than it holds."""
    return Checkpoint({"steps_done": steps}, {"history": np.full(steps, mark)})


def store(monkeypatch, path, series):
    """Every process stores its own series of numbers of steps, one after the other."""

    def run(number):
        for steps in series[number]:
            processes.write(path, checkpoint(steps, number))

    assert several.processes(monkeypatch, len(series), run) == [None] * len(series)


def read(monkeypatch, path, count):
    return several.processes(monkeypatch, count, lambda _: processes.read(path))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["fit.npz", "fit", "a.b.npz", "best-of-3.npz"])
def test_every_process_has_a_file_of_its_own_beside_the_path(monkeypatch, tmp_path, name):
    path = tmp_path / name
    found = several.processes(monkeypatch, 3, lambda _: processes.own_file(path))
    stem, suffix = path.stem, path.suffix
    assert found == [tmp_path / f"{stem}.process-{number}-of-3{suffix}" for number in range(3)]


def test_a_single_process_has_the_path_itself_and_no_file_before_it(tmp_path):
    path = tmp_path / "fit.npz"
    assert processes.own_file(path) == path
    for steps in (1, 2):
        processes.write(path, checkpoint(steps))
    assert names(tmp_path) == ["fit.npz"]
    assert processes.read(path).header["steps_done"] == 2


def test_the_file_before_the_latest_one_is_kept_and_no_other(monkeypatch, tmp_path):
    path = tmp_path / "fit.npz"
    store(monkeypatch, path, [(500,), (500, 1000, 1500)])
    assert names(tmp_path) == [
        "fit.process-0-of-2.npz",
        "fit.process-1-of-2.npz",
        "fit.process-1-of-2.previous.npz",
    ]
    kept = [
        storage.read(tmp_path / f"fit.process-1-of-2{part}.npz").header["steps_done"]
        for part in (".previous", "")
    ]
    assert kept == [1000, 1500]


@pytest.mark.parametrize(
    ("series", "wanted"),
    [
        ([(500,), (500,)], 500),
        ([(500, 1000), (500, 1000)], 1000),
        # One was killed after the other one had stored the latest steps.
        ([(500, 1000), (500,)], 500),
        ([(500, 1000), (500, 1000, 1500)], 1000),
        ([(500, 1000, 1500), (500, 1000, 1500), (500, 1000)], 1000),
        # After it had put its latest file aside, before it had stored the next.
        ([(500, 1000), (500, 1000, None)], 1000),
    ],
)
def test_processes_go_on_from_the_latest_steps_that_all_have_stored(
    monkeypatch, tmp_path, series, wanted
):
    path = tmp_path / "fit.npz"
    store(monkeypatch, path, [[steps for steps in own if steps] for own in series])
    for number, own in enumerate(series):
        if None in own:
            file = tmp_path / f"fit.process-{number}-of-{len(series)}.npz"
            file.replace(file.with_name(f"{file.stem}.previous.npz"))
    for number, found in enumerate(read(monkeypatch, path, len(series))):
        assert found.header["steps_done"] == wanted
        # Each with its own part.
        np.testing.assert_array_equal(found.arrays["history"], np.full(wanted, float(number)))


def test_of_two_files_of_the_same_step_the_latest_counts(monkeypatch, tmp_path):
    # The other one is what an earlier run has stored there.
    path = tmp_path / "fit.npz"

    def run(number):
        for mark in (1.0, 2.0):
            processes.write(path, checkpoint(3, mark))

    several.processes(monkeypatch, 2, run)
    for found in read(monkeypatch, path, 2):
        np.testing.assert_array_equal(found.arrays["history"], [2.0] * 3)


@pytest.mark.parametrize(
    ("series", "steps"),
    [
        ([(1, 2), (3, 4)], "[[1, 2], [3, 4]]"),
        ([(1,), (2,)], "[[1, -1], [2, -1]]"),
        # One was killed before it had stored anything.
        ([(5,), ()], "[[5, -1], [-1, -1]]"),
        ([(), ()], "[[-1, -1], [-1, -1]]"),
    ],
)
def test_without_steps_that_all_have_stored_every_process_says_so(
    monkeypatch, tmp_path, series, steps
):
    path = tmp_path / "fit.npz"
    store(monkeypatch, path, series)
    assert [(type(error), str(error)) for error in read(monkeypatch, path, 2)] == [
        (
            ValueError,
            f"resume: the processes have no files of the same step beside {path} (steps of each: "
            f"{steps}); pass the files that one run has stored.",
        )
    ] * 2


@pytest.mark.parametrize("name", ["fit.npz", "best-of-3.npz", "fit[1].npz"])
@pytest.mark.parametrize(("stored", "now"), [(2, 1), (1, 2), (3, 2), (2, 3)])
def test_a_run_of_another_number_of_processes_is_refused(monkeypatch, tmp_path, name, stored, now):
    path = tmp_path / name
    store(monkeypatch, path, [(1, 2)] * stored)
    errors = read(monkeypatch, path, now)
    # None has a file of its own, so that none waits for the others.
    assert [(type(error), str(error)) for error in errors] == [
        (
            ValueError,
            f"resume: {path} was stored by {stored} process(es), but this run has {now}; start as "
            "many as then, with as many devices.",
        )
    ] * now


def test_a_fit_of_one_process_and_one_of_two_may_have_the_same_path(monkeypatch, tmp_path):
    path = tmp_path / "fit.npz"
    processes.write(path, checkpoint(7, 9.0))
    store(monkeypatch, path, [(500,), (500,)])
    assert [found.header["steps_done"] for found in read(monkeypatch, path, 2)] == [500, 500]
    assert processes.read(path).header["steps_done"] == 7


def test_a_file_that_there_is_not_is_told_by_its_path(tmp_path):
    path = tmp_path / "fit.npz"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*fit\.npz; check the path"):
        processes.read(path)
