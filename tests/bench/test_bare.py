import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from rvrs import proposals
from rvrs.bench import bare, works
from rvrs.core import threshold
from rvrs.core.problem import Targets, log_weights
from rvrs.proposals.normal import DiagonalNormal

WORK = works.made_up_logistic(30, 4)
NUM_STEPS = 5
OPTIMIZER = optax.adam(1e-2)


def by_hand(key, num_proposals, work=WORK):
    """The same for one target, without vmap over targets, one step after the other."""
    family = proposals.diagonal_normal()
    parameters = family.init(jnp.zeros(work.dimension), 0.3)
    opt_state = OPTIMIZER.init(parameters)

    def loss(parameters, noise):
        frozen = lax.stop_gradient(parameters)
        z = jnp.stack([family.propose(parameters, e)[0] for e in noise[: bare.NUM_SAMPLES]])
        return -jnp.mean(
            jnp.stack([work.log_density(one) - family.log_density(frozen, one) for one in z])
        )

    for number in range(NUM_STEPS):
        shape = (num_proposals, 1, work.dimension)
        noise = jax.random.normal(jax.random.fold_in(key, number), shape)[:, 0]
        z = parameters.loc + jnp.exp(parameters.log_scale) * noise
        log_p = jax.vmap(work.log_density)(z)
        log_weights = log_p - jax.vmap(family.log_density, (None, 0))(parameters, z)
        updates, opt_state = OPTIMIZER.update(jax.grad(loss)(parameters, noise), opt_state)
        parameters = optax.apply_updates(parameters, updates)
    return parameters, log_weights


def test_the_bare_work_is_what_it_says_it_is():
    key = jax.random.key(3)
    found, _, log_weights = bare.bare_steps(bare.task(WORK, 0.3), OPTIMIZER, NUM_STEPS)(key)
    parameters, expected = jax.jit(by_hand, static_argnums=1)(key, 7)  # ceil(2 / 0.3)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6),
        found["proposal"],
        parameters,
    )
    np.testing.assert_allclose(log_weights[:, 0], expected, rtol=1e-4)


def several(num_targets):
    """Targets that differ, and share a parameter."""
    locations = jnp.arange(num_targets, dtype=float)[:, None] * jnp.ones(3)
    start = {
        "proposal": DiagonalNormal(jnp.zeros((num_targets, 3)), jnp.zeros((num_targets, 3))),
        "model": jnp.array(0.5),
    }
    problem = bare.normal_problem(3, lambda model, at, z: -jnp.sum((z - model * at) ** 2))

    def build(parameters, key, batch):
        return problem, Targets(parameters["proposal"], parameters["model"], locations), 0.0

    return bare.Task(start, build, 0.5)


@pytest.mark.slow
def test_every_target_of_the_bare_work_moves_to_its_own_optimum():
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, 800))
    task = several(3)
    found, _, _ = bare.bare_steps(task, optimizer, 800)(jax.random.key(0))
    means = found["model"] * jnp.arange(3)[:, None] * jnp.ones(3)
    np.testing.assert_allclose(found["proposal"].loc, means, atol=0.1)
    np.testing.assert_allclose(jnp.exp(found["proposal"].log_scale), 0.5**0.5, atol=0.1)


def test_without_random_numbers_the_same_noise_serves_all_steps():
    task = bare.task(WORK, 0.3)
    steps = bare.bare_steps(task, optax.set_to_zero(), 2, random=False)
    first, second = (steps(jax.random.key(number))[-1] for number in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.shape == (7, 1)
    assert len(np.unique(first)) == 7


def test_a_step_takes_one_batch_after_the_other():
    task = bare.Task(None, None, 0.5, {"rows": jnp.arange(6).reshape(3, 2)})
    assert [task.batch(index)["rows"].tolist() for index in (0, 2, 3)] == [[0, 1], [4, 5], [0, 1]]


def mean_log_weight(task, parameters):
    problem, targets, _ = task.build(parameters, jax.random.key(0), None)
    noise = problem.sample_noise(jax.random.key(1), (2000, 1))
    return jnp.mean(log_weights(problem, targets, noise))


def test_the_naive_loop_makes_as_many_proposals_as_the_acceptance_says():
    target, num_steps = 0.25, 2000
    task = bare.task(WORK, target)
    problem, targets, _ = task.build(task.parameters, jax.random.key(0), None)
    noise = problem.sample_noise(jax.random.key(1), (100_000, 1))
    t = threshold.calibrate(log_weights(problem, targets, noise), target, 1e-4)
    parameters, last, per_draw = bare.naive_steps(task, optax.set_to_zero(), num_steps, t)(
        jax.random.key(2)
    )
    # The number of proposals per draw is geometric.
    error = (1 - target) ** 0.5 / target / (bare.NUM_SAMPLES * num_steps) ** 0.5
    assert abs(per_draw - 1 / target) < 4 * error
    assert abs(last[0] - t[0]) < 0.5
    np.testing.assert_array_equal(parameters["proposal"].loc, task.parameters["proposal"].loc)


@pytest.mark.slow
def test_the_naive_loop_trains():
    task = bare.task(WORK, 0.5)
    steps = bare.naive_steps(task, optax.adam(0.02), 500, jnp.array([0.0]))
    parameters, _, _ = steps(jax.random.key(0))
    assert mean_log_weight(task, parameters) > mean_log_weight(task, task.parameters) + 1
