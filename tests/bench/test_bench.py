import importlib
import io
import json
import sys
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from rvrs import bench
from rvrs.bench.report import Row, Suite


@pytest.fixture
def suites(monkeypatch):
    """Suites that measure nothing; what they were asked for."""
    asked = []

    def fake(name):
        def measure(*, quick, progress):
            progress("begins")
            asked.append((name, quick))
            return Suite(name, f"Title of {name}", "", [Row("work", "RVRS", {"ratio": 1.5})])

        return SimpleNamespace(NAME=name, measure=measure)

    for name, module in bench._MODULES.items():
        monkeypatch.setitem(sys.modules, f"rvrs.bench.{module}", fake(name))
    return asked


def test_all_suites_run_if_none_is_named(suites):
    bench.run([], True, None, Console(file=io.StringIO()))
    assert suites == [(name, True) for name in bench.SUITES]


def test_named_suites_run_in_their_order_and_are_shown(suites):
    text = io.StringIO()
    bench.run(["memory", "step"], False, None, Console(file=text))
    assert suites == [("step", False), ("memory", False)]
    assert "Title of step" in text.getvalue()


def test_the_file_holds_all_suites(suites, tmp_path):
    bench.run(["step", "memory"], True, tmp_path / "found.json", Console(file=io.StringIO()))
    found = json.loads((tmp_path / "found.json").read_text())
    assert [suite["name"] for suite in found["suites"]] == ["step", "memory"]


def test_a_quick_run_spends_little_time_on_compilation(monkeypatch):
    seen = []

    def measure(*, quick, progress):
        seen.append(jax.config.values["jax_disable_most_optimizations"])
        return Suite("step", "", "", [])

    monkeypatch.setitem(sys.modules, "rvrs.bench.step", SimpleNamespace(measure=measure))
    jax.config.update("jax_disable_most_optimizations", False)
    for quick in (True, False):
        bench.run(["step"], quick, None, Console(file=io.StringIO()))
    assert seen == [True, False]
    assert not jax.config.values["jax_disable_most_optimizations"]


def test_an_unknown_suite_is_refused_before_any_runs(suites):
    with pytest.raises(ValueError, match="there is no suite 'speed'; choose from step, "):
        bench.run(["step", "speed"], True, None, Console(file=io.StringIO()))
    assert not suites


@pytest.mark.parametrize("name", bench.SUITES)
def test_every_suite_has_its_module(name):
    module = importlib.import_module(f"rvrs.bench.{bench._MODULES[name]}")
    assert name == module.NAME
    assert callable(module.measure)
