"""What a training step cannot avoid, and what it would be one proposal at a time.

The bare work of a step is: propose ``ceil(S / Z)`` times for each of B targets and evaluate the log
weights in one batch, take one gradient over S draws, and make one Adam update. It decides nothing:
no proposal is accepted or rejected, and no threshold found.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rvrs import proposals
from rvrs.bench.timing import Contestant
from rvrs.bench.works import Work
from rvrs.core import rejection
from rvrs.core.acceptance import log_acceptance
from rvrs.core.objectives import elbo_surrogate
from rvrs.core.problem import Problem, Targets

NUM_SAMPLES = 2
"""Draws per target and step (S)."""


class Task(NamedTuple):
    """A training, as far as the bare work of its steps goes."""

    parameters: Any
    """All that is learned, where it starts."""
    build: Callable[[Any, jax.Array, Any], tuple[Problem, Targets, Any]]
    """``(parameters, rng_key, batch) -> (problem, targets, rest)``: the targets of a batch, and
    what the objective has besides those."""
    target_acceptance: float
    batches: Any = None
    """Leaves ``(m, ...)``: the batches, of which a step takes one after the other."""
    weight: float = 1.0
    """What the sum over the targets of a batch counts in the objective."""

    @property
    def num_proposals(self) -> int:
        """Proposals per target and step."""
        return rejection.block_size(NUM_SAMPLES, self.target_acceptance)

    def batch(self, index: Any) -> Any:
        """The batch of a step."""
        return jax.tree.map(lambda leaf: leaf[index % leaf.shape[0]], self.batches)


def task(work: Work, target_acceptance: float, *, scale: float = 0.3) -> Task:
    """Training of independent normals with standard deviation ``scale``, and of the model."""
    family = proposals.diagonal_normal()
    start = {
        "proposal": family.init(jnp.zeros(work.dimension), scale),
        "model": work.parameters,
    }

    def log_joint(model: Any, data: Any, z: jax.Array) -> jax.Array:
        return work.log_density(z) if work.log_joint is None else work.log_joint(model, z)

    problem = normal_problem(work.dimension, log_joint)

    def build(parameters: Any, key: jax.Array, batch: Any) -> tuple[Problem, Targets, Any]:
        proposal = jax.tree.map(lambda leaf: leaf[None], parameters["proposal"])
        return problem, Targets(proposal, parameters["model"]), 0.0

    return Task(start, build, target_acceptance)


def normal_problem(dimension: int, log_joint: Callable[[Any, Any, Any], Any]) -> Problem:
    """Independent normals that propose, by the random numbers that JAX has."""
    family = proposals.diagonal_normal()
    return Problem(
        sample_noise=lambda key, shape: jax.random.normal(key, (*shape, dimension)),
        propose=family.propose,
        log_proposal=family.log_density,
        log_joint=log_joint,
    )


def bare_steps(
    task: Task, optimizer: optax.GradientTransformation, num_steps: int, *, random: bool = True
) -> Contestant:
    """The bare work of so many steps, in one compiled loop; ends with parameters and log weights.

    Without ``random`` the noise is the same at every step, so that no random numbers are drawn.
    """
    problem, targets, _ = task.build(task.parameters, jax.random.key(0), task.batch(0))
    shape = (task.num_proposals, targets.num_targets)
    fixed = problem.sample_noise(jax.random.key(1), shape)

    def loss(parameters: Any, key: jax.Array, last: jax.Array, batch: Any) -> tuple[Any, Any]:
        problem, targets, rest = task.build(parameters, key, batch)
        if random:
            noise = problem.sample_noise(key, shape)
        else:
            # A dependence on the carry keeps the compiler from hoisting anything.
            noise = jax.tree.map(lambda leaf: leaf + 1e-20 * last[0, 0], fixed)
        frozen = lax.stop_gradient(targets)
        log_weights = _log_weights(problem, frozen, frozen.proposal, noise)
        kept = jax.tree.map(lambda leaf: leaf[:NUM_SAMPLES], noise)
        pathwise = _log_weights(problem, targets, frozen.proposal, kept)
        return -(task.weight * jnp.sum(jnp.mean(pathwise, axis=0)) + rest), log_weights

    def step(index: jax.Array, carry: Any, key: jax.Array, batches: Any) -> Any:
        parameters, opt_state, last = carry
        now = (jax.random.fold_in(key, index), last, task._replace(batches=batches).batch(index))
        gradient, log_weights = jax.grad(loss, has_aux=True)(parameters, *now)
        updates, opt_state = optimizer.update(gradient, opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state, log_weights

    @jax.jit
    def loop(key: jax.Array, parameters: Any, batches: Any) -> Any:
        start = (parameters, optimizer.init(parameters), jnp.zeros(shape))
        return lax.fori_loop(0, num_steps, lambda i, carry: step(i, carry, key, batches), start)

    return lambda key: loop(key, task.parameters, task.batches)


def _log_weights(problem: Problem, targets: Targets, frozen: Any, noise: Any) -> jax.Array:
    """``log p - log q`` of proposals, with ``log q`` at the frozen parameters of the proposal."""

    def one(proposal: Any, frozen: Any, data: Any, noise: Any) -> jax.Array:
        z, _ = problem.propose(proposal, noise)
        # From z rather than from the noise: the faster of the two forms in this program.
        return problem.log_joint(targets.model, data, z) - problem.log_proposal(frozen, z)

    per_target = jax.vmap(one)
    return jax.vmap(per_target, in_axes=(None, None, None, 0))(
        targets.proposal, frozen, targets.data, noise
    )


# Proposals per draw, in units of what is needed on average, after which the naive loop gives up.
_PATIENCE = 50
# T moves by this share of the relative error of the number of proposals.
_THRESHOLD_RATE = 0.01


def naive_steps(
    task: Task,
    optimizer: optax.GradientTransformation,
    num_steps: int,
    threshold: jax.Array,
    *,
    epsilon: float = 1e-4,
) -> Contestant:
    """Steps that make one proposal at a time, with the gradient and the update of RVRS.

    For tasks that have the same targets at every step; ``threshold`` is where T of each of them
    starts. Ends with parameters, T and the proposals per draw, averaged over all steps.
    """
    most = _PATIENCE / task.target_acceptance

    def draw(key: jax.Array, problem: Problem, targets: Targets, t: jax.Array) -> Any:
        """One draw of one target: its noise, its log weight and the proposals that it took."""

        def propose(carry: Any) -> Any:
            count, key, *_ = carry
            key, noise_key, accept_key = jax.random.split(key, 3)
            noise = problem.sample_noise(noise_key, ())
            z, log_q = problem.propose(targets.proposal, noise)
            log_weight = problem.log_joint(targets.model, targets.data, z) - log_q
            chance = jnp.exp(log_acceptance(log_weight, t, epsilon))
            return count + 1, key, noise, log_weight, jax.random.uniform(accept_key) < chance

        def unfinished(carry: Any) -> jax.Array:
            count, *_, accepted = carry
            return ~accepted & (count < most)

        count, _, noise, log_weight, _ = lax.while_loop(unfinished, propose, propose((0, key)))
        return noise, log_weight, count

    def step(index: jax.Array, carry: Any, key: jax.Array) -> Any:
        parameters, opt_state, t, total = carry
        problem, targets, _ = task.build(parameters, key, None)
        targets = lax.stop_gradient(targets)

        def draw_all(key: jax.Array) -> Any:
            keys = jax.random.split(key, targets.num_targets)
            in_axes = (0, Targets(proposal=0, model=None, data=0), 0)  # pyright: ignore
            return jax.vmap(lambda k, own, t: draw(k, problem, own, t), in_axes)(keys, targets, t)

        keys = jax.random.split(jax.random.fold_in(key, index), NUM_SAMPLES)
        noise, log_weight, count = lax.map(draw_all, keys)
        draws = rejection.accept_all(noise, log_weight)

        def loss(parameters: Any) -> jax.Array:
            problem, targets, rest = task.build(parameters, key, None)
            found = elbo_surrogate(problem, targets, draws, t, epsilon=epsilon)
            return -(task.weight * jnp.sum(found.surrogate) + rest)

        updates, opt_state = optimizer.update(jax.grad(loss)(parameters), opt_state, parameters)
        per_draw = jnp.mean(count, axis=0)
        t = t + _THRESHOLD_RATE * (per_draw * task.target_acceptance - 1)
        total = total + jnp.mean(per_draw) / num_steps
        return optax.apply_updates(parameters, updates), opt_state, t, total

    @jax.jit
    def loop(key: jax.Array, parameters: Any, threshold: jax.Array) -> Any:
        start = (parameters, optimizer.init(parameters), threshold, jnp.zeros(()))
        parameters, _, t, per_draw = lax.fori_loop(
            0, num_steps, lambda i, carry: step(i, carry, key), start
        )
        return parameters, t, per_draw

    return lambda key: loop(key, task.parameters, threshold)
