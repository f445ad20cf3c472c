import json
import math
import sys

import numpy as np
import pytest

from rvrs import baselines, cli

# The posterior is normal with mean sum(y) / 4 and standard deviation 1 / 2.
MODEL = """
import numpyro
import numpyro.distributions as dist


def model(y):
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.deterministic("twice", 2 * x)
    numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


def with_param(y):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x, scale), obs=y)


def broken(y):
    numpyro.sample("x", dist.Normal(y.nothing, 1.0))


def without_latent(y):
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)
"""
Y = np.array([0.5, 1.5, 2.5])


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run ``rvrs compare`` on the models above and return the argument of ``sys.exit``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "m.py").write_text(MODEL)
    (tmp_path / "d.csv").write_text("y\n" + "".join(f"{y}\n" for y in Y))

    def run(*options: str) -> object:
        arguments = ["rvrs", "compare", "m.py", "--data", "d.csv", "--steps", "300", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code

    return run


@pytest.fixture
def stored(tmp_path):
    """What was written as JSON, and the methods in it by name."""

    def read(folder="rvrs-compare"):
        content = json.loads((tmp_path / folder / "comparison.json").read_text())
        return content, {entry["method"]: entry for entry in content["methods"]}

    return read


@pytest.fixture
def no_fits(monkeypatch):
    monkeypatch.setattr(baselines, "fit", lambda *_, **__: pytest.fail("a fit was started"))


def log_evidence():
    covariance = np.eye(3) + 1
    return -0.5 * (
        3 * math.log(2 * math.pi)
        + np.linalg.slogdet(covariance)[1]
        + Y @ np.linalg.solve(covariance, Y)
    )


@pytest.mark.slow
def test_all_methods_find_the_exact_posterior_of_a_conjugate_model(run, stored, tmp_path, capsys):
    assert run("--methods", "mf, rvrs-0.5,nuts,mf", "--seed", "3") == 0
    content, methods = stored()
    assert list(methods) == ["mf", "rvrs-0.5", "nuts"]
    assert len(content["methods"]) == 3
    for entry in methods.values():
        assert entry["failure"] is None
        assert list(entry["sites"]) == ["x"]
        assert entry["sites"]["x"]["mean"] == pytest.approx(Y.sum() / 4, abs=0.05)
        assert entry["sites"]["x"]["sd"] == pytest.approx(0.5, abs=0.04)
        assert entry["seconds"] > 0
    for name in ("mf", "rvrs-0.5"):
        assert methods[name]["bound"] == pytest.approx(log_evidence(), abs=0.02)
        assert methods[name]["accuracy"]["mean_error"] < 0.15
        assert methods[name]["accuracy"]["least_sd_ratio"] == pytest.approx(1, abs=0.1)
    assert methods["mf"]["seconds_per_step"] > 0
    # Too few steps to tell, and a clock that includes compilation.
    assert methods["rvrs-0.5"]["seconds_per_step"] is None
    assert methods["nuts"]["bound"] is None
    assert methods["nuts"]["seconds_per_step"] is None
    assert methods["nuts"]["accuracy"] is None
    settings = {key: content[key] for key in ("model", "data", "proposal", "steps", "seed")}
    assert settings == {
        "model": "model",
        "data": "d.csv",
        "proposal": "diagonal",
        "steps": 300,
        "seed": 3,
    }
    assert content["reference"] == "nuts"

    printed = capsys.readouterr().out
    assert "Best bound: " in printed
    assert "sd ratio: " in printed
    assert f"{methods['mf']['bound']:.3f}" in printed
    assert "…" not in printed  # which stands for what was cut off
    assert max(len(line) for line in printed.splitlines()) <= 80

    names = sorted(path.name for path in (tmp_path / "rvrs-compare").iterdir())
    assert names == ["comparison.json", "comparison.md"]
    page = (tmp_path / "rvrs-compare" / "comparison.md").read_text()
    assert "| method | bound | std. error | µs per step | seconds | mean error | sd ratio |" in page
    assert f"| mf | {methods['mf']['bound']:.3f} |" in page


def test_a_model_that_one_method_cannot_fit_is_fitted_by_the_others(run, stored, capsys):
    options = ["--model", "with_param", "--methods", "nuts,mf", "--out", "new/folder"]
    assert run(*options) == 0
    content, methods = stored("new/folder")
    assert content["reference"] is None
    assert "NUTS cannot learn the model's parameters scale" in methods["nuts"]["failure"]
    assert math.isfinite(methods["mf"]["bound"])
    printed = capsys.readouterr().out
    assert "Failed: nuts: NUTS cannot learn" in printed
    assert "Best bound: mf" in printed
    assert "sd ratio" not in printed


def test_if_no_method_works_the_reasons_are_said_and_stored(run, stored, monkeypatch, capsys):
    errors = {"mf": baselines.DivergedError("no finite bound"), "mvn": KeyError("lost")}

    def fit(_, method, task, **__):
        raise errors[method]

    monkeypatch.setattr(baselines, "fit", fit)
    assert run("--methods", "mf,mvn") == "rvrs compare: no method has worked."
    captured = capsys.readouterr()
    assert "Failed: mf: no finite bound\n" in captured.out
    assert "Failed: mvn: m.py: KeyError: 'lost'\n" in captured.out
    assert "Traceback" not in captured.err
    assert stored()[1]["mf"]["failure"] == "no finite bound"


@pytest.mark.usefixtures("no_fits")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "mf,adam"], "method must be one of mf, mvn,"),
        (["--methods", "mf,"], "got ''"),
        (["--methods", "mf,semi-dais-8"], "semi-dais-8 needs a model in two parts"),
        (["--methods", "rvrs-2"], "must be above 0 and at most 1"),
        (["--model", "missing"], "m.py has no function 'missing'"),
        (["--model", "broken"], "AttributeError"),
        (["--model", "without_latent"], "has no latent sites"),
        (["--out", "m.py"], "--out m.py is a file; name a directory."),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_any_fit(run, options, message):
    said = str(run(*options))
    assert said.startswith("rvrs compare: ")
    assert message in said
    assert "\n" not in said


def test_an_interruption_is_one_line(run, monkeypatch):
    def fit(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(baselines, "fit", fit)
    assert run("--methods", "mf") == "rvrs compare: interrupted."


@pytest.mark.usefixtures("no_fits")
def test_an_unknown_proposal_is_a_usage_error(run, capsys):
    assert run("--proposal", "cubic") == 2
    assert "--proposal" in capsys.readouterr().err
