"""AutoRVRS: a NumPyro guide that sculpts its proposal by rejection."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.core import Tracer
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import mutable

from rvrs.core import arguments as checks
from rvrs.core.objectives import Baseline, Estimator, ModelGradient
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.guides import _numpyro
from rvrs.guides._numpyro import Arguments
from rvrs.guides._program import Programs
from rvrs.guides._proposal import guide_proposal
from rvrs.guides._target import ModelTarget
from rvrs.proposals import Proposal
from rvrs.proposals.given_flow import FlowjaxDistribution
from rvrs.settings import FamilySettings, default_max_proposals


class AutoRVRS(ModelTarget):
    """Reparameterized variational rejection sampling for stock ``SVI`` and ``Trace_ELBO()``.

    A proposal ``q`` over all latent variables proposes, the model decides with probability
    ``a(z) = sigmoid(log p(x, z) - log q(z) + T)``, and what survives is the approximation ``r``.

    >>> import jax, optax, numpyro, rvrs
    >>> import numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     numpyro.sample("y", dist.Normal(0.0, scale), obs=y)
    >>> y = jax.numpy.array([0.3, -1.2, 0.8])
    >>> guide = rvrs.AutoRVRS(model, target_acceptance=0.2)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    >>> result = svi.run(jax.random.key(0), 200, y, progress_bar=False)
    >>> guide.sample_posterior(
    ...     jax.random.key(1), result.params, y, sample_shape=(100,)
    ... )["scale"].shape
    (100,)

    Parameters
    ----------
    model
        A NumPyro model whose latent variables are all continuous.
    proposal
        ``None`` or ``"diagonal"`` for independent normals, ``"mvn"`` for a normal with full
        covariance, ``"low_rank"``, a family of :mod:`rvrs.proposals` (flows among them), a flow of
        flowjax (see :func:`rvrs.proposals.from_flowjax`), or a NumPyro autoguide of the same model
        that is an ``AutoContinuous`` and whose log density can be evaluated at any point.
    target_acceptance
        The acceptance probability Z that T is adapted to: 1 is ordinary variational inference;
        the smaller, the closer to the posterior and the more proposals per draw (1 / Z).
    num_samples
        Accepted draws per step (S), on average and at most; what ``num_particles`` is for other
        guides.
    epsilon
        Guardrail: the least acceptance probability of any proposal.
    threshold
        None adapts T; a number fixes it, and ``target_acceptance`` then only sizes blocks.
    estimator
        ``"reparameterized"``, or ``"score"`` for the higher-variance estimator of VRS.
    baseline
        ``"running"`` centres the gradient by a running mean over all proposals, so that a step
        does with a single draw where its proposals hold no more; ``"leave_one_out"`` by the other
        draws of the step, all S of which it then waits for, for an estimate that is unbiased
        whatever came before, and noisier.
    model_gradient
        ``"unbiased"``, or ``"truncated"`` for the paper's estimator of the gradient of the
        model's ``numpyro.param`` sites, which leaves out a covariance.
    max_proposals
        Bound on the proposals of one step, by default 50 times what is needed on average. A step
        that hits it has the loss NaN and no gradient.
    prefix
        Prefix of the names of all sites of the guide.
    init_loc_fn
        Where the proposal starts; see NumPyro's initialization strategies.
    init_scale
        Standard deviation of the initial proposal in every unconstrained coordinate.

    Notes
    -----
    The guide emits one draw of ``r`` and a factor that makes ``Trace_ELBO()`` return the surrogate
    of all S draws, so nothing of NumPyro needs to change. While training T is carried in the
    mutable state of ``SVI``; everywhere else it is solved from the parameters, so parameters and
    data are enough to sample. The acceptance depends on the data: a model called without them
    (as in ``Predictive``) needs :meth:`conditioned_on`.
    """

    def __init__(
        self,
        model: Callable,
        *,
        proposal: AutoContinuous | Proposal | FlowjaxDistribution | str | None = None,
        target_acceptance: float = 0.1,
        num_samples: int = 2,
        epsilon: float = 1e-4,
        threshold: float | None = None,
        estimator: Estimator = "reparameterized",
        baseline: Baseline = "running",
        model_gradient: ModelGradient = "unbiased",
        max_proposals: int | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable = init_to_uniform,
        init_scale: float = 0.1,
    ) -> None:
        checks.check_callable("model", model, "a NumPyro model (a function)")
        checks.check_callable(
            "init_loc_fn",
            init_loc_fn,
            "one of NumPyro's initialization strategies, e.g. init_to_median",
        )
        checks.check_word("prefix", prefix)
        self.proposal = guide_proposal(proposal, model, prefix, init_scale)
        self.settings = FamilySettings(
            proposal=self.proposal.family,
            target_acceptance=target_acceptance,
            num_samples=num_samples,
            epsilon=epsilon,
            threshold=threshold,
            estimator=estimator,
            baseline=baseline,
            threshold_rule="tracking",
            max_proposals=default_max_proposals(max_proposals, num_samples, target_acceptance),
            init_scale=init_scale,
            model_gradient=model_gradient,
        )
        self.programs = Programs()
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"programs": Programs()}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """One draw from ``r`` at the latent sites, and the factor that completes the loss."""
        arguments = (args, kwargs)
        # The same keys at the first call, which finds the structure, as at all others.
        rng_key, setup_key = numpyro.prng_key(), numpyro.prng_key()
        with self._prototype(setup_key, arguments):
            parameters = self.proposal.register(self._init_latent)
            theta = _numpyro.model_parameters(self.prototype_trace)
            state: Any = mutable(self._state_name)
            if state is None:
                first = (parameters, theta)
                state = self.programs.call(self.first_state, (), first, arguments)
                # NumPyro takes and gives back any tree of arrays here.
                state = cast(Any, mutable)(self._state_name, state)
            else:
                _refuse_several_particles(rng_key, state)
            now = (rng_key, parameters, theta, dict(state))
            step = self.programs.call(self.surrogate_step, (), now, arguments)
            z, log_joint, surrogate, new_state = step
            state.update(new_state)
            if theta:
                # Its gradient too has to cancel the one of the model that SVI runs on the draw.
                log_joint = self._log_joint(arguments, theta, z)
            numpyro.factor(f"{self.prefix}_surrogate", log_joint - surrogate)
            return self._emit(arguments, theta, z)

    def sample_posterior(
        self,
        rng_key: PRNGKey,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Independent draws from ``r`` of all latent and deterministic sites of the model.

        Parameters
        ----------
        params
            Parameters of guide and model, as ``svi.get_params`` returns them; T is solved from
            them and the data.
        *args, **kwargs
            The model's arguments, the data among them.
        """
        checks.check_shape("sample_shape", sample_shape)
        checks.check_key("rng_key", rng_key)
        draws = self.draw_latent(
            rng_key, params, *args, num_samples=math.prod(sample_shape), **kwargs
        )
        sites = self.constrain(params, draws.latent, *args, **kwargs)
        return jax.tree.map(lambda leaf: leaf.reshape(*sample_shape, *leaf.shape[1:]), sites)

    def median(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """The posterior median of every latent site; see :meth:`quantiles`."""
        return self.quantiles(params, 0.5, *args, **kwargs)

    def quantiles(
        self,
        params: dict[str, Any],
        quantiles: Any,
        *args: Any,
        rng_key: PRNGKey | None = None,
        num_samples: int = 10_000,
        **kwargs: Any,
    ) -> dict[str, jax.Array]:
        """Posterior quantiles of every latent site, from draws; a leading axis if several.

        Unlike other autoguides this one needs the model's arguments, since the data decide which
        proposals are accepted.
        """
        checks.check_count("num_samples", num_samples)
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        checks.check_key("rng_key", rng_key)
        levels = checks.check_quantiles(quantiles)
        draws = self.sample_posterior(rng_key, params, *args, sample_shape=(num_samples,), **kwargs)
        return {name: jnp.quantile(draws[name], levels, axis=0) for name in self.latent_names}

    def get_posterior(self, params: Any = None) -> dist.Distribution:
        """Not available: ``r`` is known by its draws."""
        raise NotImplementedError(
            "AutoRVRS has no closed-form posterior: use sample_posterior, median or quantiles."
        )

    def get_transform(self, params: dict[str, Any]) -> Any:
        """Not available; see :meth:`get_posterior`."""
        return self.get_posterior(params)

    def get_base_dist(self) -> dist.Distribution:
        """Not available; see :meth:`get_posterior`."""
        return self.get_posterior()

    def _get_posterior(self) -> dist.Distribution:
        return self.get_posterior()

    def conditioned_on(self, *args: Any, **kwargs: Any) -> Callable:
        """The guide with the model's arguments, data included, fixed to these.

        For callers that pass other arguments, such as predictions at new inputs:
        ``Predictive(model, guide=guide.conditioned_on(x, y), params=params,
        num_samples=100)(rng_key, x_new)``.
        """
        return lambda *_, **__: self(*args, **kwargs)

    @property
    def _state_name(self) -> str:
        return f"{self.prefix}_state"

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        rng_key = cast(PRNGKey, numpyro.prng_key())
        _numpyro.check_model(self.model, (args, kwargs), rng_key, "AutoRVRS")
        try:
            super()._setup_prototype(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError(
                "AutoRVRS: the model's log density or its gradient is not finite at any initial "
                "point that was tried; check the data for NaN, or start inside the support with "
                "init_loc_fn, e.g. init_to_value."
            ) from error
        except checks.NEEDS_VALUES as error:
            raise checks.needs_values("model") from error
        _numpyro.order_latent(self)
        self.proposal.setup(args, kwargs, self._init_latent)

    @contextmanager
    def _prototype(self, rng_key: PRNGKey, arguments: Arguments) -> Iterator[None]:
        """Have the model's structure at hand.

        A structure that was found while JAX was tracing holds tracers, which must not outlive
        the trace: it is forgotten afterwards and found again when needed.
        """
        if self.prototype_trace is not None:
            yield
            return
        try:
            with handlers.seed(rng_seed=rng_key):
                self._setup_prototype(*arguments[0], **arguments[1])
            yield
        finally:
            if isinstance(getattr(self, "_init_latent", None), Tracer):
                self.prototype_trace = None

    def _emit(self, arguments: Arguments, theta: PyTree, z: jax.Array) -> dict[str, jax.Array]:
        """Delta sites at the model's latent sites, with the Jacobian of the constraint."""
        found = self._constrain_one(arguments, theta, z)
        masked = numpyro.get_mask() is False
        result = {}
        for name, value in found.values.items():
            log_density = 0.0 if masked else -found.log_jacobians[name]
            delta = dist.Delta(value, log_density=log_density, event_dim=found.event_dims[name])
            result[name] = numpyro.sample(name, delta)
        return result


def _refuse_several_particles(rng_key: PRNGKey, state: dict[str, jax.Array]) -> None:
    # A vmap over random keys that leaves the state alone is the one over particles.
    if _numpyro.is_batched_by_vmap(rng_key) and not _numpyro.is_batched_by_vmap(state["value"]):
        raise ValueError(
            "AutoRVRS: with num_particles > 1 NumPyro drops the guide's threshold; use "
            "Trace_ELBO() and AutoRVRS(..., num_samples=...) for more draws per step."
        )
