"""A PyMC model as one of NumPyro's: PyMC writes its graph in JAX, and NumPyro sees one factor."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from rvrs import storage
from rvrs.core import arguments as checks

if TYPE_CHECKING:
    from pymc import Model
else:
    Model = Any

Graph = Callable[[dict[str, Any]], dict[str, jax.Array]]
Point = dict[str, np.ndarray]
"""Values by the names of PyMC's value variables."""

# As far from its initial point as PyMC goes itself, where the density is not finite there.
_JITTER = 1.0
_POINTS = 20
# Significant digits of the log density that files tell a model by: rounding differs from one
# machine to the next.
_DIGITS = 6
# The log density among what the graph gives; no name of a variable is empty.
_LOG_DENSITY = ""
# Of messages of others that are shown in ours.
_LONGEST = 300


class Converted(NamedTuple):
    """A PyMC model as one of NumPyro's."""

    model: Callable[[dict[str, Any]], None]
    """Its latent sites are PyMC's value variables relative to where they start; free random
    variables and Deterministics are deterministic sites."""
    data: dict[str, Any]
    """The model's argument: the start, and what tells the model from others.

    The data are in the density already; here they serve to know a model again, and so that NaN
    among them are named.
    """
    free_names: tuple[str, ...]
    """Names of the free random variables."""
    axes: dict[str, Any]
    """Coords and dims."""
    groups: Any
    """Observed and constant data, as an ``InferenceData``."""


def convert(model: Model) -> Converted:
    """Express a PyMC model in JAX, or say why that cannot be."""
    pymc, pytensor, sampling = _libraries()
    checks.check_kind("model", model, pymc.Model, "a pymc.Model")
    _check_variables(model)
    # Functions that PyMC compiles for itself are called once; for that Python is quicker than C.
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        start = model.initial_point(random_seed=0)
        shown = pymc.util.get_default_varnames(model.unobserved_value_vars, False)
        graph, shared = _graph(model, shown, sampling)
        log_density = _check_density(model, graph, start)
    names = [variable.name for variable in shown]

    def numpyro_model(data: dict[str, Any]) -> None:
        values = {}
        for name, first in data["start"].items():
            flat = dist.ImproperUniform(constraints.real, (), first.shape)
            moved = numpyro.sample(f"{name} from its start", flat)
            values[name] = jnp.asarray(first + moved, first.dtype)
        results = graph(values)
        numpyro.factor("log density of the PyMC model", results[_LOG_DENSITY])
        for name in names:
            numpyro.deterministic(name, results[name])

    groups = pymc.to_inference_data(prior={}, model=model)
    data = {"start": start, "log density": float(f"{log_density:.{_DIGITS}g}")}
    for group in groups.groups():
        data[group] = {str(name): array.to_numpy() for name, array in groups[group].items()}
    axes = {
        "coords": {name: np.array(c) for name, c in model.coords.items() if c is not None},
        "dims": {name: list(dims) for name, dims in model.named_vars_to_dims.items()},
    }
    free_names = tuple(rv.name for rv in model.free_RVs if rv.name in names)
    # To a model PyMC can only add variables; the density tells what functions of Python hide.
    identity = storage.describe_arguments((shared, list(model.named_vars), repr(log_density)))
    known = _known.get(model)
    if known is None or known[0] != identity:
        # What was compiled for it before does not serve.
        known = _known[model] = (identity, numpyro_model)
    return Converted(known[1], data, free_names, axes, groups)


# NumPyro models by the PyMC model that they were made of, with what that was like then.
_known: WeakKeyDictionary[Any, tuple[dict[str, str], Callable]] = WeakKeyDictionary()


def _libraries() -> tuple[Any, Any, Any]:
    """PyMC, PyTensor and PyMC's bridge to JAX, which from here on has PyTensor's precision."""
    try:
        import pymc
        import pytensor
        from pytensor.configdefaults import config
    except ImportError as error:
        raise ImportError(
            "PyMC models need PyMC, which is not installed; run: pip install 'rvrs[pymc]'"
        ) from error
    # This import asks for a hundred devices, one for each chain that there might be, in every
    # process that is started from this one.
    flags = os.environ.get("XLA_FLAGS")
    from pymc.sampling import jax as sampling

    if flags is None:
        os.environ.pop("XLA_FLAGS", None)
    else:
        os.environ["XLA_FLAGS"] = flags
    jax.config.update("jax_enable_x64", config.floatX == "float64")
    return pymc, pytensor, sampling


def _check_variables(model: Model) -> None:
    if not model.free_RVs:
        raise ValueError("model has no free random variables; there is nothing to infer.")
    values = model.discrete_value_vars
    discrete = [repr(rv.name) for rv in model.free_RVs if model.rvs_to_values[rv] in values]
    if discrete:
        raise ValueError(
            f"model: {', '.join(discrete)} cannot be inferred, being discrete; sum over the values "
            "in the model (e.g. with pm.Mixture), or use a sampler for discrete variables."
        )


def _graph(model: Model, shown: list[Any], sampling: Any) -> tuple[Graph, list[Any]]:
    """The log density, Jacobians of the transforms included, and what is shown, of values.

    Also what is constant in it, but need not be so in the model.
    """
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.graph.traversal import graph_inputs
    from pytensor.tensor.random.type import RandomType

    names = [_LOG_DENSITY, *(variable.name for variable in shown)]
    inputs = [variable.name for variable in model.value_vars]
    try:
        outputs = [model.logp(_factors(model)), *shown]
        leaves = list(graph_inputs(outputs))
        random = any(isinstance(leaf.type, RandomType) for leaf in leaves)
        function = None if random else sampling.get_jaxified_graph(model.value_vars, outputs)
    except Exception as error:
        raise _not_in_jax(error) from error
    if function is None:
        raise ValueError(
            "model: its log density is random (pm.Minibatch, pm.Simulator, or random numbers that "
            "are no variables), but whether a proposal is accepted depends on all of the data; "
            "pass them as they are."
        )
    shared = [leaf.get_value() for leaf in leaves if isinstance(leaf, SharedVariable)]

    def graph(values: dict[str, Any]) -> dict[str, jax.Array]:
        return dict(zip(names, function(*(values[name] for name in inputs)), strict=True))

    return graph, shared


def _factors(model: Model) -> list[Any]:
    """The variables whose log densities add up to that of the model.

    Each of them once: ``pm.sample_posterior_predictive`` leaves observed variables in the model's
    list twice, and then ``model.logp()`` fails.
    """
    return list(dict.fromkeys([*model.basic_RVs, *model.potentials]))


def _check_density(model: Model, graph: Graph, start: Point) -> float:
    """The log density at a point beside the start; refused if it is finite nowhere there."""

    def log_density(point: dict[str, Any]) -> jax.Array:
        return graph(point)[_LOG_DENSITY]

    rng = np.random.default_rng(0)
    points = {}
    for name, value in start.items():
        away = _JITTER * rng.uniform(-1, 1, (_POINTS, *value.shape))
        away[-1] = 0.0
        points[name] = (value + away).astype(value.dtype)
    try:
        jax.eval_shape(graph, start)
        found = np.asarray(jax.jit(lambda points: jax.lax.map(log_density, points))(points))
    except Exception as error:
        raise _not_in_jax(error) from error
    if not np.any(np.isfinite(found)):
        factors = _factors(model)
        logps: Any = model.logp(factors, sum=False)
        terms = model.compile_fn([logp.sum() for logp in logps], inputs=model.value_vars)
        values = map(float, terms(start))
        parts = {factor.name: value for factor, value in zip(factors, values, strict=True)}
        broken = {name: value for name, value in parts.items() if not np.isfinite(value)}
        raise ValueError(
            f"model: its log density is {found[-1]} at its initial point, and not finite around it "
            f"either, because of {checks.shown(broken or parts)}; check the data, or start inside "
            "the support with initval=..."
        )
    return float(found[0])


def _not_in_jax(error: Exception) -> ValueError:
    said = f"{type(error).__name__}: {error}".strip()
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
    return ValueError(
        f"model: PyMC cannot express it in JAX and says: {said}\nReplace what it names, or use "
        "PyMC's own samplers."
    )
