import contextlib
import io
import sys
import tempfile
import warnings
from importlib.metadata import version
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rvrs.bench
from rvrs import cli, fit_command, fitting, storage
from rvrs.experiments import breast_cancer, funnel, report

MODEL = """
import numpyro
import numpyro.distributions as dist


def model(x, y, prior_scale=2.0):
    slope = numpyro.sample("slope", dist.Normal(0.0, prior_scale))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    # A name that numpy.savez does not take.
    numpyro.deterministic("file", 2 * slope)
    numpyro.sample("obs", dist.Normal(slope * x, scale), obs=y)


def broken(x):
    numpyro.sample("z", dist.Normal(x.nothing, 1.0))
"""
DATA = "x,y,other\n" + "".join(f"{0.1 * i},{0.2 * i + 0.1 * (-1) ** i},5\n" for i in range(20))


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
    for module, name in [
        (funnel, "fit"),
        (breast_cancer, "fit"),
        (breast_cancer, "reference"),
        (fitting, "fit"),
    ]:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a fit was started"))


@pytest.fixture
def files(tmp_path):
    """The options that name a model file, its data and a directory for the results."""
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "d.csv").write_text(DATA)
    return [
        str(tmp_path / "m.py"),
        *("--data", str(tmp_path / "d.csv")),
        *("--out", str(tmp_path / "out")),
    ]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """What a short fit printed, and the directory that it left."""
    folder = tmp_path_factory.mktemp("fit")
    (folder / "m.py").write_text(MODEL)
    (folder / "d.csv").write_text(DATA)
    arguments = [str(folder / "m.py"), "--data", str(folder / "d.csv"), "--draws", "12000"]
    arguments += ["--steps", "600", "--out", str(folder / "new" / "out"), "--proposal", "diagonal"]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["rvrs", "fit", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert exit_.value.code == 0
    return printed.getvalue(), folder / "new" / "out"


def test_fit_prints_progress_and_the_summary(fitted):
    printed, out = fitted
    assert "model(x, y); defaults of prior_scale; columns not used: other" in printed
    assert "600/600" in printed
    assert "diagonal proposal, 600 steps" in printed
    assert (out / "summary.txt").read_text() in printed
    assert "UserWarning" not in printed


def test_fit_stores_draws_of_all_sites(fitted):
    with np.load(fitted[1] / "posterior.npz") as draws:
        assert sorted(draws.files) == ["file", "scale", "slope"]
        slope = draws["slope"]
        np.testing.assert_allclose(draws["file"], 2 * slope, rtol=1e-6)
    assert slope.shape == (12_000,)
    assert len(np.unique(slope)) > 11_000  # the parts that they are made of differ
    assert slope.mean() == pytest.approx(2, abs=0.1)


def test_fit_stores_the_fit_and_a_figure_and_nothing_else(fitted):
    names = sorted(path.name for path in fitted[1].iterdir())
    assert names == ["fit.npz", "fit.png", "posterior.npz", "summary.txt"]
    assert (fitted[1] / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_a_stored_fit_can_be_loaded(fitted):
    printed, out = fitted
    namespace = {}
    exec(MODEL, namespace)
    columns = np.loadtxt(io.StringIO(DATA), delimiter=",", skiprows=1)
    kwargs = {name: jax.numpy.asarray(columns[:, i]) for i, name in enumerate("xy")}
    fit = rvrs.load(out / "fit.npz", namespace["model"], model_kwargs=kwargs)
    assert f"{fit.elbo:.4f}" in printed


def fake_fit(monkeypatch, result):
    """Replace ``rvrs.fit``, and return what it is called with."""
    calls = []

    def fit(*args, **kwargs):
        calls.append((args, kwargs))
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(fitting, "fit", fit)
    return calls


def test_options_of_fit_arrive(run, files, monkeypatch):
    calls = fake_fit(monkeypatch, ValueError("stop here."))
    options = ["--target-acceptance", "0.5", "--proposal", "low_rank", "--steps", "7", "--seed"]
    assert run("fit", *files, *options, "3") == "rvrs fit: stop here."
    ((key, model), options) = calls[0]
    assert key == jax.random.key(3)
    assert model.__name__ == "model"
    assert list(options["model_kwargs"]) == ["x", "y"]
    assert options["target_acceptance"] == 0.5
    assert options["proposal"] == "low_rank"
    assert options["num_steps"] == 7
    assert options["checkpoint"].name == "fit.checkpoint.npz"
    assert options["resume"] is None


def store_unfinished(path, seed=0):
    """A file with the key of a fit, and nothing else."""
    path.parent.mkdir(exist_ok=True)
    key = jax.random.split(jax.random.key(seed), 4)[-1]
    storage.write(path, storage.Checkpoint({}, {"keys[0]": np.asarray(jax.random.key_data(key))}))


def test_resume_goes_on_with_the_checkpoint_and_else_with_the_stored_fit(
    run, files, monkeypatch, tmp_path
):
    calls = fake_fit(monkeypatch, KeyboardInterrupt())
    store_unfinished(tmp_path / "out" / "fit.npz")
    assert run("fit", *files, "--resume") == "rvrs fit: interrupted."
    store_unfinished(tmp_path / "out" / "fit.checkpoint.npz")
    assert run("fit", *files, "--resume") == "rvrs fit: interrupted; go on with --resume."
    resumed = [options["resume"].name for _, options in calls]
    assert resumed == ["fit.npz", "fit.checkpoint.npz"]


def test_a_fit_is_not_resumed_with_another_seed(run, files, monkeypatch, tmp_path):
    fake_fit(monkeypatch, AssertionError("a fit was started"))
    path = tmp_path / "out" / "fit.checkpoint.npz"
    store_unfinished(path, seed=3)
    assert run("fit", *files, "--resume", "--seed", "4") == (
        f"rvrs fit: {path} was made with another seed than 4; pass the --seed of that fit."
    )


def test_a_new_fit_leaves_no_checkpoint_of_another_to_be_resumed(run, files, monkeypatch, tmp_path):
    fake_fit(monkeypatch, KeyboardInterrupt())
    store_unfinished(tmp_path / "out" / "fit.checkpoint.npz")
    assert run("fit", *files) == "rvrs fit: interrupted."
    assert list((tmp_path / "out").iterdir()) == []


def test_a_damaged_checkpoint_is_named(run, files, tmp_path):
    path = tmp_path / "out" / "fit.checkpoint.npz"
    store_unfinished(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert str(run("fit", *files, "--resume")).startswith(f"rvrs fit: {path} is truncated, damaged")


def test_what_does_not_fit_in_a_checkpoint_is_told_with_its_name(run, files, monkeypatch, tmp_path):
    fake_fit(monkeypatch, storage.CheckpointError("the file's x does not fit."))
    path = tmp_path / "out" / "fit.checkpoint.npz"
    store_unfinished(path)
    message = run("fit", *files, "--resume")
    assert message == f"rvrs fit: the file's x does not fit. The file is {path}."


@pytest.mark.slow
def test_an_interrupted_fit_is_resumed_to_the_same_result(
    run, files, fitted, monkeypatch, tmp_path, capsys
):
    original = fitting.fit

    def interrupted(*args, callback, **kwargs):
        def stop(steps, info):
            callback(steps, info)
            raise KeyboardInterrupt

        return original(*args, callback=stop, **kwargs)

    monkeypatch.setattr(fitting, "fit", interrupted)
    options = ["--steps", "600", "--proposal", "diagonal"]
    assert run("fit", *files, *options) == "rvrs fit: interrupted; go on with --resume."
    monkeypatch.setattr(fitting, "fit", original)
    capsys.readouterr()
    assert run("fit", *files, *options, "--resume") == 0
    summary, uninterrupted = (
        (folder / "summary.txt").read_text().splitlines()[1:]  # the first line has the seconds
        for folder in (tmp_path / "out", fitted[1])
    )
    assert summary == uninterrupted


@pytest.mark.usefixtures("no_fits")
def test_nothing_to_resume_is_said_before_any_fit(run, files, tmp_path):
    message = run("fit", *files, "--resume")
    assert message == (
        "rvrs fit: there is nothing to resume: no fit.checkpoint.npz or fit.npz in "
        f"{tmp_path / 'out'}; leave out --resume."
    )


@pytest.mark.usefixtures("no_fits")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.py", "def model(:\n", "m.py, line 1: invalid syntax."),
        ("m.py", "x = 1\n", "m.py has no function 'model': it has none."),
        ("m.py", "\n1 / 0\n", "m.py, line 2: ZeroDivisionError: division by zero."),
        ("m.py", "def model(z): 0\n", "the model's parameter 'z' is no column of"),
        ("d.csv", "x,y\n1,2\n3,a\n", "d.csv, line 3, column 'y': 'a' is not a number."),
        ("d.csv", "", "d.csv is empty"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_in_one_line(
    run, files, tmp_path, name, text, message, capsys
):
    (tmp_path / name).write_text(text)
    said = str(run("fit", *files))
    assert said.startswith("rvrs fit: ")
    assert message in said
    assert "\n" not in said
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("no_fits")
def test_fit_into_a_file_is_refused_before_any_fit(run, files, tmp_path):
    (tmp_path / "out").touch()
    message = run("fit", *files)
    assert message == f"rvrs fit: --out {tmp_path / 'out'} is a file; name a directory."


@pytest.mark.usefixtures("no_fits")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--target-acceptance", "0"),
        ("--target-acceptance", "1.5"),
        ("--proposal", "cubic"),
        ("--steps", "0"),
        ("--draws", "0"),
        ("--seed", "-1"),
    ],
)
def test_fit_with_a_wrong_option_is_a_usage_error(run, files, option, value, capsys):
    assert run("fit", *files, option, value) == 2
    assert option in capsys.readouterr().err


def test_an_error_inside_the_model_is_one_line_with_its_place(run, files, capsys):
    line = MODEL[: MODEL.index("x.nothing")].count("\n") + 1
    said = str(run("fit", *files, "--model", "broken"))
    assert f"m.py, line {line}: AttributeError: " in said
    assert said.endswith("; --traceback shows where.")
    assert "\n" not in said
    assert "Traceback" not in capsys.readouterr().err


def test_a_traceback_is_shown_on_request(run, files, capsys):
    run("fit", *files, "--model", "broken", "--traceback")
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "x.nothing" in shown


def test_warnings_are_collected_once_and_others_left_alone():
    def warn() -> list[str]:
        with fit_command.collected_warnings() as messages:
            warnings.simplefilter("always", RuntimeWarning)
            for text in ("one", "one", "two"):
                warnings.warn(text, stacklevel=1)
            warnings.warn("other", RuntimeWarning, stacklevel=1)
        return messages

    with pytest.warns(RuntimeWarning, match="other"):
        messages = warn()
    assert messages == ["one", "two"]


@pytest.fixture
def quick_demo(monkeypatch):
    """The demo of the breast-cancer data with made-up fits; returns the steps of each."""
    steps = []
    rng = np.random.default_rng(0)

    def fit(_, method, dataset, *, num_steps, callback):
        info = SimpleNamespace(
            elbo=np.array([np.nan]), acceptance=np.ones(1), threshold=np.zeros(1)
        )
        callback(num_steps, info)
        steps.append(num_steps)
        found = SimpleNamespace(
            elbo=-12.345,
            elbo_error=0.012,
            log_evidence=-11.11,
            acceptance=0.123,
            khat=0.98,
            seconds=100.1,
            warnings=("bad: do this.",),
        )
        draws = 0.5 * rng.normal(size=(1000, dataset.covariates.shape[1]))
        return breast_cancer.MethodFit(method.name, found, draws)  # pyright: ignore

    def reference(_, dataset):
        draws = rng.normal(size=(1000, dataset.covariates.shape[1]))
        return breast_cancer.Reference(draws, 1.0)

    monkeypatch.setattr(breast_cancer, "fit", fit)
    monkeypatch.setattr(breast_cancer, "reference", reference)
    return steps


def test_demo_prints_a_comparison_and_writes_the_figure(run, quick_demo, tmp_path, capsys):
    out = tmp_path / "new" / "directory"
    assert run("demo", "--out", str(out), "--steps", "20", "--seed", "1") == 0
    assert quick_demo == [20] * len(breast_cancer.METHODS)
    printed = capsys.readouterr().out
    for method in breast_cancer.METHODS:
        assert f"rvrs.fit warns of {method.name}: bad." in printed
    for expected in ("NUTS", "k-hat", "-12.345", "20/20"):
        assert expected in printed
    assert str(out / "breast-cancer.png") in printed
    assert (out / "breast-cancer.png").stat().st_size > 0


@pytest.mark.usefixtures("quick_demo")
def test_the_table_of_the_demo_fits_into_80_columns(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("demo", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "-12.345" in printed
    assert "…" not in printed  # which stands for what was cut off


def test_an_interrupted_demo_says_so(run, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(breast_cancer, "reference", interrupt)
    assert run("demo", "--out", str(tmp_path)) == "rvrs demo: interrupted."


def test_demo_without_scikit_learn_says_how_to_get_it(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    message = str(run("demo", "--out", str(tmp_path)))
    assert message.startswith("rvrs demo: ")
    assert "pip install 'rvrs[data]'" in message


@pytest.mark.slow
def test_funnel_demo_prints_a_table_and_writes_the_figure(run, tmp_path, capsys):
    out = tmp_path / "new" / "directory"
    arguments = ["--example", "funnel", "--steps", "3000", "--seed", "1"]
    assert run("demo", "--out", str(out), *arguments) == 0
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
@pytest.mark.parametrize("option", ["--seed", "--steps", "--example"])
def test_demo_with_a_wrong_option_is_a_usage_error(run, option, capsys):
    assert run("demo", option, "-1") == 2
    assert option in capsys.readouterr().err


def test_bench_runs_the_suites_that_are_named(run, monkeypatch, capsys, tmp_path):
    def measured(names, quick, out, console):
        print(names, quick, out == tmp_path / "found.json")

    monkeypatch.setattr(rvrs.bench, "run", measured)
    assert run("bench", "memory", "step", "--quick", "--out", str(tmp_path / "found.json")) == 0
    assert run("bench") == 0
    assert capsys.readouterr().out == "['memory', 'step'] True True\n[] False False\n"


def test_bench_refuses_an_unknown_suite_in_one_line(run, monkeypatch):
    monkeypatch.setattr(rvrs.bench, "run", lambda *_: pytest.fail("a benchmark was started"))
    assert run("bench", "step", "speed") == (
        "rvrs bench: there is no suite 'speed'; choose from step, quality, sampling, growth, "
        "memory, compile."
    )


def test_bench_refuses_to_start_if_it_cannot_write_its_result(run, monkeypatch, tmp_path):
    monkeypatch.setattr(rvrs.bench, "run", lambda *_: pytest.fail("a benchmark was started"))
    message = run("bench", "--out", str(tmp_path / "nowhere" / "found.json"))
    assert message == (
        f"rvrs bench: cannot write {tmp_path}/nowhere/found.json: the folder {tmp_path}/nowhere "
        "does not exist."
    )
    assert run("bench", "--out", str(tmp_path)) == (
        f"rvrs bench: {tmp_path} is a folder; name a file in it."
    )


def test_report_says_where_the_page_is(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(report, "write", lambda folder, *, page: page or folder / "default.md")
    assert run("report", str(tmp_path)) == 0
    assert run("report", str(tmp_path), "--out", "page.md") == 0
    assert capsys.readouterr().out == f"Report: {tmp_path}/default.md\nReport: page.md\n"


def test_what_is_wrong_with_a_report_is_said_in_one_line(run, monkeypatch, tmp_path):
    def fail(folder, *, page):
        raise ValueError("nothing is stored there.")

    monkeypatch.setattr(report, "write", fail)
    assert run("report", str(tmp_path)) == "rvrs report: nothing is stored there."
    missing = tmp_path / "missing"
    assert run("report", str(missing)) == (
        f"rvrs report: there is no folder {missing}; rvrs reproduce makes one."
    )


def test_version_is_that_of_the_package(run, capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"rvrs {version('rvrs')}\n"


@pytest.mark.parametrize("package", ["matplotlib", "rich", "typer"])
def test_a_missing_package_is_answered_with_how_to_install_it(run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert run("demo") == f"rvrs: {package} not installed; run: pip install 'rvrs[cli]'"
