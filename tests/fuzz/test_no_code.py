"""Nothing but ``rvrs fit`` and ``rvrs compare`` run a user's code, and only the model's file."""

import ast
from pathlib import Path

import pytest

import rvrs
from rvrs.experiments import catalogue

ROOT = Path(rvrs.__file__).parent
# Modules that run what they read, or may do so.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MODULES |= {"torch", "yaml", "runpy", "imp", "code", "codeop", "pkgutil", "zipimport", "dbm"}
BUILTINS = {"eval", "exec", "compile", "__import__", "execfile", "breakpoint", "input"}
# Functions of others that unpickle, evaluate or import by name.
ATTRIBUTES = {"allow_pickle", "loads_pickle", "literal_eval", "fromfile", "genfromtxt", "loadtxt"}
ATTRIBUTES |= {"import_module", "exec_module", "load_module", "spec_from_file_location"}
ATTRIBUTES |= {"read_pickle", "DataSource", "open_memmap", "unsafe_load", "system", "popen"}

ALLOWED = {
    # The one place: a user's model.
    ("model_file.py", "exec"),
    ("model_file.py", "compile"),
    # From tables in the code, see below, or of a fixed name.
    ("experiments/catalogue.py", "import_module"),
    ("bench/__init__.py", "import_module"),
    ("datasets.py", "import_module"),
    # Which is False.
    ("files.py", "allow_pickle"),
}


def found():
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        yield from ((name, what, node) for what, node in uses(ast.parse(path.read_text())))


def uses(tree):
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((a.name, node) for a in names if a.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in MODULES:
                    yield module, node
                yield from ((a.name, node) for a in names if a.name in ATTRIBUTES)
            case ast.Name(id=name) if name in BUILTINS | {"__builtins__"}:
                yield name, node
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield name, node
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"):
                yield "load", node
            case ast.keyword(arg=str(name)) if name in ATTRIBUTES:
                yield name, node


def test_nothing_but_the_users_model_is_run():
    assert {(name, what) for name, what, _ in found()} == ALLOWED


def test_pickles_are_never_allowed():
    for name, what, node in found():
        if what == "allow_pickle":
            assert isinstance(node, ast.keyword), name
            assert isinstance(node.value, ast.Constant), name
            assert node.value.value is False, name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os.path, marshal",
        "eval('1')",
        "f = exec",
        "np.load(path, allow_pickle=True)",
        "np.load(path)",
        "importlib.import_module(name)",
        "from importlib import import_module",
        "ast.literal_eval(text)",
    ],
)
def test_whatever_runs_code_would_be_found(source):
    assert list(uses(ast.parse(source)))


def test_modules_are_imported_from_tables_in_the_code():
    assert all(address.startswith("rvrs.experiments.") for address in catalogue.NAMES.values())
    for name in ("os:system", "../funnel", "rvrs.experiments.funnel:EXPERIMENT", ""):
        with pytest.raises(ValueError, match="there is no experiment"):
            catalogue.get(name)
    for name, what, _ in found():
        if (name, what) == ("datasets.py", "import_module"):
            continue
        assert what != "import_module" or name in ("experiments/catalogue.py", "bench/__init__.py")
    text = (ROOT / "datasets.py").read_text()
    assert 'import_module("sklearn.datasets")' in text
    assert text.count("import_module") == 1
