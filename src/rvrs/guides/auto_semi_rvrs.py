"""AutoSemiRVRS: a NumPyro guide with rejection for the local latents of a plate."""

import math
import warnings
from collections.abc import Callable
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.core import Tracer
from numpyro import handlers
from numpyro.primitives import mutable

from rvrs.core import arguments as checks
from rvrs.core.objectives import Estimator, ModelGradient
from rvrs.core.problem import PRNGKey
from rvrs.core.rejection import block_size
from rvrs.guides import _numpyro, _plate, _semi_posterior, _semi_structure
from rvrs.guides._local_proposal import GuideProposal, PointwiseNormal
from rvrs.guides._numpyro import Arguments
from rvrs.guides._plate import Plate
from rvrs.guides._program import Programs
from rvrs.guides._semi_posterior import SemiEvidence
from rvrs.guides._semi_target import Parameters, SemiTarget, State, next_state, points_of
from rvrs.settings import Sampler, SemiSettings, default_max_proposals


class AutoSemiRVRS(SemiTarget):
    """Rejection for local latent variables, a parametric guide for global ones.

    The approximation is ``q(z_G) prod_n r_n(z_n | z_G)``: for every data point n a proposal is
    accepted with probability ``sigmoid(log p(x_n, z_n | z_G) - log q_n(z_n) + T_n)``. Unlike
    :class:`rvrs.AutoRVRS` it takes minibatches.

    >>> import jax, optax, numpyro, rvrs
    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> y = jnp.array([0.3, -1.2, 0.8, 2.5, -0.1, 0.4])
    >>> def global_model():
    ...     return numpyro.sample("mean", dist.Normal(0.0, 1.0))
    >>> def local_model(mean):
    ...     with numpyro.plate("data", 6, subsample_size=2) as index:
    ...         precision = numpyro.sample("precision", dist.Gamma(2.0, 2.0))
    ...         numpyro.sample("y", dist.Normal(mean, precision**-0.5), obs=y[index])
    >>> def model():
    ...     local_model(global_model())
    >>> guide = rvrs.AutoSemiRVRS(model, local_model, AutoNormal(global_model))
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    >>> result = svi.run(jax.random.key(0), 100, progress_bar=False)
    >>> with numpyro.handlers.substitute(data={"data": jnp.array([3, 5])}):
    ...     draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(50,))
    >>> draws["precision"].shape
    (50, 2)

    Parameters
    ----------
    model
        A NumPyro model whose local latent variables, and the data that they explain, are inside
        one plate. It takes the rows of a batch by the plate's index (``y[index]`` or
        ``numpyro.subsample``) or as arguments.
    local_model
        The part of the model with the plate. It is called with what ``global_guide.model``
        returns; without global guide, with the arguments of the model.
    global_guide
        A guide for the global latent variables: an autoguide of the global part of the model, or
        any function with their sample sites. None if there are none.
    local_guide
        A guide for the local latent variables, which proposes: a function that has their sample
        sites inside the plate, with distributions that can be sampled with reparameterization
        (Gamma, Beta and Dirichlet among them), with parameters of every data point or an encoder;
        or ``AutoNormal(local_model)``. It is called like ``local_model``; if ``global_guide`` is a
        plain function, with its draws (a dict) before the arguments of the model. None stands for
        independent normals of every data point over unconstrained values.
    subsample_plate
        The name of the plate, where the model does not tell by subsampling it.
    sampler
        ``"exact"`` proposes until every point of the batch has its draws (Algorithm 2, with
        reallocation); ``"budget"`` makes ``num_proposals`` per point and leaves out, and counts,
        points that did not get theirs (Algorithm 3), which is faster and slightly biased.
    num_proposals
        Of the sampler ``"budget"``: proposals per point and step, by default
        ``ceil(2 num_samples / target_acceptance)``.
    target_acceptance, num_samples, epsilon, threshold, estimator, model_gradient
        As for :class:`rvrs.AutoRVRS`; T is one number per data point, each adapted such that its
        acceptance is the target on average. ``model_gradient`` also decides on the gradient that
        flows into the global latents.
    max_proposals
        Bound on the proposals per data point and step, averaged over the batch.
    prefix
        Prefix of the names of all sites of the guide.
    init_scale
        Initial standard deviation of the normals of ``local_guide=None``.

    Notes
    -----
    T of all data points is carried in the mutable state of ``SVI``; a point's T is solved from
    proposals when it is first seen. Sampling and evaluation solve it anew, so parameters and data
    are enough, and new data points need nothing but a ``local_guide`` that can propose for them.
    """

    def __init__(
        self,
        model: Callable,
        local_model: Callable,
        global_guide: Callable | None = None,
        local_guide: Callable | None = None,
        *,
        subsample_plate: str | None = None,
        sampler: Sampler = "exact",
        num_proposals: int | None = None,
        target_acceptance: float = 0.1,
        num_samples: int = 2,
        epsilon: float = 1e-4,
        threshold: float | None = None,
        estimator: Estimator = "reparameterized",
        model_gradient: ModelGradient = "unbiased",
        max_proposals: int | None = None,
        prefix: str = "auto",
        init_scale: float = 0.1,
    ) -> None:
        for name, function in {"model": model, "local_model": local_model}.items():
            checks.check_callable(name, function, "a NumPyro model (a function)")
        for name, guide in {"global_guide": global_guide, "local_guide": local_guide}.items():
            if guide is not None and (not callable(guide) or isinstance(guide, type)):
                raise ValueError(
                    f"{name} must be a guide (a function or an autoguide of a model) or None, got "
                    f"{checks.shown(guide)}."
                )
        checks.check_word("prefix", prefix)
        if subsample_plate is not None:
            checks.check_word("subsample_plate", subsample_plate)
        checks.check_positive("init_scale", init_scale)
        checks.check_count("num_samples", num_samples)
        checks.check_target_acceptance(target_acceptance, epsilon=0)
        checks.check_block(2 * num_samples, target_acceptance)
        checks.check_choice("sampler", sampler, get_args(Sampler))
        if sampler == "budget" and num_proposals is None:
            num_proposals = block_size(2 * num_samples, target_acceptance)
        self.settings = SemiSettings(
            target_acceptance=target_acceptance,
            num_samples=num_samples,
            epsilon=epsilon,
            threshold=threshold,
            estimator=estimator,
            max_proposals=default_max_proposals(max_proposals, num_samples, target_acceptance),
            model_gradient=model_gradient,
            sampler=sampler,
            num_proposals=num_proposals,
        )
        self.local_model = local_model
        self.global_guide = global_guide
        self.subsample_plate = subsample_plate
        self.local_proposal = (
            PointwiseNormal(prefix, init_scale)
            if local_guide is None
            else GuideProposal(local_guide)
        )
        self.programs = Programs()
        self._verified = False
        super().__init__(model, prefix=prefix)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"programs": Programs()}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """One draw of all latents of the batch, and the factor that completes the loss."""
        arguments = (args, kwargs)
        rng_key = cast(PRNGKey, numpyro.prng_key())
        plate, data_plate, index, parameters, latents = self._register(arguments)
        if not self._verified:
            self._verified = _semi_structure.verify(
                self, plate, parameters, latents, index, arguments
            )
        state: Any = mutable(self._state_name)
        if state is None:
            # NumPyro takes and gives back any tree of arrays here.
            state = cast(Any, mutable)(self._state_name, self.first_state(plate.size))
        else:
            _check_state(plate, rng_key, state)
        now = (rng_key, parameters, latents, points_of(dict(state), index))
        step = self.programs.call(self.local_step, (plate, None), now, arguments)
        state.update(next_state(dict(state), index, step.visit))
        # The model that SVI runs on the draw has this term; the factor takes it away.
        emitted = plate.size / len(index) * jnp.sum(step.log_joint)
        numpyro.factor(f"{self.prefix}_surrogate", emitted - step.surrogate)
        result = dict(latents)
        with data_plate:
            for site in plate.local:
                delta = dist.Delta(step.z[site.name], event_dim=site.event_dim)
                result[site.name] = numpyro.sample(site.name, delta)
        return result

    def sample_posterior(
        self,
        rng_key: PRNGKey,
        params: Parameters,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Draws of all latent and deterministic sites, local ones for the points of a batch.

        The points are those of the model's plate: all of them, or where it subsamples, those that
        are chosen with ``numpyro.handlers.substitute(data={plate_name: indices})``, or random
        ones. For new data call it with these, where ``local_guide`` can propose for them.

        Parameters
        ----------
        params
            Parameters of guide and model, as ``svi.get_params`` returns them.
        """
        checks.check_shape("sample_shape", sample_shape)
        checks.check_key("rng_key", rng_key)
        plate, arguments = self.prepare(params, args, kwargs)
        index_key, draw_key = jax.random.split(rng_key)
        with handlers.seed(rng_seed=index_key), _plate.enter(plate) as index:
            _plate.check_index(plate, index)
        if plate.row_leaves and len(index) != plate.num_rows:
            raise ValueError(
                f"AutoSemiRVRS: {len(index)} points of plate {plate.name!r} were chosen, but the "
                f"arguments hold the rows of {plate.num_rows}; pass the rows of the chosen points."
            )
        count = math.prod(sample_shape)
        sites = self.draw_points(draw_key, params, index, arguments, count)
        return jax.tree.map(lambda leaf: leaf.reshape(*sample_shape, *leaf.shape[1:]), sites)

    def plate_of(self, arguments: Arguments) -> Plate:
        """The model's plate with these arguments, of which only shapes matter."""
        return _semi_structure.inspect_shapes(self, self.subsample_plate, arguments)

    def draw_points(
        self,
        rng_key: PRNGKey,
        params: Parameters,
        index: jax.Array,
        arguments: Arguments,
        num_samples: int,
    ) -> dict[str, jax.Array]:
        """Draws for the data points in ``index``, whose rows are in the arguments."""
        plate = self.plate_of(arguments)
        static, dynamic = (self, plate, num_samples), (rng_key, params, index)
        sites, complete = self.programs.call(_semi_posterior.sample, static, dynamic, arguments)
        if not isinstance(complete, Tracer) and not bool(jnp.all(complete)):
            missing = jnp.flatnonzero(~jnp.all(complete, axis=0))
            warnings.warn(
                f"max_proposals was hit at {len(missing)} of {len(index)} data points (first: "
                f"{int(index[missing[0]])}); their draws are not all from the fit. Raise "
                "max_proposals, or look at the model there.",
                stacklevel=3,
            )
        return sites

    def evaluate(
        self,
        rng_key: PRNGKey,
        params: Parameters,
        *args: Any,
        num_global: int = 100,
        num_local: int = 1000,
        **kwargs: Any,
    ) -> SemiEvidence:
        """The ELBO over all data points by nested Monte Carlo, with its error and its bias.

        Parameters
        ----------
        num_global
            Draws of the global latents; one where there are none.
        num_local
            Proposals per data point at each of them.
        """
        checks.check_key("rng_key", rng_key)
        checks.check_count("num_global", num_global)
        checks.check_count("num_local", num_local)
        plate, arguments = self.prepare(params, args, kwargs)
        # A model that takes its rows by index has all of them at hand.
        index = jnp.arange(plate.num_rows if plate.row_leaves else plate.size)
        num_global = 1 if self.global_guide is None else num_global
        static, dynamic = (self, plate, num_global, num_local), (rng_key, params, index)
        part = self.programs.call(_semi_posterior.evaluate, static, dynamic, arguments)
        return _semi_posterior.summarize([part], plate.size)

    def initial_parameters(
        self, rng_key: PRNGKey, arguments: Arguments, num_points: int
    ) -> tuple[Parameters, dict[str, Any]]:
        """Initial values of all parameters, and the transforms that constrain them."""
        with handlers.block(), handlers.seed(rng_seed=rng_key), handlers.trace() as trace:
            plate, _, index, parameters, latents = self._register(arguments, num_points)
        _semi_structure.verify(self, plate, parameters, latents, index, arguments)
        values = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        return values, _numpyro.constraint_transforms(trace)

    def prepare(
        self, params: Parameters, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plate, Arguments]:
        """Check the arguments of a call that comes with parameters."""
        arguments = (args, kwargs)
        _numpyro.check_signature(
            self.model, arguments, "AutoSemiRVRS needs the model's arguments after the parameters"
        )
        with handlers.block(), handlers.seed(rng_seed=0), handlers.trace() as trace:
            plate = self._register(arguments)[0]
        _numpyro.check_parameters(params, trace, _ABOUT_POINTS)
        return plate, arguments

    def conditioned_on(self, *args: Any, **kwargs: Any) -> Callable:
        """The guide with the model's arguments fixed to these; see :class:`rvrs.AutoRVRS`."""
        return lambda *_, **__: self(*args, **kwargs)

    def median(self, params: Parameters, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """The posterior median of every latent site; see :meth:`quantiles`."""
        return self.quantiles(params, 0.5, *args, **kwargs)

    def quantiles(
        self,
        params: Parameters,
        quantiles: Any,
        *args: Any,
        rng_key: PRNGKey | None = None,
        num_samples: int = 1000,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Posterior quantiles of every latent site, from draws; a leading axis if several."""
        checks.check_count("num_samples", num_samples)
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        checks.check_key("rng_key", rng_key)
        levels = checks.check_quantiles(quantiles)
        draws = self.sample_posterior(rng_key, params, *args, sample_shape=(num_samples,), **kwargs)
        return {name: jnp.quantile(value, levels, axis=0) for name, value in draws.items()}

    @property
    def _state_name(self) -> str:
        return f"{self.prefix}_state"

    def _register(
        self, arguments: Arguments, num_points: int | None = None
    ) -> tuple[Plate, Any, jax.Array, Parameters, Parameters]:
        """Register all parameters and emit the global sites.

        Returns the plate as we know it and as NumPyro does, the indices of its points, the
        parameters of model and local guide, and the global draw. ``num_points`` is the number of
        data points where the model itself does not know of more than the batch.
        """
        plate, trace = _semi_structure.inspect(self, self.subsample_plate, arguments)
        theta = _numpyro.model_parameters(trace)
        latents = self._emit_global(plate, arguments)
        data_plate = _plate.enter(plate)
        with data_plate as index:
            _plate.check_index(plate, index)
        program = self.local_program(plate, theta, latents, arguments)
        local = self.local_proposal.register(
            program, program.shared(theta), program.rows(index), num_points or plate.size
        )
        return plate, data_plate, index, theta | local, latents

    def _emit_global(self, plate: Plate, arguments: Arguments) -> Parameters:
        if self.global_guide is None:
            return {}
        with handlers.trace() as trace:
            self.global_guide(*arguments[0], **arguments[1])
        sites = {
            name: site
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"]
        }
        given = {name for name, site in sites.items() if not site["infer"].get("is_auxiliary")}
        if given != set(plate.global_names):
            missing = ", ".join(sorted(set(plate.global_names) - given)) or "none"
            unknown = ", ".join(sorted(given - set(plate.global_names))) or "none"
            raise ValueError(
                "global_guide: its sample sites must be the latent sites of the model outside of "
                f"plate {plate.name!r}; missing: {missing}; not among them: {unknown}."
            )
        return {name: sites[name]["value"] for name in plate.global_names}


_ABOUT_POINTS = (
    "Parameters of every data point belong to the points that they were trained on; for new ones "
    "use a local_guide that computes them from the data (an encoder)"
)


def _check_state(plate: Plate, rng_key: PRNGKey, state: State) -> None:
    # A vmap over random keys that leaves the state alone is the one over particles.
    if _numpyro.is_batched_by_vmap(rng_key) and not _numpyro.is_batched_by_vmap(state["value"]):
        raise ValueError(
            "AutoSemiRVRS: with num_particles > 1 NumPyro drops the guide's thresholds; use "
            "Trace_ELBO() and AutoSemiRVRS(..., num_samples=...) for more draws per step."
        )
    num_points = state["value"].shape[0]
    if num_points != plate.size:
        raise ValueError(
            f"AutoSemiRVRS: plate {plate.name!r} has {plate.size} points now, but thresholds are "
            f"stored for {num_points}; give the plate the size of all of the data (the batch is "
            "its subsample_size), or start training anew."
        )
