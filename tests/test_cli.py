import sys
import tempfile
from importlib.metadata import version

import pytest

import rvrs
from rvrs import cli
from rvrs.experiments import funnel


@pytest.fixture
def run(monkeypatch):
    """Run the command and return the argument of ``sys.exit``."""

    def run(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["rvrs", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code

    return run


@pytest.fixture
def no_fits(monkeypatch):
    monkeypatch.setattr(funnel, "fit", lambda *_, **__: pytest.fail("a fit was started"))


def test_demo_prints_a_table_and_writes_the_figure(run, tmp_path, capsys):
    out = tmp_path / "new" / "directory"
    assert run("demo", "--out", str(out), "--steps", "3000", "--seed", "1") == 0
    printed = capsys.readouterr().out
    for expected in ("mean-field", "RVRS, Z_target = 0.5", "std. error", "3000/3000"):
        assert expected in printed
    assert str(out / "funnel.png") in printed
    assert (out / "funnel.png").stat().st_size > 0


@pytest.mark.usefixtures("no_fits")
def test_demo_into_a_file_is_refused_before_any_fit(run, tmp_path):
    file = tmp_path / "file"
    file.touch()
    message = run("demo", "--out", str(file))
    assert message == f"rvrs demo: --out {file} is a file; name a directory."


@pytest.mark.usefixtures("no_fits")
def test_demo_below_a_file_is_refused_before_any_fit(run, tmp_path):
    file = tmp_path / "file"
    file.touch()
    message = run("demo", "--out", str(file / "below"))
    assert message == f"rvrs demo: cannot write to --out {file / 'below'}: Not a directory."


@pytest.mark.usefixtures("no_fits")
def test_demo_without_permission_to_write_is_refused_before_any_fit(run, tmp_path, monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Taking the permission away would not stop a test that runs as root.
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    message = run("demo", "--out", str(tmp_path))
    assert message == f"rvrs demo: cannot write to --out {tmp_path}: Permission denied."


@pytest.mark.usefixtures("no_fits")
@pytest.mark.parametrize("option", ["--seed", "--steps"])
def test_demo_with_a_negative_number_is_a_usage_error(run, option, capsys):
    assert run("demo", option, "-1") == 2
    assert option in capsys.readouterr().err


def test_bench_runs_the_benchmark(run, monkeypatch, capsys):
    class Bench:
        main = staticmethod(lambda: print("measured"))

    monkeypatch.setattr(rvrs, "bench", Bench, raising=False)
    assert run("bench") == 0
    assert capsys.readouterr().out == "measured\n"


def test_version_is_that_of_the_package(run, capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"rvrs {version('rvrs')}\n"


@pytest.mark.parametrize("package", ["matplotlib", "rich", "typer"])
def test_a_missing_package_is_answered_with_how_to_install_it(run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert run("demo") == f"rvrs: {package} not installed; run: pip install 'rvrs[cli]'"
