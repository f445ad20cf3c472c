"""Every public name is documented, with an example that runs, and is on a page of the site."""

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
MODULES = [
    "rvrs",
    "rvrs.vi",
    "rvrs.pymc",
    "rvrs.proposals",
    "rvrs.baselines",
    "rvrs.diagnostics",
    "rvrs.vae",
    "rvrs.vae_training",
    "rvrs.datasets",
]
NAMES = [
    (module, name)
    for module in MODULES
    for name in importlib.import_module(module).__all__
    if not inspect.ismodule(getattr(importlib.import_module(module), name))
]


def documented(thing):
    return inspect.getdoc(thing) or ""


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: part)
def test_every_public_name_has_a_docstring_with_an_example(module, name):
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, tuple | dict):  # constants cannot carry one
        source = Path(inspect.getsourcefile(importlib.import_module(module)) or "").parent
        text = "".join(path.read_text(encoding="utf-8") for path in source.glob("*.py"))
        assert re.search(rf'^{name}\b.*?\n"""', text, re.MULTILINE | re.DOTALL)
    else:
        assert ">>>" in documented(thing), f"{module}.{name} has no example"


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: part)
def test_public_methods_and_fields_are_documented(module, name):
    thing = getattr(importlib.import_module(module), name)
    if not inspect.isclass(thing):
        return
    methods = [m for n, m in vars(thing).items() if not n.startswith("_") and inspect.isfunction(m)]
    assert all(documented(method) for method in methods), name


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_page(module):
    pages = "".join(p.read_text(encoding="utf-8") for p in (PROJECT / "docs/api").glob("*.md"))
    if module == "rvrs":
        names = importlib.import_module(module).__all__
        things = [
            n for n in names if not inspect.ismodule(getattr(importlib.import_module(module), n))
        ]
        assert all(re.search(rf"auto(class|function):: {name}\n", pages) for name in things)
    else:
        assert f".. automodule:: {module}\n   :members:" in pages


def test_versions_agree():
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (PROJECT / "CITATION.cff").read_text(encoding="utf-8")
