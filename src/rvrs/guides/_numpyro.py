"""Everything that we ask of NumPyro beyond handlers and primitives, in one place.

The names that NumPyro does not promise to keep, all of them listed in ``PRIVATE``, are used in
this file and nowhere else.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import UnpackTransform
from numpyro.distributions.util import sum_rightmost
from numpyro.infer import autoguide
from numpyro.infer.autoguide import AutoContinuous, AutoDAIS
from numpyro.infer.initialization import init_to_feasible
from numpyro.infer.util import helpful_support_errors, potential_energy

from rvrs.core.arguments import check_like, shown

PRIVATE = {
    AutoContinuous: (
        "_get_posterior",
        "_init_latent",
        "_init_locs",
        "_setup_prototype",
        "_unpack_latent",
    ),
    AutoDAIS: (
        "_potential_fn",
        "_sample_latent",
    ),
    autoguide: (
        "_ravel_dict",
        "_ravel_dict_with_shape_dict",
        "_unravel_dict",
    ),
}
"""Private names of NumPyro's classes and modules that we use; a test pins them."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


class Constrained(NamedTuple):
    """A draw of the latent sites in the space of the model."""

    values: dict[str, jax.Array]
    log_jacobians: dict[str, jax.Array]
    """Log absolute determinant of the map from unconstrained values, one sum per site's batch."""
    event_dims: dict[str, int]
    deterministic: dict[str, jax.Array]
    missing: list[str]
    """Sites of the model that are neither observed nor among the values."""


def log_joint(
    model: Callable, arguments: Arguments, parameters: dict[str, Any], latent: dict[str, jax.Array]
) -> jax.Array:
    """``log p(x, z)`` at unconstrained latent values, the log Jacobian included.

    Nothing of it is seen by handlers outside, whose masks and substitutions are not meant for it.
    """
    with handlers.block():
        potential: Any = potential_energy(_fixed(model, parameters), *arguments, latent)
    return -potential


def constrain(
    model: Callable, arguments: Arguments, parameters: dict[str, Any], latent: dict[str, jax.Array]
) -> Constrained:
    """Run the model at unconstrained latent values.

    The supports are those of this run, so they may depend on other latents and on the data.
    """
    jacobians, dims = {}, {}

    def substitute(site: dict) -> jax.Array | None:
        if site["type"] != "sample" or site["name"] not in latent:
            return None
        name = site["name"]
        with helpful_support_errors(site):
            transform = biject_to(site["fn"].support)
        value = transform(latent[name])
        jacobian = transform.log_abs_det_jacobian(latent[name], value)
        dims[name] = site["fn"].event_dim
        excess = jnp.ndim(jacobian) - jnp.ndim(value) + dims[name]
        jacobians[name] = sum_rightmost(jacobian, excess)
        return value

    with handlers.block():
        trace = handlers.trace(
            handlers.substitute(_fixed(model, parameters), substitute_fn=substitute)
        ).get_trace(*arguments[0], **arguments[1])
    sites = trace.values()
    return Constrained(
        values={name: trace[name]["value"] for name in latent if name in trace},
        log_jacobians=jacobians,
        event_dims=dims,
        deterministic={s["name"]: s["value"] for s in sites if s["type"] == "deterministic"},
        missing=[
            s["name"]
            for s in sites
            if s["type"] == "sample" and not s["is_observed"] and s["name"] not in latent
        ],
    )


def check_model(model: Callable, arguments: Arguments, rng_key: jax.Array, guide: str) -> None:
    """Refuse, by name, what a guide over all continuous latents with all of the data cannot do."""
    with handlers.block():
        model = at_feasible(handlers.seed(model, rng_key))
        trace = handlers.trace(model).get_trace(*arguments[0], **arguments[1])
    latent = [s for s in trace.values() if s["type"] == "sample" and not s["is_observed"]]
    if not latent:
        raise ValueError(
            f"{guide}: the model has no latent variables; there is nothing to infer. If the data "
            "were left out, pass them as the model's arguments."
        )
    for site in latent:
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"{guide}: latent site {site['name']!r} is discrete; sum it out of the model "
                "(e.g. with dist.MixtureSameFamily) or use a sampler for discrete sites."
            )
    for site in trace.values():
        if site["type"] == "plate":
            size, subsample_size = site["args"]
            if subsample_size is not None and subsample_size < size:
                raise ValueError(
                    f"{guide}: plate {site['name']!r} is subsampled ({subsample_size} of {size}), "
                    "but the acceptance of a proposal needs all of the data; remove "
                    "subsample_size."
                )
        if site["type"] == "mutable":
            raise ValueError(
                f"{guide}: the model has mutable state ({site['name']!r}), so that its density "
                "changes from one evaluation to the next; use the module without it."
            )


def at_feasible(model: Callable) -> Callable:
    """The model at values inside the supports, whether or not its priors can be sampled."""
    return handlers.substitute(model, substitute_fn=init_to_feasible)


def model_parameters(trace: dict[str, Any]) -> dict[str, Any]:
    """Register the ``numpyro.param`` sites of a model's trace, with their constraints."""
    return {
        # By a function, since NumPyro would call a value that is callable, such as a network.
        name: numpyro.param(
            name, partial(_constant, site["value"]), **_copy_without_none(site["kwargs"])
        )
        for name, site in trace.items()
        if site["type"] == "param"
    }


def parameter_trace(function: Callable, *args: Any) -> dict[str, Any]:
    """The trace of a function that registers ``numpyro.param`` sites."""
    with handlers.block(), handlers.trace() as trace:
        handlers.seed(function, rng_seed=0)(*args)
    return dict(trace)


def check_parameters(params: Any, trace: dict[str, Any], advice: str) -> None:
    """Refuse parameters that are not those of a run with this trace."""
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params must be a dict of parameters by name, got {shown(params)}; pass "
            "svi_result.params of a run with this guide."
        )
    for name, site in trace.items():
        if site["type"] != "param":
            continue
        if name not in params:
            raise ValueError(
                f"params has no {name!r}: it does not belong to this guide and model; pass "
                "svi_result.params of a run with this guide."
            )
        check_like(f"params[{name!r}]", params[name], site["value"], advice)


def check_signature(model: Callable, arguments: Arguments, needs: str) -> None:
    """Refuse arguments that a model cannot be called with."""
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # not every callable has one
        return
    try:
        signature.bind(*arguments[0], **arguments[1])
    except TypeError as error:
        raise TypeError(f"{needs}: {error}.") from None


def named_arguments(model: Callable, arguments: Arguments) -> dict[str, Any]:
    """Arguments by the names of the model's parameters; by place, where it does not tell them."""
    positional, keywords = arguments
    try:
        return dict(inspect.signature(model).bind(*positional, **keywords).arguments)
    except (TypeError, ValueError):
        return {str(place): value for place, value in enumerate(positional)} | keywords


def stock_posterior(guide: AutoContinuous, parameters: dict[str, Any]) -> Any:
    """The distribution of an autoguide over flat unconstrained vectors."""
    with handlers.block(), handlers.seed(rng_seed=0), handlers.substitute(data=parameters):
        return guide._get_posterior()


def register_stock(guide: AutoContinuous) -> dict[str, Any]:
    """Register the parameters of an autoguide and return their values."""
    with handlers.trace() as trace:
        guide._get_posterior()
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def parameter_transforms(guide: AutoContinuous) -> dict[str, Any]:
    """The transforms from unconstrained values of an autoguide's parameters."""
    with handlers.block(), handlers.seed(rng_seed=0), handlers.trace() as trace:
        guide._get_posterior()
    return constraint_transforms(trace)


def constraint_transforms(trace: dict[str, Any]) -> dict[str, Any]:
    """The transforms from unconstrained values of the ``numpyro.param`` sites of a trace."""
    return {
        name: biject_to(site["kwargs"].get("constraint", constraints.real))
        for name, site in trace.items()
        if site["type"] == "param"
    }


def order_latent(guide: Any) -> None:
    """Lay an autoguide's flat vector out in the order of the model's sites.

    NumPyro does so too, unless it learns the structure while JAX is tracing: then the order is
    alphabetical, and parameters would mean something else inside ``jit`` or ``vmap`` than outside.
    """
    guide._init_locs = {
        name: guide._init_locs[name] for name in guide.prototype_trace if name in guide._init_locs
    }
    guide._init_latent, shapes = autoguide._ravel_dict(guide._init_locs)
    guide._unpack_latent = UnpackTransform(
        partial(autoguide._unravel_dict, shape_dict=shapes), autoguide._ravel_dict_with_shape_dict
    )


def is_batched_by_vmap(x: Any) -> bool:
    """Whether the innermost transformation that ``x`` is traced by is ``vmap``."""
    # By its name, since JAX keeps the class private.
    return isinstance(x, Tracer) and type(x).__name__ == "BatchTracer"


def _fixed(model: Callable, parameters: dict[str, Any]) -> Callable:
    """The model with its parameters set, and the same random numbers at every run, if any."""
    return handlers.substitute(handlers.seed(model, rng_seed=0), data=parameters)


def _constant(value: Any, _: jax.Array) -> Any:
    return value


def _copy_without_none(kwargs: dict[str, Any]) -> dict[str, Any]:
    # A copy, because NumPyro's SVI pops the constraint from the kwargs that it is given.
    return {name: value for name, value in kwargs.items() if value is not None}
