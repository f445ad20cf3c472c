"""The private names of NumPyro that the package rests on."""

import ast
import inspect
from pathlib import Path

import jax
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal

import rvrs
from rvrs.guides import _numpyro
from tests.guides.models import X, Y, line

ROOT = Path(rvrs.__file__).parent
# Set when the structure is learned.
INSTANCES = {"_init_latent", "_init_locs", "_potential_fn", "_unpack_latent"}


@pytest.fixture(scope="module")
def stock():
    guide = AutoDiagonalNormal(line)
    with handlers.seed(rng_seed=0), handlers.block():
        guide._setup_prototype(X, Y)
    return guide


def test_the_private_names_exist(stock):
    for owner, names in _numpyro.PRIVATE.items():
        for name in names:
            assert hasattr(stock if name in INSTANCES else owner, name), name


def test_the_private_functions_take_what_we_pass(stock):
    assert list(inspect.signature(AutoContinuous._get_posterior).parameters) == ["self"]
    setup = inspect.signature(AutoContinuous._setup_prototype).parameters.values()
    assert [p.kind for p in setup][1:] == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]
    assert stock._init_latent.shape == (stock.latent_dim,)
    assert list(stock._unpack_latent(stock._init_latent)) == ["slope", "scale"]
    jax.tree.map(lambda a, b: a == b, stock._unpack_latent(stock._init_latent), stock._init_locs)


def private_imports(path):
    """Names with a leading underscore that a file imports from NumPyro."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numpyro"):
            for part in [*node.module.split("."), *[alias.name for alias in node.names]]:
                if part.startswith("_"):
                    yield part


def private_attributes(path):
    """Attributes with a leading underscore that a file reads but does not set itself."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
    own = {n.attr for n in nodes if isinstance(n.ctx, ast.Store) and path.name != "_numpyro.py"}
    return {n.attr for n in nodes if n.attr.startswith("_") and "__" not in n.attr} - own


def test_nothing_private_of_numpyro_is_used_that_is_not_listed(stock):
    listed = {name for names in _numpyro.PRIVATE.values() for name in names}
    theirs = {name for name in dir(stock) if name.startswith("_")}
    for path in sorted(ROOT.rglob("*.py")):
        assert not list(private_imports(path)), path
        if path.parent.name == "guides":
            used = private_attributes(path) & theirs
            assert used <= listed, path


def test_arguments_are_named_by_the_models_parameters_or_by_place():
    def model(x, y=None, *more):
        pass

    assert _numpyro.named_arguments(model, ((1, 2, 3), {})) == {"x": 1, "y": 2, "more": (3,)}
    assert _numpyro.named_arguments(model, ((1,), {"y": 2})) == {"x": 1, "y": 2}
    # It tells nothing of its parameters.
    assert _numpyro.named_arguments(max, ((1, 2), {"key": 3})) == {"0": 1, "1": 2, "key": 3}
