"""Learning how a model is made around its plate, and refusing what cannot be taken apart."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rvrs.core.arguments import NEEDS_VALUES, needs_values
from rvrs.guides import _plate, _replay
from rvrs.guides._local_proposal import GuideProposal
from rvrs.guides._numpyro import Arguments
from rvrs.guides._plate import GUIDE, LocalProgram, Plate
from rvrs.guides._semi_target import Parameters, SemiTarget


def inspect(
    target: SemiTarget, subsample_plate: str | None, arguments: Arguments
) -> tuple[Plate, dict[str, Any]]:
    """The plate of a model, and the trace of a run of it."""
    plate, trace = _plate.find(target.model, arguments, subsample_plate)
    if plate.global_names and target.global_guide is None:
        raise ValueError(
            f"global_guide is missing: the model has global latent sites "
            f"({', '.join(plate.global_names)}); pass a guide for them, e.g. "
            "AutoNormal(global_model)."
        )
    latents = {name: trace[name]["value"] for name in plate.global_names}
    parameters = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
    program = target.local_program(plate, parameters, latents, arguments)
    return _find_rows(target, program, parameters), trace


def inspect_shapes(target: SemiTarget, subsample_plate: str | None, arguments: Arguments) -> Plate:
    """The plate of a model with these arguments, of which only shapes are looked at."""
    found: list[Plate] = []
    leaves, structure = jax.tree.flatten(arguments)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def look(arrays: list[jax.Array]) -> jax.Array:
        traced = dict(zip(places, arrays, strict=True))
        given = [traced.get(place, leaf) for place, leaf in enumerate(leaves)]
        whole = jax.tree.unflatten(structure, given)
        found.append(inspect(target, subsample_plate, whole)[0])
        return jnp.zeros(())

    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
        for leaf in (leaves[place] for place in places)
    ]
    with target.local_proposal.forgetting():
        try:
            jax.eval_shape(look, shapes)
        except NEEDS_VALUES as error:
            raise needs_values("model") from error
    return found[0]


def _find_rows(target: SemiTarget, program: LocalProgram, parameters: Parameters) -> Plate:
    """Find out which arguments have one row per data point, by the shapes that come out."""
    plate = program.plate
    with_rows = tuple(
        place
        for place, leaf in enumerate(jax.tree.leaves(program.arguments))
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.shape[:1] == (plate.num_rows,)
    )
    for row_leaves in _candidates(with_rows):
        candidate = plate._replace(row_leaves=row_leaves)
        if _runs_alone(target, program._replace(plate=candidate), parameters):
            return candidate
    if isinstance(target.local_proposal, GuideProposal):
        target.local_proposal.check(program, parameters)
        raise ValueError(
            f"{GUIDE}: local_guide or the model cannot be run for one data point of plate "
            f"{plate.name!r} alone; let both take their rows by the plate's index "
            "(numpyro.subsample, or x[index]) or as arguments with one row per point."
        )
    warnings.warn(
        f"{GUIDE}: the model does not take its rows by the index of plate {plate.name!r} nor as "
        f"arguments, so that every proposal for one point computes with all {plate.num_rows}; use "
        "numpyro.subsample or x[index].",
        stacklevel=5,
    )
    return plate


# Arguments with as many rows as the batch has by chance are few; so many can be left out.
_MOST_LEFT_OUT = 2


def _candidates(with_rows: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Which leaves may be those with one row per data point: none, all, or nearly all."""
    yield ()
    for left_out in range(min(_MOST_LEFT_OUT + 1, len(with_rows))):
        yield from itertools.combinations(with_rows, len(with_rows) - left_out)


def _runs_alone(target: SemiTarget, program: LocalProgram, parameters: Parameters) -> bool:
    """Whether a run for one data point gives numbers of this point only."""
    plate = program.plate
    alone: list[bool] = []

    def look() -> jax.Array:
        shared = program.shared(parameters)
        row = jax.tree.map(lambda leaf: leaf[0], program.rows(jnp.arange(1)))
        values = {**parameters, plate.name: row.number[None]}
        trace = _plate.run_feasible(program.function, program.at_row(shared, row), values)
        alone.extend(
            len(term) == 1 for term in _plate.log_terms(trace, plate.name, plate.dim).values()
        )
        if isinstance(target.local_proposal, GuideProposal):
            found = target.local_proposal.distributions(program, shared, row)
            alone.extend(fn.batch_shape[plate.dim] == 1 for fn in found.values())
        return jnp.zeros(())

    try:
        with target.local_proposal.forgetting():
            jax.eval_shape(look)
    except (TypeError, ValueError, IndexError, KeyError):
        # Shapes that do not go together, or a local guide that lacks a site.
        return False
    return all(alone)


# In units of the log densities' own rounding: the same numbers added up in another order.
_TOLERANCE = 1e-3


def verify(
    target: SemiTarget,
    plate: Plate,
    parameters: Parameters,
    latents: Parameters,
    index: jax.Array,
    arguments: Arguments,
) -> bool:
    """Refuse a model whose data points are not independent given the global latents.

    Compares runs for single points with a run for the whole batch. Needs values: returns False
    while JAX is tracing.
    """
    everything = jax.tree.leaves((parameters, latents, index, arguments))
    if any(isinstance(leaf, Tracer) for leaf in everything):
        return False
    program = target.local_program(plate, parameters, latents, arguments)
    shared, rows = program.shared(parameters), program.rows(index)
    if isinstance(target.local_proposal, GuideProposal):
        first = jax.tree.map(lambda leaf: leaf[0], rows)
        target.local_proposal.check_independent(program, shared, first)
    problem, targets = target.problem(program, parameters, rows)

    def runs(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        noise = _replay.sample_noise(key, (len(index),), targets.proposal)
        z, _ = jax.vmap(problem.propose)(targets.proposal, noise)
        alone = jax.vmap(problem.log_joint, (None, 0, 0))(shared, targets.data, z)
        local = {site.name: _plate.to_batch(site, z[site.name]) for site in plate.local}
        values = {**parameters, **latents, **local, plate.name: index}
        trace = _plate.run(target.model, arguments, values)
        terms = _plate.log_terms(trace, plate.name, plate.dim).values()
        return alone, sum(terms, jnp.zeros(())), _plate.log_outside(trace, plate.name)

    alone, together, outside = jax.jit(jax.vmap(runs))(jax.random.split(jax.random.key(0)))
    if not _same(alone, together):
        raise ValueError(
            f"{GUIDE}: the log density of a data point of plate {plate.name!r} depends on other "
            "points of the batch. Local latents must be independent given the global ones: no time "
            "series across the plate, no sums over it, no batch normalisation."
        )
    if not _same(outside[:1], outside[1:]):
        raise ValueError(
            f"{GUIDE}: a site outside of plate {plate.name!r} depends on local latents; sites that "
            "do must be inside of the plate, one for every data point."
        )
    return True


def _same(first: jax.Array, second: jax.Array) -> bool:
    finite = jnp.isfinite(first) & jnp.isfinite(second)
    size = 1 + jnp.abs(first)
    return bool(jnp.all(jnp.where(finite, jnp.abs(first - second) <= _TOLERANCE * size, True)))
