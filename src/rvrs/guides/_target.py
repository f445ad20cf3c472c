"""What a guide over all latent variables does: the core's algorithms on a NumPyro model."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous

from rvrs import engine
from rvrs.core import arguments as checks
from rvrs.core import rejection
from rvrs.core.acceptance import evaluate
from rvrs.core.objectives import differentiable_if, elbo_surrogate
from rvrs.core.problem import PRNGKey, Problem, PyTree, Targets, log_weights
from rvrs.core.randomness import unrolled
from rvrs.core.threshold import ThresholdState
from rvrs.engine import Evaluation, Evidence
from rvrs.guides import _numpyro
from rvrs.guides._numpyro import Arguments
from rvrs.guides._program import Programs
from rvrs.guides._proposal import GuideProposal
from rvrs.settings import FamilySettings

# T starts from as many proposals as give this many draws: Z is then within 3 % of its target.
_FIRST_DRAWS = 1000


class PosteriorDraws(NamedTuple):
    """Draws from ``r`` with what the sampler knows about each of them."""

    latent: jax.Array
    """``(n, d)``: flat and unconstrained; NaN where ``max_proposals`` was hit."""
    log_weight: jax.Array
    """``lw = log p(x, z) - log q(z)``."""
    log_ratio: jax.Array
    """``A = lw - log a_e``, the log of the weight of the draw against the posterior."""
    acceptance: jax.Array
    """``a_e``, the probability with which the draw was accepted."""
    complete: jax.Array
    """False where ``max_proposals`` was hit and there is no draw."""


class ModelTarget(AutoContinuous):
    """The posterior of a model as the core's one target (B = 1).

    The first methods take parameters by the names of their sites and the model's arguments, and
    run compiled. The others are the pure functions behind them, and those of training: of the
    parameters of the proposal (phi) and of the model (theta), and the model's arguments.
    """

    proposal: GuideProposal
    settings: FamilySettings
    programs: Programs
    prototype_trace: Any
    _unpack_latent: Any

    @property
    def latent_names(self) -> list[str]:
        """The model's latent sites."""
        return list(self._unpack_latent(self._init_latent))

    def draw_latent(
        self,
        rng_key: PRNGKey,
        params: dict[str, Any],
        *args: Any,
        num_samples: int,
        **kwargs: Any,
    ) -> PosteriorDraws:
        """Draws from ``r`` in the flat unconstrained space, with their weights."""
        checks.check_key("rng_key", rng_key)
        checks.check_count("num_samples", num_samples)
        arguments = self.prepare(params, args, kwargs)
        draws = self.programs.call(self._draw_latent, (num_samples,), (rng_key, params), arguments)
        if not isinstance(draws.complete, Tracer) and not bool(jnp.all(draws.complete)):
            warnings.warn(
                f"{int(jnp.sum(~draws.complete))} of {num_samples} draws are NaN: max_proposals "
                "was hit. The density may be non-finite over most of the proposal; check the "
                "model, or raise max_proposals.",
                stacklevel=3,
            )
        return draws

    def propose_latent(
        self,
        rng_key: PRNGKey,
        params: dict[str, Any],
        *args: Any,
        num_samples: int,
        **kwargs: Any,
    ) -> jax.Array:
        """Draws ``(n, d)`` from the proposal itself, before rejection."""
        checks.check_key("rng_key", rng_key)
        checks.check_count("num_samples", num_samples)
        self.prepare(params, args, kwargs)
        parameters, _ = self.split(params)
        family = self.proposal.family
        noise = family.sample_noise(rng_key, (num_samples,), parameters)
        return jax.vmap(family.propose, in_axes=(None, 0))(parameters, noise)[0]

    def constrain(
        self, params: dict[str, Any], latent: jax.Array, *args: Any, **kwargs: Any
    ) -> dict[str, jax.Array]:
        """Latent and deterministic sites of the model at flat unconstrained draws ``(n, d)``."""
        arguments = self.prepare(params, args, kwargs)
        size = len(self._init_latent)
        shape = getattr(latent, "shape", ())
        if len(shape) != 2 or shape[0] == 0 or shape[1] != size:
            raise ValueError(
                f"latent must have the shape (draws, {size}), got {shape or checks.shown(latent)}; "
                "pass what draw_latent or propose_latent returned."
            )
        checks.check_floats("latent", latent)
        return self.programs.call(self._constrain_all, (), (params, latent), arguments)

    def evaluate(
        self,
        rng_key: PRNGKey,
        params: dict[str, Any],
        *args: Any,
        num_draws: int = 100_000,
        **kwargs: Any,
    ) -> Evidence:
        """ELBO, log Z and log evidence with standard errors, T solved from the parameters.

        Makes as many proposals as give ``num_draws`` draws on average.
        """
        return self.assess(rng_key, params, *args, num_draws=num_draws, **kwargs).evidence

    def assess(
        self,
        rng_key: PRNGKey,
        params: dict[str, Any],
        *args: Any,
        num_draws: int = 100_000,
        **kwargs: Any,
    ) -> Evaluation:
        """The same with the weights of the draws, which diagnostics are made of."""
        checks.check_key("rng_key", rng_key)
        checks.check_count("num_draws", num_draws)
        checks.check_block(num_draws, self.settings.target_acceptance, "num_draws")
        arguments = self.prepare(params, args, kwargs)
        proposal_key, accept_key = jax.random.split(rng_key)
        static, dynamic = (num_draws,), (proposal_key, params)
        lw = self.programs.call(self._log_weights, static, dynamic, arguments)
        return engine.evaluate_weights(accept_key, lw, self.settings)

    def prepare(self, params: dict[str, Any], args: tuple, kwargs: dict) -> Arguments:
        """Check the arguments of a call that comes with parameters."""
        _numpyro.check_signature(
            self.model,
            (args, kwargs),
            "AutoRVRS needs the model's arguments, data included, after the parameters",
        )
        if self.prototype_trace is None:
            with handlers.seed(rng_seed=0), handlers.block():
                self._setup_prototype(*args, **kwargs)
        trace: Any = self.prototype_trace
        own = _numpyro.parameter_trace(self.proposal.register, self._init_latent)
        _numpyro.check_parameters(params, own | trace, "Start training anew where the data changed")
        return args, kwargs

    def with_log_density(
        self,
        function: Callable,
        static: tuple,
        dynamic: tuple,
        theta: dict[str, Any],
        arguments: Arguments,
    ) -> Any:
        """``function(*static, *dynamic, log_density)``, compiled.

        ``log_density`` is that of the model at flat unconstrained points, with the parameters
        ``theta`` and these arguments.
        """
        return self.programs.call(
            self._with_log_density, (function, static), (dynamic, theta), arguments
        )

    def _with_log_density(
        self,
        function: Callable,
        static: tuple,
        dynamic: tuple,
        theta: dict[str, Any],
        arguments: Arguments,
    ) -> Any:
        return function(*static, *dynamic, lambda z: self._log_joint(arguments, theta, z))

    def _log_joint(self, arguments: Arguments, theta: PyTree, z: jax.Array) -> jax.Array:
        return _numpyro.log_joint(self.model, arguments, theta, self._unpack_latent(z))

    def _problem(
        self, parameters: PyTree, theta: PyTree, arguments: Arguments
    ) -> tuple[Problem, Targets]:
        """The core's view of it: one target, B = 1."""
        family = self.proposal.family
        problem = Problem(
            sample_noise=lambda key, shape: family.sample_noise(key, shape, parameters),
            propose=family.propose,
            log_proposal=family.log_density,
            log_joint=lambda theta, _, z: self._log_joint(arguments, theta, z),
        )
        return problem, Targets(jax.tree.map(lambda leaf: leaf[None], parameters), theta)

    def first_state(
        self, parameters: PyTree, theta: PyTree, arguments: Arguments
    ) -> dict[str, jax.Array]:
        """The state that training starts with: T solved from the parameters."""
        problem, targets = self._problem(parameters, theta, arguments)
        # T is a function of the parameters; any key serves to compute it.
        lw = engine.calibration_weights(
            jax.random.key(0), problem, targets, self.settings, _FIRST_DRAWS
        )
        followed = engine.first_threshold(lax.stop_gradient(lw), self.settings)
        return {
            **followed._asdict(),
            "acceptance": jnp.zeros_like(followed.value[0]),
            "num_proposals": jnp.int32(0),
            "num_capped": jnp.int32(0),
        }

    def surrogate_step(
        self,
        rng_key: PRNGKey,
        parameters: PyTree,
        theta: PyTree,
        state: dict[str, jax.Array],
        arguments: Arguments,
        axis: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
        """A draw, ``log p`` there, the surrogate of all S draws, and the next state.

        With an ``axis`` of devices the proposals are spread over these, and all else is done by
        each of them.
        """
        settings = self.settings
        problem, targets = self._problem(parameters, theta, arguments)
        followed = ThresholdState(*[state[name] for name in ThresholdState._fields])
        t = followed.value
        draws = rejection.draw_exact(
            rng_key,
            problem,
            targets,
            t,
            num_samples=settings.num_samples,
            min_samples=settings.min_samples,
            epsilon=settings.epsilon,
            block_size=settings.block_size,
            max_proposals=settings.max_proposals,
            axis=axis,
        )
        complete = draws.complete[0]
        objective = elbo_surrogate(
            problem,
            differentiable_if(complete, targets),
            draws,
            t,
            epsilon=settings.epsilon,
            estimator=settings.estimator,
            model_gradient=settings.model_gradient,
            **engine.centring(followed, settings),
        )
        surrogate = objective.surrogate[0] + jnp.where(complete, 0.0, jnp.nan)
        noise = jax.tree.map(lambda leaf: leaf[0, 0], draws.noise)
        z, log_q = lax.stop_gradient(problem.propose(parameters, noise))
        log_joint = draws.log_weight[0, 0] + log_q

        tally = draws.tally
        followed = engine.follow(followed, tally, settings, settings.block_size)
        new_state = {
            **followed._asdict(),
            "acceptance": tally.acceptance[0] / tally.num_proposals[0].astype(t.dtype),
            "num_proposals": tally.num_proposals[0],
            "num_capped": state["num_capped"] + ~complete,
        }
        return z, log_joint, surrogate, lax.stop_gradient(new_state)

    def plain_surrogate(
        self,
        num_samples: int,
        rng_key: PRNGKey,
        parameters: PyTree,
        theta: PyTree,
        arguments: Arguments,
    ) -> jax.Array:
        """The surrogate without rejection: ordinary variational inference.

        Proposals of a density that is not finite are left out; NaN if there are no others.
        """
        problem, targets = self._problem(parameters, theta, arguments)
        noise = problem.sample_noise(unrolled(rng_key), (num_samples, 1))
        draws = rejection.accept_all(noise, log_weights(problem, targets, noise))
        everything = jnp.full_like(draws.log_normalizer, jnp.inf)
        found = elbo_surrogate(problem, targets, draws, everything, epsilon=0.0).surrogate[0]
        return found + jnp.where(draws.complete[0], 0.0, jnp.nan)

    def split(self, params: dict[str, Any]) -> tuple[PyTree, PyTree]:
        """Parameters of the proposal and of the model."""
        register = handlers.substitute(self.proposal.register, data=params)
        with handlers.block():
            parameters = handlers.seed(register, rng_seed=0)(self._init_latent)
        theta = {
            name: params[name]
            for name, site in self.prototype_trace.items()
            if site["type"] == "param"
        }
        return parameters, theta

    def _draw_latent(
        self, num_samples: int, rng_key: PRNGKey, params: dict[str, Any], arguments: Arguments
    ) -> PosteriorDraws:
        parameters, theta = self.split(params)
        problem, targets = self._problem(parameters, theta, arguments)
        calibration_key, draw_key = jax.random.split(rng_key)
        t = engine.calibrate(calibration_key, problem, targets, self.settings)

        def describe(*drawn: PyTree) -> PosteriorDraws:
            noise, lw, complete = jax.tree.map(lambda leaf: leaf[:, 0], drawn)
            z, _ = jax.vmap(problem.propose, in_axes=(None, 0))(parameters, noise)
            a = evaluate(lw, t, self.settings.epsilon)
            return PosteriorDraws(
                latent=jnp.where(complete[:, None], z, jnp.nan),
                log_weight=jnp.where(complete, lw, jnp.nan),
                log_ratio=jnp.where(complete, a.log_ratio, jnp.nan),
                acceptance=jnp.where(complete, a.probability, jnp.nan),
                complete=complete,
            )

        return engine.draw(draw_key, problem, targets, t, self.settings, num_samples, describe)

    def _constrain_one(
        self, arguments: Arguments, theta: PyTree, z: jax.Array
    ) -> _numpyro.Constrained:
        found = _numpyro.constrain(
            self.model, arguments, theta, self._unpack_latent(lax.stop_gradient(z))
        )
        absent = [name for name in self.latent_names if name not in found.values]
        if found.missing or absent:
            raise ValueError(
                f"AutoRVRS: with these arguments the model has other latent sites "
                f"({', '.join(map(repr, found.missing + absent))} changed); the data decide what "
                "is accepted, so pass the same data that the guide is trained on. For predictions "
                "use guide.conditioned_on(...) or sample_posterior."
            )
        return found

    def _constrain_all(
        self, params: dict[str, Any], latent: jax.Array, arguments: Arguments
    ) -> dict[str, jax.Array]:
        _, theta = self.split(params)

        def one(z: jax.Array) -> dict[str, jax.Array]:
            found = self._constrain_one(arguments, theta, z)
            return found.values | found.deterministic

        return lax.map(one, latent, batch_size=min(1000, len(latent)))

    def _log_weights(
        self, num_draws: int, rng_key: PRNGKey, params: dict[str, Any], arguments: Arguments
    ) -> jax.Array:
        problem, targets = self._problem(*self.split(params), arguments)
        return engine.evaluation_weights(rng_key, problem, targets, self.settings, num_draws)[:, 0]
