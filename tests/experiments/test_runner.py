import json
import multiprocessing
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rvrs import files
from rvrs.experiments import catalogue, runner, workers
from rvrs.experiments.experiment import Unit
from rvrs.experiments.runner import Observer
from rvrs.experiments.store import Store
from tests.experiments import toy

ROOT = Path(__file__).parents[2]


class Recorder(Observer):
    """Notes what it is told, and what was stored at that time."""

    def __init__(self, out):
        self.out = out
        self.units, self.reports, self.results = [], [], []

    def planned(self, plan):
        self.plan = plan

    def started(self, unit):
        self.units.append(unit)

    def advanced(self, unit, share, words):
        self.reports.append((unit, share, words))

    def ended(self, result):
        assert Store(self.out).has(result.unit)
        self.results.append(result)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the toy; ``run.out`` is where to, and ``run.trouble`` a file that makes trouble."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setitem(catalogue.NAMES, "toy", "tests.experiments.toy:EXPERIMENT")
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path / "trouble"))

    def run(preset="quick", *, out=tmp_path / "out", progress=None, **options):
        run.seen = Recorder(out) if progress is None else progress
        return runner.run("toy", preset, out=out, progress=run.seen, **options)

    run.out, run.trouble = tmp_path / "out", tmp_path / "trouble"
    return run


def figures(out):
    return {result.unit: result.figures for result in Store(out).load("toy")}


def test_every_unit_of_the_preset_is_stored(run):
    summary = run()
    assert summary == ("toy", 8, 0, [])
    # The reference's arrays are 0, 1, 2 plus the length of the data set's name.
    assert figures(run.out) == {
        **{Unit("toy", d, "truth", k): {"value": 1.0} for d in ("one", "three") for k in (0, 1)},
        **{
            Unit("toy", dataset, "plain", k): {"value": total + 0.5 * k, "words": "plain"}
            for dataset, total in (("one", 12.0), ("three", 18.0))
            for k in (0, 1)
        },
    }


def test_a_second_call_computes_nothing(run):
    run()
    before = times_of_files(run.out)
    assert run() == ("toy", 0, 8, [])
    assert run.seen.units == []
    assert times_of_files(run.out) == before


def times_of_files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_what_is_asked_for_in_addition_is_added(run):
    run()
    assert run(num_seeds=3, datasets=["one"]) == ("toy", 2, 4, [])
    assert [unit.seed for unit in run.seen.units] == [2, 2]


def test_only_what_is_asked_for_runs(run):
    assert run(methods=["truth", "truth"], datasets=["three"], num_seeds=1) == ("toy", 1, 0, [])
    assert run.seen.units == [Unit("toy", "three", "truth", 0)]


def test_the_reference_runs_first_for_those_who_need_it_alone(run):
    run(methods=["plain"], datasets=["one"])
    assert run.seen.units == [
        Unit("toy", "one", "truth", 0),
        Unit("toy", "one", "plain", 0),
        Unit("toy", "one", "plain", 1),
    ]
    # Nobody needs its arrays any more.
    Store(run.out).path(run.seen.units[0]).unlink()
    assert run(methods=["plain"], datasets=["one"]) == ("toy", 0, 2, [])


def test_a_reference_without_its_arrays_runs_again_if_they_are_needed(run):
    run(methods=["plain"], datasets=["one"])
    expected = figures(run.out)
    store = Store(run.out)
    store.path(Unit("toy", "one", "truth", 0)).with_suffix(".npz").unlink()
    assert run(methods=["plain"], datasets=["one"]) == ("toy", 0, 2, [])
    store.path(Unit("toy", "one", "plain", 1)).unlink()
    assert run(methods=["plain"], datasets=["one"]) == ("toy", 2, 1, [])
    assert figures(run.out) == expected


def test_those_who_need_a_reference_that_failed_run_without(run):
    run.trouble.with_name("no-truth").touch()
    summary = run(methods=["plain"], datasets=["one"], num_seeds=1)
    (failed,) = summary.failures
    assert failed.failure == "ValueError: no truth"
    assert figures(run.out)[Unit("toy", "one", "plain", 0)]["value"] == -1.0
    assert run(methods=["plain"], datasets=["one"]).computed == 1  # seed 1, and not the reference


def test_failures_are_recorded_and_the_others_go_on(run):
    summary = run(methods=["diverging", "nan", "raising", "plain"], datasets=["one"], num_seeds=1)
    assert [(result.unit.method, result.failure) for result in summary.failures] == [
        ("diverging", "the ELBO fell to -inf"),
        ("nan", "figures are not finite: curve"),
        ("raising", "KeyError"),
    ]
    assert figures(run.out)[Unit("toy", "one", "plain", 0)]["value"] == 12.0


def test_failures_are_computed_again_only_if_asked_for(run):
    options = {"methods": ["diverging", "plain"], "datasets": ["one"], "num_seeds": 1}
    failures = run(**options).failures
    assert run(**options) == ("toy", 0, 2, failures)
    summary = run(**options, retry_failed=True)
    assert (summary.computed, summary.stored) == (1, 1)
    assert run.seen.units == [Unit("toy", "one", "diverging", 0)]


def test_an_interrupted_run_keeps_what_was_finished_and_goes_on(run):
    options = {"methods": ["interrupted"], "datasets": ["one"], "num_seeds": 3}
    run.trouble.touch()
    with pytest.raises(KeyboardInterrupt):
        run(**options)
    finished = figures(run.out)
    assert [unit[2:] for unit in finished] == [("interrupted", 0), ("truth", 0)]
    run.trouble.unlink()
    assert run(**options) == ("toy", 2, 1, [])
    assert finished.items() <= figures(run.out).items()


def test_an_interrupted_unit_is_given_its_checkpoint_again_until_it_is_stored(run, monkeypatch):
    checkpointing = replace(toy.EXPERIMENT, checkpoints=True)
    monkeypatch.setattr(toy, "EXPERIMENT", checkpointing)
    options = {"methods": ["checkpointing"], "datasets": ["one"], "num_seeds": 1}
    unit = Unit("toy", "one", "checkpointing", 0)
    path = Store(run.out).checkpoint(unit)
    with pytest.raises(KeyboardInterrupt):
        run(**options)
    assert path.read_text() == "half"
    assert run(**options).failures == []
    assert figures(run.out)[unit] == {"resumed": True}
    assert not path.exists()


def test_a_checkpoint_that_a_killed_process_has_left_of_a_stored_unit_is_deleted(run):
    run(methods=["truth", "diverging"], datasets=["one"], num_seeds=1)
    store = Store(run.out)
    done, failed, other = (
        store.checkpoint(Unit("toy", "one", method, 0)) for method in ("truth", "diverging", "nan")
    )
    other.parent.mkdir()
    for path in (done, failed, other):
        path.touch()
    run(methods=["truth"], datasets=["one"], num_seeds=1)
    assert [path.exists() for path in (done, failed, other)] == [False, True, True]


@pytest.mark.parametrize("jobs", [1, 2])
def test_trouble_with_files_is_not_stored_as_a_failure_of_the_unit(run, jobs):
    options = {"methods": ["without-room"], "datasets": ["one"], "num_seeds": 1, "jobs": jobs}
    run.trouble.touch()
    with pytest.raises(OSError, match="No space left") as error:
        run(**options)
    assert error.value.filename == "somewhere"
    assert list(figures(run.out)) == [Unit("toy", "one", "truth", 0)]
    run.trouble.unlink()
    assert run(**options) == ("toy", 1, 0, [])


def test_an_unusable_checkpoint_is_named_and_not_stored_as_a_failure(run, monkeypatch):
    monkeypatch.setattr(toy, "EXPERIMENT", replace(toy.EXPERIMENT, checkpoints=True))
    path = Store(run.out).checkpoint(Unit("toy", "one", "damaged", 0))
    with pytest.raises(
        ValueError, match=f"is damaged. Delete the checkpoint {re.escape(str(path))}"
    ):
        run(methods=["damaged"], datasets=["one"], num_seeds=1)
    assert list(figures(run.out)) == [Unit("toy", "one", "truth", 0)]


def test_a_folder_that_another_run_writes_to_is_refused_and_others_are_not(run, tmp_path):
    with files.locked(run.out.parent), Store(run.out).held("toy"):
        with pytest.raises(files.LockedError) as error:
            run()
        assert str(error.value).startswith(f"{run.out / 'toy'} is in use: process {os.getpid()} on")
        assert run.seen.units == []
        assert run(out=tmp_path / "other").computed == 8
    with Store(run.out).held("another"):
        assert run().computed == 8


def test_what_was_stored_since_the_plan_was_made_is_not_computed_again(run):
    plan = runner.plan("toy", out=run.out)
    run(methods=["truth"])
    assert runner.execute(plan) == ("toy", 4, 4, [])
    late = runner.plan("toy", "paper", out=run.out.with_name("late"))
    run(out=run.out.with_name("late"))
    with pytest.raises(ValueError, match="'quick' -> 'paper'"):
        runner.execute(late)


def test_other_experiments_are_given_no_checkpoint(run):
    run(methods=["checkpointing"], datasets=["one"], num_seeds=1)
    assert "resumed" not in figures(run.out)[Unit("toy", "one", "checkpointing", 0)]


def test_reports_of_units_arrive_while_they_run(run):
    run(methods=["truth"], datasets=["three"], num_seeds=1)
    assert run.seen.reports == [(Unit("toy", "three", "truth", 0), 0.5, "half of three")]


def test_two_processes_store_what_one_does(run, tmp_path):
    methods = ["truth", "plain", "diverging", "nan"]
    alone = run(methods=methods, out=tmp_path / "alone")
    together = run(methods=methods, jobs=2)
    assert together.computed == alone.computed == 16
    assert figures(run.out) == figures(tmp_path / "alone")
    assert [(result.unit, result.failure) for result in together.failures] == [
        (result.unit, result.failure) for result in alone.failures
    ]
    # Reports of the last units may come after their end.
    assert {(0.5, "half of one"), (0.5, "half of three")} == {r[1:] for r in run.seen.reports}
    # As many at a time as there are processes.
    assert set(run.seen.units[:2]) == {Unit("toy", d, "truth", 0) for d in ("one", "three")}


def test_processes_share_the_cores_and_compiled_programs(run, monkeypatch):
    monkeypatch.setattr(workers, "cores", lambda: 7)
    monkeypatch.setenv("NPROC", "5")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = dict(os.environ)
    run(methods=["environment"], datasets=["one"], num_seeds=2, jobs=2)
    first, second = (figures(run.out)[Unit("toy", "one", "environment", k)] for k in (0, 1))
    assert first == second
    assert [first[name] for name in toy.VARIABLES[:3]] == ["3", "3", "3"]
    assert not Path(first["JAX_COMPILATION_CACHE_DIR"]).exists()
    assert dict(os.environ) == before


def test_a_compilation_cache_of_the_user_is_kept(run, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert "JAX_COMPILATION_CACHE_DIR" not in workers._variables(2, "other")


def test_a_process_that_dies_is_told_and_the_rest_is_kept(run):
    options = {"methods": ["killed"], "datasets": ["one"], "num_seeds": 3, "jobs": 2}
    run.trouble.touch()
    with pytest.raises(RuntimeError) as error:
        run(**options)
    stored = figures(run.out)
    assert Unit("toy", "one", "truth", 0) in stored
    assert Unit("toy", "one", "killed", 0) in stored
    assert Unit("toy", "one", "killed", 1) not in stored
    number = sum(unit.method == "killed" for unit in stored)
    assert str(error.value) == (
        f"a worker process died, perhaps of memory; {number} of 3 units of toy are stored, the "
        "same command goes on."
    )
    run.trouble.unlink()
    assert run(**options | {"jobs": 1}) == ("toy", 3 - number, number, [])


def test_an_interrupted_pool_is_killed_at_once_and_what_was_finished_is_kept(run):
    class Interrupting(Observer):
        def advanced(self, unit, share, words):
            if unit.method == "sleeping":
                raise KeyboardInterrupt

    run.trouble.touch()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(methods=["sleeping"], datasets=["one"], jobs=2, progress=Interrupting())
    assert time.monotonic() - began < 50
    assert multiprocessing.active_children() == []
    assert list(figures(run.out)) == [Unit("toy", "one", "truth", 0)]


def test_results_of_another_preset_are_not_added_to(run):
    run()
    with pytest.raises(ValueError, match=r"preset: 'quick' -> 'paper'; scale of the settings"):
        run("paper")


def test_workers_with_other_versions_are_refused(run, monkeypatch):
    plan = runner.plan("toy", out=run.out)
    other = plan.origin._replace(versions={**plan.origin.versions, "jax": "0.1"})
    monkeypatch.setattr(workers.store, "origin", lambda *_: other)
    with pytest.raises(RuntimeError, match=r"jax of the versions: '0.1' -> .* install the same"):
        runner.execute(plan)
    assert figures(run.out) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "toy has no preset 'huge'; choose from quick, paper."),
        ({"methods": ["plain", "magic"]}, "toy has no method 'magic'; choose from truth, plain, "),
        ({"datasets": ["two"]}, "toy has no data set 'two'; choose from one, three, spambase."),
        ({"num_seeds": 0}, "num_seeds must be a whole number of at least 1, got 0."),
        ({"jobs": 0}, "jobs must be a whole number of at least 1, got 0."),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_before_anything_runs(run, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(**options)
    assert run.seen.units == []


def test_an_unknown_experiment_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no experiment 'fun'; choose from funnel, gradient-"):
        catalogue.get("fun")


def test_a_missing_data_set_is_told_before_anything_runs(run, monkeypatch, tmp_path):
    for variable in ("RVRS_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "nowhere"))
    monkeypatch.delenv("RVRS_DATA_URL", raising=False)
    with pytest.raises(FileNotFoundError, match="spambase"):
        run(datasets=["one", "spambase"])
    assert run.seen.units == []


def test_a_damaged_result_is_told_before_anything_runs(run):
    run(datasets=["one"])
    path = Store(run.out).path(Unit("toy", "one", "plain", 1))
    path.write_text(json.dumps({"format": "rvrs-result"}))
    with pytest.raises(ValueError, match=r"seed-1.json has version None"):
        run()
    assert run.seen.units == []


def test_a_scheduler_without_dask_is_answered_with_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[dask\]'"):
        run(scheduler="tcp://127.0.0.1:1")


@pytest.mark.slow
def test_a_dask_cluster_stores_what_one_process_does(run, tmp_path):
    from distributed import LocalCluster

    methods = ["truth", "plain", "diverging", "nan"]
    run(methods=methods, out=tmp_path / "alone")
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        summary = run(methods=methods, scheduler=cluster.scheduler_address)
    assert summary.computed == 16
    assert len(summary.failures) == 8
    assert figures(run.out) == figures(tmp_path / "alone")


@pytest.mark.slow
def test_units_of_a_lost_dask_worker_are_computed_again(run, tmp_path):
    from distributed import LocalCluster

    methods = ["truth", "plain", "killed-once"]
    run(methods=methods, out=tmp_path / "alone")
    run.trouble.touch()
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        summary = run(methods=methods, scheduler=cluster.scheduler_address)
    assert not run.trouble.exists()
    assert not summary.failures
    assert figures(run.out) == figures(tmp_path / "alone")
