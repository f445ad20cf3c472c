import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.core import evidence, rejection, threshold
from rvrs.core.acceptance import log_acceptance
from rvrs.core.problem import Problem, Targets, log_weights
from rvrs.core.rejection import Tally
from tests.logistic import logistic_regression

ACCEPTANCES = [0.004, 0.02, 0.1, 0.3, 0.6, 0.9]


def acceptance_of(lw, t, epsilon):
    return np.asarray(jnp.mean(jnp.exp(log_acceptance(lw, t, epsilon)), axis=0))


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("target", ACCEPTANCES)
def test_calibrate_meets_the_target_on_its_log_weights(target, epsilon):
    # One column per kind of log weights: tame, wide, far from zero, heavy-tailed, of size 1e5.
    e = np.random.default_rng(0).standard_normal((100_000, 5))
    lw = np.stack(
        [e[:, 0], 30 * e[:, 1], e[:, 2] - 5000, -np.exp(2 * e[:, 3]), -3e4 * e[:, 4] ** 2], axis=1
    )
    lw = jnp.asarray(lw, jnp.float32)
    t = jax.jit(lambda lw: threshold.calibrate(lw, target, epsilon))(lw)
    assert t.shape == (5,)
    np.testing.assert_allclose(acceptance_of(lw, t, epsilon), target, rtol=0.01)


@pytest.mark.parametrize("target", ACCEPTANCES)
def test_calibrate_meets_the_target_within_one_percent_in_distribution(target):
    # lw ~ N(-7, 1): the true acceptance at the T found from 1e5 log weights, by quadrature.
    e = np.random.default_rng(1).standard_normal((100_000, 1))
    t = float(threshold.calibrate(jnp.asarray(e - 7, jnp.float32), target)[0])
    x = np.linspace(-10, 10, 4001)
    density = np.exp(-0.5 * x**2)
    true = np.sum(density / (1 + np.exp(-(x - 7 + t)))) / np.sum(density)
    np.testing.assert_allclose(true, target, rtol=0.01)


def test_calibrate_counts_non_finite_log_weights_as_rejected():
    lw = np.random.default_rng(2).standard_normal((10_000, 1)).astype(np.float32)
    lw[::2] = [[np.nan], [np.inf], [-np.inf], [np.nan]] * 1250
    t = threshold.calibrate(jnp.asarray(lw), 0.2, 1e-3)
    np.testing.assert_allclose(acceptance_of(jnp.asarray(lw), t, 1e-3), 0.2, rtol=1e-3)
    # Beyond reach: as much as there is.
    t = threshold.calibrate(jnp.asarray(lw), 0.8)
    assert jnp.isfinite(t).all()
    np.testing.assert_allclose(acceptance_of(jnp.asarray(lw), t, 0.0), 0.5, rtol=1e-3)
    assert jnp.isfinite(threshold.calibrate(jnp.full((10, 1), jnp.nan), 0.5)).all()


def test_a_target_of_one_is_ordinary_variational_inference():
    assert threshold.calibrate(jnp.zeros((10, 2)), 1.0).tolist() == [np.inf, np.inf]


def follow(problem, targets, start, target, rule, num_steps, seed=0, epsilon=1e-4):
    """T after a number of online steps, each with the proposals of one call of the sampler."""
    block = rejection.block_size(2, target)

    @jax.jit
    def run(start, key):
        def step(state, key):
            draws = rejection.draw_exact(
                key, problem, targets, state.value, num_samples=2, epsilon=epsilon,
                block_size=block, max_proposals=50 * block,
            )  # fmt: skip
            state = threshold.adapt(state, draws.tally, target, block_size=block, rule=rule)
            return state, state.value

        state, values = jax.lax.scan(step, threshold.init(start), jax.random.split(key, num_steps))
        return state.value, values

    return run(start, jax.random.key(seed))


def true_acceptance(problem, targets, t, num_proposals):
    estimates = jax.jit(
        lambda t: evidence.estimate(
            jax.random.key(99), problem, targets, t, num_proposals=num_proposals, epsilon=1e-4,
            chunk_size=20_000,
        )
    )(t)  # fmt: skip
    assert float(estimates.log_normalizer_error[0]) < 0.01
    return np.exp(float(estimates.log_normalizer[0]))


def calibrated(problem, targets, target):
    noise = problem.sample_noise(jax.random.key(5), (100_000, 1))
    lw = jax.jit(lambda n: log_weights(problem, targets, n))(noise)
    return threshold.calibrate(lw, target, 1e-4)


@pytest.mark.parametrize("offset", [50.0, pytest.param(-50.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [0.03, pytest.param(0.4, marks=pytest.mark.slow)])
def test_adapt_recovers_from_a_threshold_wrong_by_50(target, offset):
    problem, targets = logistic_regression()
    start = calibrated(problem, targets, target) + offset
    t, _ = follow(problem, targets, start, target, "tracking", 2000)
    np.testing.assert_allclose(true_acceptance(problem, targets, t, 1_000_000), target, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("offset", [50.0, -50.0])
@pytest.mark.parametrize("target", [0.004, 0.02, 0.1, 0.4])
def test_adapt_recovers_at_every_acceptance(target, offset, seed):
    problem, targets = logistic_regression()
    start = calibrated(problem, targets, target) + offset
    t, _ = follow(problem, targets, start, target, "tracking", 2000, seed)
    np.testing.assert_allclose(true_acceptance(problem, targets, t, 6_000_000), target, rtol=0.05)


@pytest.mark.slow
def test_tracking_beats_the_papers_rule():
    problem, targets = logistic_regression()
    target = 0.1
    start = calibrated(problem, targets, target) + 3.0
    errors = {}
    for rule, num_steps in (("tracking", 2000), ("sgd", 10_000)):
        t, _ = follow(problem, targets, start, target, rule, num_steps)
        errors[rule] = abs(true_acceptance(problem, targets, t, 1_000_000) / target - 1)
    assert errors["tracking"] < errors["sgd"]


def test_adapt_follows_a_proposal_that_moves():
    # The target's level rises by 0.05 a step, as an ELBO does early in training.
    problem = Problem(
        lambda key, shape: jax.random.normal(key, shape),
        propose=lambda phi, noise: (noise, jnp.zeros(())),
        log_proposal=lambda phi, z: jnp.zeros(()),
        log_joint=lambda level, data, z: level + 1.5 * z,
    )
    target, block = 0.1, 20

    def step(state, inputs):
        level, key = inputs
        draws = rejection.draw_exact(
            key, problem, Targets(jnp.zeros((1, 1)), level), state.value, num_samples=2,
            epsilon=1e-4, block_size=block, max_proposals=1000,
        )  # fmt: skip
        state = threshold.adapt(state, draws.tally, target, block_size=block)
        return state, state.value[0] + level

    levels = jnp.concatenate([jnp.zeros(500), 0.05 * jnp.arange(1000.0), jnp.full(1500, 50.0)])
    start = calibrated(problem, Targets(jnp.zeros((1, 1)), jnp.float32(0)), target)
    keys = jax.random.split(jax.random.key(0), levels.size)
    run = jax.jit(lambda start: jax.lax.scan(step, threshold.init(start), (levels, keys))[1])
    relative = np.asarray(run(start)) - float(start[0])
    assert np.abs(relative[-1]) < 0.1
    # While the level moves, T lags by less than what would halve or double the acceptance.
    assert np.mean(np.abs(relative[600:1500])) < np.log(2)


def test_the_papers_rule_descends_the_exact_gradient():
    # dL/dT = E_q[a - Z] E_q[a (1 - a)], unbiased from few proposals: mean over many tallies.
    rng = np.random.default_rng(0)
    a = 1 / (1 + np.exp(-(2 * rng.standard_normal((200_000, 5)) - 1)))
    tally = Tally(
        num_proposals=jnp.full(200_000, 5),
        acceptance=jnp.asarray(a.sum(1), jnp.float32),
        slope=jnp.asarray((a * (1 - a)).sum(1), jnp.float32),
        cross=jnp.asarray((a * a * (1 - a)).sum(1), jnp.float32),
        ratio=jnp.zeros(200_000),
        ratio_slope=jnp.zeros(200_000),
    )
    state = threshold.init(jnp.zeros(200_000))
    steps = -np.asarray(threshold.adapt(state, tally, 0.2, block_size=5, rule="sgd").value)
    x = np.linspace(-8, 8, 4001)
    q = np.exp(-0.5 * x**2) / np.exp(-0.5 * x**2).sum()
    s = 1 / (1 + np.exp(-(2 * x - 1)))
    expected = (q @ s - 0.2) * (q @ (s * (1 - s)))
    assert abs(steps.mean() - expected) < 4 * steps.std() / np.sqrt(steps.size)
    assert steps.std() / np.sqrt(steps.size) < 0.01 * abs(expected)


def test_the_error_of_a_step_is_zero_in_the_mean_at_the_solution():
    # With a mean over proposals instead of the sum, the random stop would bias T upwards.
    problem = Problem(
        lambda key, shape: jax.random.normal(key, shape),
        propose=lambda phi, noise: (noise, jnp.zeros(())),
        log_proposal=lambda phi, z: jnp.zeros(()),
        log_joint=lambda model, data, z: 3 * z,
    )
    x = np.linspace(-8, 8, 4001)
    q = np.exp(-0.5 * x**2) / np.exp(-0.5 * x**2).sum()
    target = float(q @ (1 / (1 + np.exp(-(3 * x - 4)))))
    count = 100_000
    draws = jax.jit(
        lambda key: rejection.draw_exact(
            key, problem, Targets(jnp.zeros((count, 1))), jnp.full(count, -4.0), num_samples=2,
            epsilon=0.0, block_size=8, max_proposals=10_000, reallocate=True,
        )
    )(jax.random.key(0))  # fmt: skip
    state = threshold.adapt(threshold.init(jnp.zeros(count)), draws.tally, target, block_size=8)
    error = np.asarray(state.drift, np.float64)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(count)
    naive = np.asarray(draws.tally.acceptance) / np.asarray(draws.tally.num_proposals) - target
    assert abs(naive.mean()) > 10 * naive.std() / np.sqrt(count)


def test_an_infinite_threshold_stays_infinite():
    tally = Tally(jnp.full(1, 2), jnp.full(1, 2.0), *[jnp.zeros(1)] * 4)
    state = threshold.adapt(threshold.init(jnp.full(1, jnp.inf)), tally, 1.0, block_size=2)
    assert state.value.tolist() == [np.inf]
