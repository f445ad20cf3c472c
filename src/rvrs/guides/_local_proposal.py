"""Proposals for local latent variables: normals of each data point, or a user's guide."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import helpful_support_errors

from rvrs.guides import _numpyro, _plate
from rvrs.guides._plate import GUIDE, LocalProgram, Plate, Rows, Shared
from rvrs.guides._replay import Distributions


class LocalProposal(Protocol):
    """Distributions of the local sites of one data point."""

    def register(
        self, program: LocalProgram, shared: Shared, rows: Rows, num_points: int
    ) -> dict[str, Any]:
        """Register the ``numpyro.param`` sites and return their values."""
        ...

    def distributions(self, program: LocalProgram, shared: Shared, row: Rows) -> Distributions:
        """The distributions of one data point, over values with a plate axis of 1."""
        ...

    def tables(self, plate: Plate) -> tuple[str, ...]:
        """Names of the parameters that have one row per data point, and no other use."""
        ...

    def forgetting(self) -> AbstractContextManager[None]:
        """Inside, whatever is learned of a model that JAX is tracing is forgotten in the end."""
        ...


def first_row(rows: Rows) -> Rows:
    """The first data point of a batch."""
    return jax.tree.map(lambda leaf: leaf[0], rows)


class PointwiseNormal:
    """Independent normals over unconstrained values, with parameters of every data point."""

    def __init__(self, prefix: str, init_scale: float) -> None:
        self._prefix = prefix
        self._init_scale = init_scale

    def register(
        self, program: LocalProgram, shared: Shared, rows: Rows, num_points: int
    ) -> dict[str, Any]:
        """Location and scale, one row per data point."""
        supports = jax.eval_shape(lambda row: self._feasible(program, shared, row), first_row(rows))
        found = {}
        for site in program.plate.local:
            # The plate's axis, of length 1, gives way to the leading axis of all points.
            row_shape = list(supports[site.name][0].shape)
            del row_shape[site.num_left]
            shape = (num_points, *row_shape)
            loc, scale = self._names(site.name)
            found[loc] = numpyro.param(loc, jnp.zeros(shape))
            found[scale] = numpyro.param(
                scale, jnp.full(shape, self._init_scale), constraint=constraints.softplus_positive
            )
        return found

    def tables(self, plate: Plate) -> tuple[str, ...]:
        """All of them."""
        return tuple(name for site in plate.local for name in self._names(site.name))

    def forgetting(self) -> AbstractContextManager[None]:
        """Nothing is learned that could be forgotten."""
        return nullcontext()

    def distributions(self, program: LocalProgram, shared: Shared, row: Rows) -> Distributions:
        """Normals, carried to the support that the site has in this run of the model."""
        found = {}
        for name, (start, transform) in self._feasible(program, shared, row).items():
            loc, scale = (
                jnp.take(shared.parameters[parameter], row.own, axis=0).reshape(start.shape)
                for parameter in self._names(name)
            )
            normal = dist.Normal(loc, scale)
            identity = isinstance(transform, dist.transforms.IdentityTransform)
            found[name] = normal if identity else dist.TransformedDistribution(normal, transform)
        return found

    def _names(self, site: str) -> tuple[str, str]:
        return f"{self._prefix}_{site}_loc", f"{self._prefix}_{site}_scale"

    @staticmethod
    def _feasible(
        program: LocalProgram, shared: Shared, row: Rows
    ) -> dict[str, tuple[jax.Array, Any]]:
        """An unconstrained value of every local site, and the transform to its support."""
        trace = _plate.run_feasible(
            program.function,
            program.at_row(shared, row),
            {**shared.parameters, program.plate.name: row.number[None]},
        )
        found = {}
        for site in program.plate.local:
            with helpful_support_errors(trace[site.name]):
                transform = biject_to(trace[site.name]["fn"].support)
            found[site.name] = (transform.inv(trace[site.name]["value"]), transform)
        return found


class GuideProposal:
    """The distributions of a NumPyro guide's sample sites, an encoder's among them."""

    def __init__(self, guide: Callable) -> None:
        self._guide = guide

    def register(
        self, program: LocalProgram, shared: Shared, rows: Rows, num_points: int
    ) -> dict[str, Any]:
        """The guide's own ``numpyro.param`` sites."""
        values = {**shared.parameters, program.plate.name: rows.number}
        trace = _plate.run(self._guide, program.arguments, values)
        self._check(program, trace)
        return _numpyro.model_parameters(trace)

    def tables(self, plate: Plate) -> tuple[str, ...]:
        """None: what the guide does with its parameters is not known."""
        return ()

    def check(self, program: LocalProgram, parameters: dict[str, Any]) -> None:
        """Refuse a guide whose sites are not those of the model's plate."""
        values = {**parameters, program.plate.name: jnp.arange(program.plate.num_rows)}
        self._check(program, _plate.run(self._guide, program.arguments, values))

    def distributions(self, program: LocalProgram, shared: Shared, row: Rows) -> Distributions:
        """Those of a run of the guide for one data point."""
        values = {**shared.parameters, program.plate.name: row.number[None]}
        trace = _plate.run(self._guide, program.at_row(shared, row), values)
        return {site.name: trace[site.name]["fn"] for site in program.plate.local}

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Let an autoguide forget what it learns of the model inside, while JAX is tracing."""
        knows = getattr(self._guide, "prototype_trace", None) is not None
        try:
            yield
        finally:
            if not knows and isinstance(self._guide, AutoGuide):
                self._guide.prototype_trace = None

    def check_independent(self, program: LocalProgram, shared: Shared, row: Rows) -> None:
        """Refuse a guide one of whose sites depends on the draw at another."""

        def look(key: jax.Array) -> jax.Array:
            values = {**shared.parameters, program.plate.name: row.number[None]}
            trace = _plate.run(self._guide, program.at_row(shared, row), values, key)
            for site in program.plate.local:
                leaves = jax.tree.leaves(trace[site.name]["fn"])
                if any(_numpyro.is_batched_by_vmap(leaf) for leaf in leaves):
                    raise ValueError(
                        f"local_guide: the distribution of site {site.name!r} depends on the draw "
                        "at another site (or draws random numbers of its own); make the local "
                        "sites independent given the data, or join them in one site."
                    )
            return jnp.zeros(())

        jax.eval_shape(jax.vmap(look), jax.random.split(jax.random.key(0)))

    def _check(self, program: LocalProgram, trace: dict[str, Any]) -> None:
        plate = program.plate
        latent = {
            name: site
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"]
        }
        wanted, given = {site.name for site in plate.local}, set(latent)
        if wanted != given:
            missing = ", ".join(sorted(map(repr, wanted - given))) or "none"
            unknown = ", ".join(sorted(map(repr, given - wanted))) or "none"
            raise ValueError(
                "local_guide: its sample sites must be the local latent sites of the model's plate "
                f"{plate.name!r}; missing: {missing}; not in the plate of the model: {unknown}."
            )
        if any(site["type"] == "mutable" for site in trace.values()):
            raise ValueError(f"{GUIDE}: local_guide has mutable state; use the module without it.")
        for name, site in latent.items():
            if not any(frame.name == plate.name for frame in site["cond_indep_stack"]):
                raise ValueError(
                    f"local_guide: site {name!r} is not inside the plate {plate.name!r}; put it "
                    "there, as in the model."
                )
            event_dim = next(local.event_dim for local in plate.local if local.name == name)
            if site["fn"].event_dim != event_dim:
                raise ValueError(
                    f"local_guide: site {name!r} has {site['fn'].event_dim} event dimensions, but "
                    f"{event_dim} in the model; use to_event as there."
                )
            base = site["fn"]
            while isinstance(base, dist.Independent | dist.ExpandedDistribution):
                base = base.base_dist
            if isinstance(base, dist.Delta) or not base.has_rsample:
                raise ValueError(
                    f"local_guide: the distribution of site {name!r} ({type(base).__name__}) has "
                    "no density with a reparameterized sampler; use one that has, e.g. Normal, "
                    "LogNormal, Gamma, Beta or Dirichlet."
                )
