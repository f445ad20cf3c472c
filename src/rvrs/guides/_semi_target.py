"""What a guide with local latent variables does: the core's algorithms on the rows of a plate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from numpyro import handlers
from numpyro.infer.autoguide import AutoGuide

from rvrs import engine
from rvrs.core import mesh, rejection, threshold
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
# It is solved for so many points of a batch at a time, or for this share of them: at first for all,
# later on there are few of them.
_SOLVED_AT_ONCE, _SHARE_AT_ONCE = 16, 1 / 16
# A point whose proposals were accepted with less than this share of the target has left its T
# behind. By small steps from visit to visit, often an epoch apart, T would never catch up: where
# networks learn fast, most points of most batches would be without draws.
_LOST = 0.2
# Share of the points that should have draws below which those that have speak for too many.
_FEWEST = 0.8

Parameters = dict[str, Any]
State = dict[str, jax.Array]


class Points(NamedTuple):
    """The B data points of a batch, and the N points that they stand for."""

    number: jax.Array
    """By which the model knows them."""
    own: jax.Array
    """Their rows in the proposal's tables of parameters."""
    thresholds: ThresholdState
    """T and what comes with it, one per point of the batch."""
    num_points: jax.Array | int
    """N."""
    weight: jax.Array | float = 1.0
    """Of each of these points in a sum, where they are a part of a batch that has more of them
    from some places than from others."""


class Visit(NamedTuple):
    """What a step has found out about the points of its batch."""

    thresholds: ThresholdState
    acceptance: jax.Array
    """Summed over all proposals."""
    num_proposals: jax.Array
    num_dropped: jax.Array
    """Points that did not get their draws."""


class LocalStep(NamedTuple):
    """The local part of one training step, for the B data points of a batch."""

    z: dict[str, jax.Array]
    """One draw of every point, as the model has them; no gradient."""
    log_joint: jax.Array
    """``(B,)``: ``log p(x_n, z_n | z_G)`` there, with gradients into the model and z_G."""
    surrogate: jax.Array
    """The sum over all N points, estimated from those that have their draws."""
    visit: Visit


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
        axis: str | None,
        rng_key: PRNGKey,
        parameters: Parameters,
        latents: Parameters,
        points: Points,
        arguments: Arguments,
    ) -> LocalStep:
        """Draw for every point of a batch, and make the surrogate of all N points of it.

        ``axis`` is the axis of devices that the batch is spread over, if it is: then this is one
        device's part of it, and the sum over devices is the surrogate.
        """
        settings = self.settings
        program = self.local_program(plate, parameters, latents, arguments)
        problem, targets = self.problem(
            program, parameters, program.rows(points.number, own=points.own)
        )
        first_key, draw_key = jax.random.split(mesh.own_key(rng_key, axis))
        followed = self._look_up(first_key, problem, targets, points.thresholds)
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
            surrogate=self._of_all_points(points, draws, objective.surrogate, axis),
            visit=lax.stop_gradient(self._visit(followed, draws)),
        )

    def _of_all_points(
        self, points: Points, draws: Draws, surrogates: jax.Array, axis: str | None
    ) -> jax.Array:
        """The sum over all N points from those of a batch: those with their draws stand for all.

        Where far fewer have them than at the right T (Algorithm 3), few points speak for many, and
        the parameters would be thrown off, which makes it worse: the gradient is then damped.
        """
        num_complete = mesh.total(jnp.sum(draws.complete), axis)
        # Points without draws have a surrogate of 0.
        total = points.num_points * points.weight * jnp.sum(surrogates)
        expected = self.settings.expected_complete * len(surrogates) * mesh.size(axis)
        damped = total / jnp.maximum(num_complete, _FEWEST * expected)
        value = jnp.where(num_complete > 0, total / jnp.maximum(num_complete, 1), jnp.nan)
        return damped + lax.stop_gradient(value - damped)

    def objective(
        self,
        plate: Plate,
        rejection_wanted: bool,
        axis: str | None,
        rng_key: PRNGKey,
        parameters: Parameters,
        points: Points,
        arguments: Arguments,
    ) -> tuple[jax.Array, Visit | None]:
        """A surrogate of the whole ELBO from one batch, and what was found out about its points.

        Without rejection it is that of ordinary variational inference. With an ``axis`` this is
        one device's part of it; see :meth:`local_step`.
        """
        global_key, local_key = jax.random.split(rng_key)
        latents, log_q = self.draw_global(plate, global_key, parameters, arguments)
        log_p = self.log_global(plate, parameters, latents, arguments)
        # Every device has the same global draw, and answers for its share of this term.
        of_all = (log_p - log_q) / mesh.size(axis)
        if rejection_wanted:
            now = (local_key, parameters, latents, points, arguments)
            step = self.local_step(plate, axis, *now)
            return of_all + step.surrogate, step.visit
        local_key = mesh.own_key(local_key, axis)
        local = self._plain_surrogate(plate, local_key, parameters, latents, points, arguments)
        return of_all + local / mesh.size(axis), None

    def _plain_surrogate(
        self,
        plate: Plate,
        rng_key: PRNGKey,
        parameters: Parameters,
        latents: Parameters,
        points: Points,
        arguments: Arguments,
    ) -> jax.Array:
        program = self.local_program(plate, parameters, latents, arguments)
        problem, targets = self.problem(
            program, parameters, program.rows(points.number, own=points.own)
        )
        shape = (self.settings.num_samples, targets.num_targets)
        noise = problem.sample_noise(unrolled(rng_key), shape)
        draws = rejection.accept_all(noise, log_weights(problem, targets, noise))
        everything = jnp.full_like(draws.log_normalizer, jnp.inf)
        found = elbo_surrogate(problem, targets, draws, everything, epsilon=0.0)
        scale = points.num_points / targets.num_targets
        return scale * points.weight * jnp.sum(found.surrogate)

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
        known = points_of(state, index).thresholds
        return state | put(state, index, self._look_up(local_key, problem, targets, known))

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
        self, rng_key: PRNGKey, problem: Problem, targets: Targets, known: ThresholdState
    ) -> ThresholdState:
        """T of the batch's points, solved on the spot for those that have none, or lost theirs."""
        settings = self.settings
        if settings.threshold is not None or settings.target_acceptance == 1:
            return threshold.init(solve_threshold(known.value[None], settings))

        few = max(_SOLVED_AT_ONCE, int(_SHARE_AT_ONCE * targets.num_targets))
        few = min(few, targets.num_targets)
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

    def _visit(self, followed: ThresholdState, draws: Draws) -> Visit:
        settings, tally = self.settings, draws.tally
        block = settings.num_proposals or settings.block_size
        followed = engine.follow(followed, tally, settings, block)
        expected = settings.target_acceptance * tally.num_proposals
        lost = tally.acceptance < _LOST * expected
        return Visit(
            thresholds=followed._replace(memory=jnp.where(lost, 0.0, followed.memory)),
            acceptance=jnp.sum(tally.acceptance),
            num_proposals=jnp.sum(tally.num_proposals, dtype=jnp.int32),
            num_dropped=jnp.sum(~draws.complete, dtype=jnp.int32),
        )


def points_of(state: State, index: jax.Array) -> Points:
    """Data points by their indices, with their rows of the table of thresholds."""
    table = ThresholdState(*[state[name] for name in ThresholdState._fields])
    rows = jax.tree.map(lambda leaf: leaf[..., index], table)
    return Points(index, index, rows, state["value"].shape[0])


def put(state: State, index: jax.Array, rows: ThresholdState) -> State:
    """The table of thresholds with new rows."""
    return {name: state[name].at[..., index].set(new) for name, new in rows._asdict().items()}


def next_state(state: State, index: jax.Array, visit: Visit) -> State:
    """The state after a step on the points in ``index``."""
    return put(state, index, visit.thresholds) | {
        "acceptance": visit.acceptance / visit.num_proposals.astype(visit.acceptance.dtype),
        "num_proposals": visit.num_proposals,
        "num_dropped": state["num_dropped"] + visit.num_dropped,
    }
