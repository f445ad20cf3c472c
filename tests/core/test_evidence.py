import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.core import evidence
from rvrs.core.acceptance import log_acceptance
from rvrs.core.problem import log_weights
from tests import exact

# Lighter tails than its proposal, so that even the importance weights have all moments.
CASE = exact.CASES["quartic"]
FIELDS = ("elbo", "log_normalizer", "log_evidence")


@functools.cache
def exact_values(t, epsilon):
    with jax.enable_x64():
        p, theta = CASE.parameters(), jnp.asarray(exact.THETA)
        values = exact.quadrature(CASE, p, theta, t, epsilon)
    return {
        "elbo": float(values.elbo),
        "log_normalizer": float(np.log(values.normalizer)),
        "log_evidence": float(values.log_evidence),
    }


def estimates(t, epsilon, *, num_proposals, chunk_size=10_000, seeds=(0,)):
    run = jax.jit(
        lambda key: evidence.estimate(
            key, exact.problem(CASE), exact.targets(CASE, t.size), t, num_proposals=num_proposals,
            epsilon=epsilon, chunk_size=chunk_size,
        )
    )  # fmt: skip
    return [run(jax.random.key(seed)) for seed in seeds]


@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
def test_estimates_are_within_four_standard_errors_of_the_exact_values(epsilon):
    thresholds = [30.0, 0.0, -3.0, -5.0]
    [got] = estimates(jnp.asarray(thresholds), epsilon, num_proposals=400_000)
    for index, t in enumerate(thresholds):
        for name in FIELDS:
            value = float(getattr(got, name)[index])
            error = float(getattr(got, f"{name}_error")[index])
            wanted = exact_values(t, epsilon)[name]
            rounding = 1e-6 * (1 + abs(wanted))
            assert abs(value - wanted) < 4 * error + rounding, (t, name)
            assert error < 0.02


def test_standard_errors_are_those_of_repeated_runs():
    # 200 runs: the spread is known to 5 %, the mean of the reported errors far better.
    t = jnp.asarray([-2.0])
    runs = estimates(t, 1e-3, num_proposals=4000, chunk_size=1000, seeds=range(200))
    for name in FIELDS:
        values = np.array([float(getattr(run, name)[0]) for run in runs])
        errors = np.array([float(getattr(run, f"{name}_error")[0]) for run in runs])
        assert 0.8 < errors.mean() / values.std(ddof=1) < 1.25, name
        z = (values - exact_values(-2.0, 1e-3)[name]) / errors
        assert abs(z.mean()) < 4 / np.sqrt(200) + 0.05, name
        assert 0.8 < z.std() < 1.25, name


def test_chunks_merge_to_what_one_pass_over_all_log_weights_gives():
    rng = np.random.default_rng(0)
    # Chunks that differ wildly in level and centre, so that every rescaling matters.
    lw = np.concatenate([rng.standard_normal((500, 1)) * s + m for s, m in
                         [(1, 0), (3, -40), (0.1, 12), (2, 700), (1, -900)]])  # fmt: skip
    with jax.enable_x64():
        t = jnp.asarray([-5.0])
        for epsilon in (0.0, 1e-3):
            whole = evidence.from_log_weights(jnp.asarray(lw), t, epsilon=epsilon)
            parts = [evidence._moments(jnp.asarray(part), t, epsilon) for part in np.split(lw, 5)]
            merged = evidence._summarize(functools.reduce(evidence._merge, parts), t)
            for name, one, other in zip(whole._fields, whole, merged, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-10, err_msg=name)


def test_the_elbo_rises_as_the_threshold_falls_and_ends_at_the_log_evidence():
    thresholds = np.linspace(6.0, -25.0, 32)
    elbos = np.array([exact_values(t, 0.0)["elbo"] for t in thresholds])
    assert np.all(np.diff(elbos) > -1e-12)
    log_evidence = exact_values(0.0, 0.0)["log_evidence"]
    assert abs(elbos[-1] - log_evidence) < 1e-6
    [got] = estimates(jnp.asarray(thresholds, jnp.float32), 0.0, num_proposals=200_000)
    # The same proposals for all thresholds: their common noise does not break the order.
    np.testing.assert_allclose(got.elbo, elbos, atol=4 * float(np.max(got.elbo_error)) + 1e-4)


def test_the_bound_of_proposition_2_holds_over_a_grid_of_thresholds():
    # Delta < 1.5 e^T xi for T < -log(2 xi), xi = E_posterior[p(x, z) / q(z)]; needs a proposal
    # with heavier tails than the target.
    case = CASE
    with jax.enable_x64():
        p, theta = case.parameters(), jnp.asarray(exact.THETA)
        z = jnp.linspace(-8, 8, 8001)[:, None]
        log_p = jax.vmap(lambda z: case.log_joint(theta, z))(z)
        lw = jax.vmap(lambda z: exact.log_weight(case, p, theta, z))(z)
        xi = float(jnp.sum(jnp.exp(log_p + lw)) / jnp.sum(jnp.exp(log_p)))
        first = -np.log(2 * xi)
        gaps = []
        for t in np.linspace(first - 1e-6, first - 12, 25):
            values = exact.quadrature(case, p, theta, t, 0.0)
            gap = float(values.log_evidence - values.elbo)
            assert -1e-10 < gap < 1.5 * np.exp(t) * xi
            gaps.append(gap)
    # The bound is not tight: r differs from the posterior by a factor 1 + O(e^T), and a
    # Kullback-Leibler divergence is quadratic in such a difference, so the gap shrinks as e^2T.
    assert np.isclose(np.log(gaps[12] / gaps[-1]), 2 * 6.0, rtol=0.05)


def test_the_posterior_moments_appear_as_the_threshold_falls():
    # E_r[f] = E_q[a_e f] / Z at T = -20, against the posterior's by quadrature.
    problem, targets = exact.problem(CASE), exact.targets(CASE, 1)
    noise = problem.sample_noise(jax.random.key(0), (400_000, 1))
    lw = jax.jit(lambda n: log_weights(problem, targets, n))(noise)
    weight = np.exp(np.asarray(log_acceptance(lw, jnp.asarray([-20.0]), 0.0), np.float64))[:, 0]
    z = CASE.loc + np.exp(CASE.log_scale) * np.asarray(noise, np.float64)[:, 0]
    mesh = np.linspace(-8, 8, 8001)[:, None]
    with jax.enable_x64():
        log_p = np.asarray(jax.vmap(lambda z: CASE.log_joint(jnp.asarray(exact.THETA), z))(mesh))
    posterior = np.exp(log_p) / np.exp(log_p).sum()
    for f in (lambda z: z[:, 0], lambda z: z[:, 0] ** 2, lambda z: np.sin(3 * z[:, 0])):
        ratio = weight / weight.sum()
        estimate = ratio @ f(z)
        error = np.sqrt(np.sum(ratio**2 * (f(z) - estimate) ** 2))
        assert abs(estimate - posterior @ f(mesh)) < 4 * error
        assert error < 0.02


def test_a_million_proposals_need_no_more_memory_than_ten_thousand():
    def peak(num_proposals):
        compiled = jax.jit(
            lambda key: evidence.estimate(
                key, exact.problem(CASE), exact.targets(CASE, 1), jnp.zeros(1),
                num_proposals=num_proposals, epsilon=1e-4,
            )
        ).lower(jax.random.key(0)).compile()  # fmt: skip
        return compiled.memory_analysis().temp_size_in_bytes

    # One chunk is a program without a loop, which may be laid out a little more tightly.
    assert peak(1_000_000) == peak(20_000) <= 1.5 * peak(10_000)


def test_proposals_without_density_have_weight_zero():
    lw = jnp.asarray([[0.3], [jnp.nan], [-0.5], [jnp.inf], [-jnp.inf], [0.1]], jnp.float32)
    got = evidence.from_log_weights(lw, jnp.zeros(1), epsilon=0.1)
    finite = np.array([0.3, -0.5, 0.1])
    a_e = 0.1 + 0.9 / (1 + np.exp(-finite))
    np.testing.assert_allclose(got.log_normalizer, np.log(a_e.sum() / 6), rtol=1e-5)
    np.testing.assert_allclose(got.log_evidence, np.log(np.exp(finite).sum() / 6), rtol=1e-5)
    elbo = a_e @ (finite - np.log(a_e)) / a_e.sum() + np.log(a_e.sum() / 6)
    np.testing.assert_allclose(got.elbo, elbo, rtol=1e-5)


def test_nothing_but_non_finite_densities_gives_minus_infinity_and_no_nan():
    got = evidence.from_log_weights(jnp.full((8, 1), jnp.nan), jnp.zeros(1), epsilon=0.0)
    assert got.log_normalizer[0] == -jnp.inf
    assert got.log_evidence[0] == -jnp.inf
    assert got.elbo[0] == -jnp.inf
    assert not any(bool(jnp.isnan(field[0])) for field in got)
