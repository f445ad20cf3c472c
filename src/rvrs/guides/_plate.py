"""The plate of data points: what a model has inside and outside of it, and one row of it alone.

The core works on independent targets. A data point becomes one by running the model with a plate
that holds this point only; :func:`jax.vmap` then makes a batch of it. Nothing is assumed about how
the model finds the data of its points: by the plate's index (``x[index]`` or
``numpyro.subsample``), as arrays with one row per point among its arguments, or as arrays that it
just has.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.core import Tracer
from numpyro import handlers

from rvrs.guides import _numpyro
from rvrs.guides._numpyro import Arguments

GUIDE = "AutoSemiRVRS"


class LocalSite(NamedTuple):
    """A latent site inside the plate."""

    name: str
    event_dim: int
    axis: int
    """The plate's axis in values of the site, counted from the right."""
    num_left: int
    """Axes to the left of it, in constrained and unconstrained values alike."""


class Plate(NamedTuple):
    """The structure of a model around its plate of data points; hashable."""

    name: str
    size: int
    """The number of data points, N."""
    num_rows: int
    """Data points in one run of the model, B."""
    dim: int
    local: tuple[LocalSite, ...]
    global_names: tuple[str, ...]
    """Latent sites outside of the plate."""
    outside: tuple[str, ...]
    """All sample sites outside of the plate, observed ones among them."""
    row_leaves: tuple[int, ...] = ()
    """Which leaves of the arguments of the local part have one row per data point."""


def find(model: Callable, arguments: Arguments, name: str | None) -> tuple[Plate, dict[str, Any]]:
    """The plate of a model, and the trace of a run at feasible values.

    ``name`` says which plate is meant where the model does not tell by subsampling it.
    """
    trace = run_feasible(model, arguments, {})
    plates = {site["name"]: site["args"] for site in trace.values() if site["type"] == "plate"}
    name = _choose(plates, name)
    latent = [s for s in trace.values() if s["type"] == "sample" and not s["is_observed"]]
    _refuse(trace, latent)
    local, global_names, dims = [], [], set()
    for site in latent:
        frames = [frame for frame in site["cond_indep_stack"] if frame.name == name]
        if frames:
            dims.add(frames[0].dim)
            event_dim = site["fn"].event_dim
            axis = frames[0].dim - event_dim
            num_left = jnp.ndim(site["value"]) + axis
            local.append(LocalSite(site["name"], event_dim, axis, num_left))
        else:
            global_names.append(site["name"])
    if not local:
        raise ValueError(
            f"{GUIDE}: there are no local latent variables in plate {name!r}; use rvrs.AutoRVRS "
            "for a model with global ones only."
        )
    if len(dims) > 1:
        raise ValueError(f"{GUIDE}: plate {name!r} has several dims ({sorted(dims)}); give it one.")
    size, num_rows = plates[name]
    num_rows = size if num_rows is None else num_rows
    outside = [s["name"] for s in trace.values() if s["type"] == "sample" and not _inside(s, name)]
    plate = Plate(
        name, size, num_rows, dims.pop(), tuple(local), tuple(global_names), tuple(outside)
    )
    return plate, trace


def _choose(plates: dict[str, tuple[int, int | None]], name: str | None) -> str:
    subsampled = [n for n, (size, rows) in plates.items() if rows is not None and rows < size]
    if name is not None and name not in plates:
        raise ValueError(
            f"subsample_plate={name!r} is not a plate of the model, which has "
            f"{', '.join(map(repr, plates)) or 'none'}."
        )
    if len(subsampled) > 1:
        raise ValueError(
            f"{GUIDE}: the model subsamples more than one plate ({', '.join(subsampled)}); data "
            "points must be those of one plate, so keep subsample_size at one only."
        )
    if name is not None and subsampled and subsampled[0] != name:
        raise ValueError(
            f"subsample_plate={name!r}, but the model subsamples plate {subsampled[0]!r}; name "
            "that one, or remove its subsample_size."
        )
    candidates = [name] if name is not None else subsampled or list(plates)
    if len(candidates) != 1:
        known = ", ".join(map(repr, candidates)) or "none"
        raise ValueError(
            f"{GUIDE}: the plate of the data points is not clear (plates: {known}); put them in a "
            "numpyro.plate and name it in subsample_plate."
        )
    return candidates[0]


def _refuse(trace: dict[str, Any], latent: list[dict[str, Any]]) -> None:
    for site in latent:
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"{GUIDE}: latent site {site['name']!r} is discrete; sum it out of the model "
                "(e.g. with dist.MixtureSameFamily)."
            )
    for site in trace.values():
        if site["type"] == "mutable":
            raise ValueError(
                f"{GUIDE}: the model has mutable state ({site['name']!r}), so that its density "
                "changes from one evaluation to the next; use the module without it."
            )


def run(
    function: Callable, arguments: Arguments, values: dict[str, Any], rng_seed: Any = 0
) -> dict[str, Any]:
    """The trace of a model or guide, with sites, parameters and plate indices as given.

    Nothing of it is seen by handlers outside. Random numbers, if any are left to draw, are the
    same at every run with the same seed.
    """
    return _run(handlers.seed(function, rng_seed), arguments, values)


def run_feasible(
    function: Callable, arguments: Arguments, values: dict[str, Any]
) -> dict[str, Any]:
    """The same, with some value inside its support at every latent site that is not given."""
    return _run(_numpyro.at_feasible(handlers.seed(function, 0)), arguments, values)


def _run(function: Callable, arguments: Arguments, values: dict[str, Any]) -> dict[str, Any]:
    with handlers.block(), warnings.catch_warnings():
        # That an index has another length than the plate's subsample is the point here.
        warnings.filterwarnings("ignore", "subsample_size does not match")
        # Nor does it matter that a site has its value when a feasible one is looked for.
        warnings.filterwarnings("ignore", "init_to_uniform.. skipping initialization")
        fixed = handlers.substitute(function, data=values)
        return handlers.trace(fixed).get_trace(*arguments[0], **arguments[1])


class Rows(NamedTuple):
    """Data points; every leaf has one row per point."""

    number: jax.Array
    """Which of the plate's points it is, from 0 to N - 1."""
    position: jax.Array
    """Its row in the arguments."""
    own: jax.Array
    """Its row in the proposal's tables of parameters."""
    arrays: tuple[jax.Array, ...]
    """Its rows of the arguments that have one per point, with an axis of length 1 in place of the
    batch's."""


class Shared(NamedTuple):
    """What all data points have in common, and gradients flow into."""

    parameters: dict[str, Any]
    """``numpyro.param`` sites of model and guide, by name."""
    arrays: tuple[jax.Array, ...]
    """Arrays among the arguments that are not the data points' own."""


class LocalProgram(NamedTuple):
    """The part of the model inside the plate, with its arguments."""

    function: Callable
    arguments: Arguments
    plate: Plate

    def rows(
        self,
        index: jax.Array,
        position: jax.Array | None = None,
        own: jax.Array | None = None,
    ) -> Rows:
        """Data points, by their indices and their rows in the arguments (by default the first).

        ``own`` are their rows in tables of parameters, by default their indices.
        """
        position = jnp.arange(len(index)) if position is None else position
        own = index if own is None else own
        leaves = jax.tree.leaves(self.arguments)
        arrays = [jnp.asarray(leaves[place])[position] for place in self.plate.row_leaves]
        return Rows(index, position, own, tuple(array[:, None] for array in arrays))

    def shared(self, parameters: dict[str, Any]) -> Shared:
        """What the data points have in common."""
        leaves = jax.tree.leaves(self.arguments)
        return Shared(parameters, tuple(leaves[place] for place in self._shared_leaves))

    def at_row(self, shared: Shared, row: Rows) -> Arguments:
        """The arguments for one data point."""
        leaves, structure = jax.tree.flatten(self.arguments)
        arrays = dict(zip(self.plate.row_leaves, row.arrays, strict=True))
        arrays |= dict(zip(self._shared_leaves, shared.arrays, strict=True))
        leaves = [arrays.get(place, leaf) for place, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, leaves)

    def log_joint(self, shared: Shared, row: Rows, z: dict[str, jax.Array]) -> jax.Array:
        """``log p(x_n, z_n | z_G)`` of one data point; values of ``z`` have a plate axis of 1."""
        terms = self.terms(shared, row, z)
        # A term with all points comes of a model that has the data of all of them at hand.
        picked = [term[0] if len(term) == 1 else term[row.position] for term in terms]
        return sum(picked, jnp.zeros(()))

    def terms(self, shared: Shared, row: Rows, z: dict[str, jax.Array]) -> list[jax.Array]:
        """The terms of the log density, ``(1,)`` each if nothing of other points is computed."""
        trace = run(
            self.function,
            self.at_row(shared, row),
            {**shared.parameters, **z, self.plate.name: row.number[None]},
        )
        return list(log_terms(trace, self.plate.name, self.plate.dim).values())

    @property
    def _shared_leaves(self) -> tuple[int, ...]:
        return tuple(
            place
            for place, leaf in enumerate(jax.tree.leaves(self.arguments))
            if isinstance(leaf, jax.Array | np.ndarray) and place not in self.plate.row_leaves
        )


def log_terms(trace: dict[str, Any], plate: str, dim: int) -> dict[str, jax.Array]:
    """Log densities of the sites inside the plate, one number per data point, by site."""
    found = {}
    for site in trace.values():
        if site["type"] != "sample" or not _inside(site, plate):
            continue
        term = jnp.asarray(site["fn"].log_prob(site["value"]))
        term = term.reshape((1,) * (-dim - term.ndim) + term.shape)
        found[site["name"]] = _unscaled(site, trace[plate]) * jnp.sum(
            jnp.moveaxis(term, dim, 0).reshape(term.shape[dim], -1), axis=1
        )
    return found


def log_outside(trace: dict[str, Any], plate: str) -> jax.Array:
    """The sum of log densities of the sites outside of the plate."""
    total = jnp.zeros(())
    for site in trace.values():
        if site["type"] == "sample" and not _inside(site, plate):
            scale = 1.0 if site["scale"] is None else site["scale"]
            total = total + scale * jnp.sum(site["fn"].log_prob(site["value"]))
    return total


def _inside(site: dict[str, Any], plate: str) -> bool:
    return any(frame.name == plate for frame in site["cond_indep_stack"])


def _unscaled(site: dict[str, Any], plate: dict[str, Any]) -> Any:
    """The scale of a site without what the plate's subsampling contributes to it."""
    if site["scale"] is None:
        return 1.0
    return site["scale"] * (plate["value"].shape[0] / plate["args"][0])


def to_batch(site: LocalSite, value: jax.Array) -> jax.Array:
    """A site's values by rows, ``(B, ...)`` with a plate axis of 1, as the model has them."""
    return jnp.moveaxis(jnp.squeeze(value, site.axis), 0, site.axis)


def enter(plate: Plate) -> Any:
    """The plate itself, to be entered in a guide; gives the indices of the batch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        return numpyro.plate(plate.name, plate.size, plate.num_rows, plate.dim)


def check_index(plate: Plate, index: jax.Array) -> jax.Array:
    """Refuse indices of points that there are not; traced ones cannot be looked at."""
    if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(
            f"the indices of plate {plate.name!r} must be whole numbers along one axis, got "
            f"{index.dtype} of shape {index.shape}."
        )
    if not isinstance(index, Tracer) and not bool(jnp.all((index >= 0) & (index < plate.size))):
        raise ValueError(
            f"the indices of plate {plate.name!r} must be from 0 to {plate.size - 1}, got values "
            f"from {int(index.min())} to {int(index.max())}."
        )
    return index
