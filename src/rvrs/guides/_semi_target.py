"""What a guide with local latent variables does: the core's algorithms on the rows of a plate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide

from rvrs import engine
from rvrs.core import rejection, threshold
from rvrs.core.objectives import elbo_surrogate
from rvrs.core.problem import PRNGKey, Problem, Targets, log_weights
from rvrs.core.randomness import unrolled
from rvrs.core.rejection import Draws
from rvrs.core.threshold import ThresholdState
from rvrs.engine import solve_threshold
from rvrs.guides import _plate, _replay
from rvrs.guides._local_proposal import LocalProposal
from rvrs.guides._numpyro import Arguments
from rvrs.guides._plate import LocalProgram, Plate, Rows
from rvrs.settings import SemiSettings

# T of a point is first solved from as many proposals as give this many draws; Z is then within a
# factor of 1.5 of its target, and following it at later visits does the rest.
_FIRST_DRAWS = 5
# It is solved for so many points of a batch at a time: later on there are few of them.
_SOLVED_AT_ONCE = 16
# A point whose proposals were accepted with less than this share of the target has left its T
# behind. By small steps from visit to visit, often an epoch apart, T would never catch up: where
# networks learn fast, most points of most batches would be without draws.
_LOST = 0.2
# Share of the points that should have draws below which those that have speak for too many.
_FEWEST = 0.8

Parameters = dict[str, Any]
State = dict[str, jax.Array]


class LocalStep(NamedTuple):
    """The local part of one training step, for the B data points of a batch."""

    z: dict[str, jax.Array]
    """One draw of every point, as the model has them; no gradient."""
    log_joint: jax.Array
    """``(B,)``: ``log p(x_n, z_n | z_G)`` there, with gradients into the model and z_G."""
    surrogate: jax.Array
    """The sum over all N points, estimated from those that have their draws."""
    state: State


class SemiTarget(AutoGuide):
    """The local posteriors of a batch of data points as the core's B targets.

    Pure functions of parameters, by the names of their sites, and of the model's arguments.
    """

    local_model: Callable
    global_guide: Callable | None
    local_proposal: LocalProposal
    settings: SemiSettings

    def local_program(
        self, plate: Plate, parameters: Parameters, latents: Parameters, arguments: Arguments
    ) -> LocalProgram:
        """The part of the model inside the plate, given a draw of the global latents."""
        return LocalProgram(*self._local_call(parameters, latents, arguments), plate)

    def _local_call(
        self, parameters: Parameters, latents: Parameters, arguments: Arguments
    ) -> tuple[Callable, Arguments]:
        if self.global_guide is None:
            return self.local_model, arguments
        global_model = getattr(self.global_guide, "model", None)
        if global_model is not None:
            values = {**parameters, **latents}
            with handlers.block():
                fixed = handlers.substitute(handlers.seed(global_model, 0), data=values)
                return self.local_model, ((fixed(*arguments[0], **arguments[1]),), {})

        def given_latents(latents: Parameters, *args: Any, **kwargs: Any) -> Any:
            return handlers.substitute(self.model, data=latents)(*args, **kwargs)

        return given_latents, ((latents, *arguments[0]), arguments[1])

    def problem(
        self, program: LocalProgram, parameters: Parameters, rows: Rows
    ) -> tuple[Problem, Targets]:
        """The core's view of it: one target per data point."""
        shared = program.shared(parameters)
        proposals = jax.vmap(lambda row: self.local_proposal.distributions(program, shared, row))(
            rows
        )
        problem = Problem(
            sample_noise=lambda key, shape: _replay.sample_noise(key, shape, proposals),
            propose=_replay.propose,
            log_proposal=_replay.log_density,
            log_joint=program.log_joint,
        )
        return problem, Targets(proposals, shared, rows)

    def draw_global(
        self, plate: Plate, rng_key: PRNGKey, parameters: Parameters, arguments: Arguments
    ) -> tuple[Parameters, jax.Array]:
        """A draw of the global latents, and the log density of the global guide there."""
        if self.global_guide is None:
            return {}, jnp.zeros(())
        trace = _plate.run(self.global_guide, arguments, parameters, rng_key)
        latents = {name: trace[name]["value"] for name in plate.global_names}
        return latents, _plate.log_outside(trace, plate.name)

    def log_global(
        self, plate: Plate, parameters: Parameters, latents: Parameters, arguments: Arguments
    ) -> jax.Array:
        """``log p(z_G)``, and whatever else the model has outside of the plate."""
        if not plate.outside:
            return jnp.zeros(())
        trace = _plate.run_feasible(self.model, arguments, {**parameters, **latents})
        return _plate.log_outside(trace, plate.name)

    def first_state(self, num_points: int) -> State:
        """The state that training starts with: no point has been seen."""
        unseen = threshold.init(jnp.zeros(num_points))
        return {
            **unseen._asdict(),
            "acceptance": jnp.zeros(()),
            "num_proposals": jnp.int32(0),
            "num_dropped": jnp.int32(0),
        }

    def local_step(
        self,
        plate: Plate,
        rng_key: PRNGKey,
        parameters: Parameters,
        latents: Parameters,
        index: jax.Array,
        state: State,
        arguments: Arguments,
    ) -> LocalStep:
        """Draw for every point of a batch, and make the surrogate of all N points of it."""
        settings = self.settings
        program = self.local_program(plate, parameters, latents, arguments)
        problem, targets = self.problem(program, parameters, program.rows(index))
        first_key, draw_key = jax.random.split(rng_key)
        followed = self._look_up(first_key, problem, targets, state, index)
        draws = self._draw(draw_key, problem, targets, followed.value)
        objective = elbo_surrogate(
            problem,
            targets,
            draws,
            followed.value,
            epsilon=settings.epsilon,
            estimator=settings.estimator,
            model_gradient=settings.model_gradient,
            **engine.centring(followed, settings),
        )
        noise = jax.tree.map(lambda leaf: leaf[0], draws.noise)
        z = lax.stop_gradient(jax.vmap(problem.propose)(targets.proposal, noise)[0])
        log_joint = jax.vmap(problem.log_joint, (None, 0, 0))(targets.model, targets.data, z)
        return LocalStep(
            z={site.name: _plate.to_batch(site, z[site.name]) for site in plate.local},
            log_joint=log_joint,
            surrogate=self._of_all_points(state, draws, objective.surrogate),
            state=lax.stop_gradient(self._next_state(state, followed, draws, index)),
        )

    def _of_all_points(self, state: State, draws: Draws, surrogates: jax.Array) -> jax.Array:
        """The sum over all N points from those of a batch: those with their draws stand for all.

        Where far fewer have them than at the right T (Algorithm 3), few points speak for many, and
        the parameters would be thrown off, which makes it worse: the gradient is then damped.
        """
        num_points, num_complete = state["value"].shape[0], jnp.sum(draws.complete)
        # Points without draws have a surrogate of 0.
        total = num_points * jnp.sum(surrogates)
        least = _FEWEST * self.settings.expected_complete * len(surrogates)
        damped = total / jnp.maximum(num_complete, least)
        value = jnp.where(num_complete > 0, total / jnp.maximum(num_complete, 1), jnp.nan)
        return damped + lax.stop_gradient(value - damped)

    def objective(
        self,
        plate: Plate,
        rejection_wanted: bool,
        rng_key: PRNGKey,
        parameters: Parameters,
        index: jax.Array,
        state: State,
        arguments: Arguments,
    ) -> tuple[jax.Array, State]:
        """A surrogate of the whole ELBO from one batch, and the next state.

        Without rejection it is that of ordinary variational inference.
        """
        global_key, local_key = jax.random.split(rng_key)
        latents, log_q = self.draw_global(plate, global_key, parameters, arguments)
        log_p = self.log_global(plate, parameters, latents, arguments)
        now = (plate, local_key, parameters, latents, index, state, arguments)
        if rejection_wanted:
            step = self.local_step(*now)
            return log_p - log_q + step.surrogate, step.state
        return log_p - log_q + self._plain_surrogate(*now), state

    def _plain_surrogate(
        self,
        plate: Plate,
        rng_key: PRNGKey,
        parameters: Parameters,
        latents: Parameters,
        index: jax.Array,
        state: State,
        arguments: Arguments,
    ) -> jax.Array:
        program = self.local_program(plate, parameters, latents, arguments)
        problem, targets = self.problem(program, parameters, program.rows(index))
        shape = (self.settings.num_samples, targets.num_targets)
        noise = problem.sample_noise(unrolled(rng_key), shape)
        draws = rejection.accept_all(noise, log_weights(problem, targets, noise))
        everything = jnp.full_like(draws.log_normalizer, jnp.inf)
        found = elbo_surrogate(problem, targets, draws, everything, epsilon=0.0)
        return state["value"].shape[0] / len(index) * jnp.sum(found.surrogate)

    def see(
        self,
        plate: Plate,
        rng_key: PRNGKey,
        parameters: Parameters,
        index: jax.Array,
        state: State,
        arguments: Arguments,
    ) -> State:
        """The state after a first sight of the points of a batch, without a step on them."""
        global_key, local_key = jax.random.split(rng_key)
        latents, _ = self.draw_global(plate, global_key, parameters, arguments)
        program = self.local_program(plate, parameters, latents, arguments)
        problem, targets = self.problem(program, parameters, program.rows(index))
        return state | _put(index, state, self._look_up(local_key, problem, targets, state, index))

    def draw_exact(
        self, rng_key: PRNGKey, problem: Problem, targets: Targets, t: jax.Array, num_samples: int
    ) -> Draws:
        """``num_samples`` draws of every point (Algorithm 2, with reallocation)."""
        settings = self.settings
        return rejection.draw_exact(
            rng_key,
            problem,
            targets,
            t,
            num_samples=num_samples,
            epsilon=settings.epsilon,
            block_size=rejection.block_size(num_samples, settings.target_acceptance),
            max_proposals=settings.max_proposals,
            reallocate=targets.num_targets > 1,
        )

    def _draw(self, rng_key: PRNGKey, problem: Problem, targets: Targets, t: jax.Array) -> Draws:
        """S draws of every point by the sampler of the settings."""
        settings = self.settings
        if settings.num_proposals is None:
            return self.draw_exact(rng_key, problem, targets, t, settings.num_samples)
        return rejection.draw_budget(
            rng_key,
            problem,
            targets,
            t,
            num_samples=settings.num_samples,
            epsilon=settings.epsilon,
            num_proposals=settings.num_proposals,
        )

    def _look_up(
        self, rng_key: PRNGKey, problem: Problem, targets: Targets, state: State, index: jax.Array
    ) -> ThresholdState:
        """T of the batch's points, solved on the spot for those that have none, or lost theirs."""
        settings = self.settings
        known = ThresholdState(*[state[name][..., index] for name in ThresholdState._fields])
        if settings.threshold is not None or settings.target_acceptance == 1:
            return threshold.init(solve_threshold(known.value[None], settings))

        few = min(_SOLVED_AT_ONCE, targets.num_targets)
        count = rejection.block_size(_FIRST_DRAWS, settings.target_acceptance)
        fixed = lax.stop_gradient(targets)
        unknown = known.memory == 0
        # Points without T come first; the last ones may be taken twice.
        order = jnp.argsort(~unknown)

        def solve(number: jax.Array, found: ThresholdState) -> ThresholdState:
            chosen = lax.dynamic_slice(order, (number * few,), (few,))
            some = fixed.take(chosen)
            noise = problem.sample_noise(jax.random.fold_in(rng_key, number), (count, few))
            lw = log_weights(problem, some, noise)
            memory = _FIRST_DRAWS / settings.num_samples
            new = engine.first_threshold(lw, settings, memory)
            return jax.tree.map(
                lambda all_, some: all_.at[..., chosen].set(
                    jnp.where(unknown[chosen], some, all_[..., chosen])
                ),
                found,
                new,
            )

        num_calls = -(-jnp.sum(unknown) // few)
        return lax.fori_loop(0, num_calls, solve, lax.stop_gradient(known))

    def _next_state(
        self, state: State, followed: ThresholdState, draws: Draws, index: jax.Array
    ) -> State:
        settings, tally = self.settings, draws.tally
        block = settings.num_proposals or settings.block_size
        followed = engine.follow(followed, tally, settings, block)
        expected = settings.target_acceptance * tally.num_proposals
        lost = tally.acceptance < _LOST * expected
        followed = followed._replace(memory=jnp.where(lost, 0.0, followed.memory))
        total = jnp.sum(tally.num_proposals, dtype=jnp.int32)
        return _put(index, state, followed) | {
            "acceptance": jnp.sum(tally.acceptance) / total.astype(tally.acceptance.dtype),
            "num_proposals": total,
            "num_dropped": state["num_dropped"] + jnp.sum(~draws.complete, dtype=jnp.int32),
        }


def _put(index: jax.Array, state: State, followed: ThresholdState) -> State:
    """The table of thresholds with new rows."""
    return {name: state[name].at[..., index].set(new) for name, new in followed._asdict().items()}
