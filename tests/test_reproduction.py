import sys
from pathlib import Path

import pytest

from rvrs import cli
from rvrs.experiments import catalogue, runner, workers
from rvrs.experiments.store import Store

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run ``rvrs reproduce`` into a folder and return the argument of ``sys.exit``."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(catalogue, "NAMES", {"toy": "tests.experiments.toy:EXPERIMENT"})
    monkeypatch.chdir(tmp_path)
    # One process unless a test asks for more.
    monkeypatch.setattr(workers, "cores", lambda: 1)

    def run(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["rvrs", "reproduce", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code

    return run


def stored(folder="rvrs-results"):
    return [(unit.dataset, unit.method, unit.seed) for unit, *_ in Store(folder).load("toy")]


def test_an_experiment_is_stored_and_counted(run, capsys):
    assert run("toy") == 0
    printed = capsys.readouterr().out
    assert "Figure 0: a toy" in printed
    assert "8/8" in printed
    assert "toy: 8 computed, 0 already stored, 0 failed\n" in printed
    assert printed.endswith("Figures and tables: rvrs report rvrs-results\n")
    assert len(stored()) == 8


def test_the_same_command_again_has_nothing_to_do(run, capsys):
    run("toy")
    capsys.readouterr()
    assert run("all", "toy") == 0
    assert capsys.readouterr().out.count("toy: 0 computed, 8 already stored, 0 failed\n") == 1


def test_options_arrive(run):
    options = ["--methods", "truth, plain", "--datasets", "three", "--seeds", "1"]
    assert run("toy", "--preset", "paper", "--out", "new/folder", *options) == 0
    assert stored("new/folder") == [("three", "plain", 0), ("three", "truth", 0)]
    (record, _) = Store("new/folder").records("toy")
    assert record.origin.preset == "paper"


def test_failures_are_listed_and_give_the_exit_code_1(run, capsys):
    options = ["--methods", "diverging,nan", "--datasets", "one", "--seeds", "1"]
    for arguments, counts in (
        ([], "toy: 3 computed, 0 already stored, 2 failed\n"),
        ([], "toy: 0 computed, 2 already stored, 2 failed\n"),
        (["--retry-failed"], "toy: 2 computed, 0 already stored, 2 failed\n"),
    ):
        assert run("toy", *options, *arguments) == 1
        printed = capsys.readouterr().out
        assert counts in printed
        assert "  one diverging seed 0: the ELBO fell to -inf\n" in printed
        assert "  one nan seed 0: figures are not finite: curve\n" in printed


def test_an_interruption_says_how_to_go_on(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path / "trouble"))
    (tmp_path / "trouble").touch()
    options = ["toy", "--methods", "interrupted", "--datasets", "one"]
    assert run(*options) == "rvrs reproduce: interrupted; the same command goes on."
    assert stored() == [("one", "interrupted", 0), ("one", "truth", 0)]
    (tmp_path / "trouble").unlink()
    capsys.readouterr()
    assert run(*options) == 0
    assert "toy: 1 computed, 1 already stored, 0 failed" in capsys.readouterr().out


def test_a_process_that_dies_is_told_in_one_line(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TOY_TROUBLE", str(tmp_path / "trouble"))
    (tmp_path / "trouble").touch()
    message = run("toy", "--methods", "killed", "--datasets", "one", "--jobs", "2")
    assert str(message).startswith("rvrs reproduce: a worker process died, perhaps of memory; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy", "tou"], "there is no experiment 'tou'; choose from toy."),
        (["toy", "--methods", "magic"], "toy has no method 'magic'; choose from truth, plain, "),
        (["toy", "--datasets", "one,,"], "toy has no data set ''; choose from one, three, "),
        (["toy", "--preset", "cpu"], "toy has no preset 'cpu'; choose from quick, paper."),
        (
            ["toy", "--jobs", "2", "--scheduler", "tcp://127.0.0.1:1"],
            "--jobs has no meaning with --scheduler; leave one out.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_runs(
    run, monkeypatch, arguments, message
):
    monkeypatch.setattr(runner, "execute", lambda *_, **__: pytest.fail("a run was started"))
    said = str(run(*arguments))
    assert said.startswith(f"rvrs reproduce: {message}")
    assert "\n" not in said


def test_results_of_another_preset_are_refused(run):
    run("toy")
    said = str(run("toy", "--preset", "paper"))
    assert "preset: 'quick' -> 'paper'" in said
    assert said.endswith("choose another --out.")


def test_reproduce_into_a_file_is_refused(run, tmp_path):
    (tmp_path / "file").touch()
    assert run("toy", "--out", "file") == (
        "rvrs reproduce: --out file is a file; name a directory."
    )


@pytest.mark.parametrize(
    ("option", "value"), [("--seeds", "0"), ("--jobs", "0"), ("--preset", "x")]
)
def test_a_wrong_option_is_a_usage_error(run, option, value, capsys):
    assert run("toy", option, value) == 2
    assert option in capsys.readouterr().err


@pytest.mark.slow
def test_all_experiments_run_in_their_quick_size_without_files_of_data(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("RVRS_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in (["reproduce", "all", "--out", "results"], ["report", "results"]):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["rvrs", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert exit_.value.code == 0, capsys.readouterr()
    page = (tmp_path / "results" / "report.md").read_text()
    assert "of which 0 failed" in page
    assert page.count("\n## ") == len(catalogue.NAMES)
    assert len(list((tmp_path / "results" / "figures").glob("*.png"))) >= len(catalogue.NAMES)
