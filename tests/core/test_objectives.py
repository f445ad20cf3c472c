"""Gradient estimators against autodiff of the quadrature ELBO.

Two kinds of proof. *By quadrature*: the expectation of the two-draw estimator is itself a sum over
pairs of nodes, so its bias is known to many digits. *By sampling*: rejection loop, replay and
surrogate together, with enough draws that a bias of one percent of the gradient would show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.core import acceptance, objectives, rejection, threshold
from rvrs.core.objectives import elbo_surrogate
from rvrs.core.rejection import Draws, Tally
from rvrs.proposals import DiagonalNormal
from tests import exact

EPSILONS = [0.0, 1e-4, 1e-2, 0.1]
SIGMOID_MEANS = [0.03, 0.3, 0.9]


def slow(*cases):
    """Cases for the long run: compiling each of a grid takes seconds."""
    return [
        pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.slow)
        for case in cases
    ]


@functools.cache
def exact_gradient(name, sigmoid_mean, epsilon):
    """T, and the gradient of the exact ELBO as one flat vector: loc, log scale, theta."""
    case = exact.CASES[name]
    with jax.enable_x64():
        t = exact.threshold_for(case, sigmoid_mean)
        elbo = lambda p, theta: exact.quadrature(case, p, theta, t, epsilon).elbo  # noqa: E731
        by_p, by_theta = jax.jit(jax.grad(elbo, argnums=(0, 1)))(
            case.parameters(), jnp.asarray(exact.THETA)
        )
    return t, np.concatenate([by_p.loc, by_p.log_scale, by_theta])


def surrogate_gradients(case, targets, draws, t, epsilon, weights=None, **options):
    """Rows ``(B, loc + log scale + theta)`` of gradient estimates, or their weighted sum."""

    def total(proposal, data):
        moved = targets._replace(proposal=proposal, data=data)
        objective = elbo_surrogate(exact.problem(case), moved, draws, t, epsilon=epsilon, **options)
        return jnp.sum(objective.surrogate if weights is None else weights * objective.surrogate)

    by_p, by_data = jax.grad(total, argnums=(0, 1))(targets.proposal, targets.data)
    rows = jnp.concatenate([by_p.loc, by_p.log_scale, by_data], axis=1)
    return rows if weights is None else jnp.sum(rows, axis=0)


def expected_gradient(sigmoid_mean, epsilon, multiplier=None, **options):
    """The exact expectation of the S = 2 estimator on the 1-D target, over all pairs of nodes."""
    case = exact.CASES["quartic"]
    t, _ = exact_gradient("quartic", sigmoid_mean, epsilon)
    with jax.enable_x64():
        # The acceptance probability is a steep function; 401 nodes give only three digits.
        e = np.linspace(-6.5, 6.5, 1201)
        lw = exact.log_weights_at(case, e[:, None])
        r = np.exp(-0.5 * e**2) * np.asarray(exact.acceptance(lw, t, epsilon))
        r /= r.sum()
        first, second = np.meshgrid(np.arange(e.size), np.arange(e.size), indexing="ij")
        pairs = np.stack([first.ravel(), second.ravel()])
        count = pairs.shape[1]
        zeros = jnp.zeros(count)
        if multiplier is not None:
            options["multiplier"] = zeros + multiplier
        draws = Draws(
            noise=jnp.asarray(e[pairs][..., None]),
            log_weight=lw[pairs],
            num_draws=jnp.full(count, 2, jnp.int32),
            complete=jnp.ones(count, bool),
            log_normalizer=zeros,
            tally=Tally(zeros.astype(jnp.int32), *[zeros] * 5),
        )
        arguments = (draws, exact.targets(case, count), jnp.full(count, t), r[pairs].prod(0))
        gradient = jax.jit(
            lambda draws, targets, t, weights: surrogate_gradients(
                case, targets, draws, t, epsilon, weights=weights, **options
            )
        )
        return np.asarray(gradient(*arguments))


@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-2, *slow(1e-4, 0.1)])
@pytest.mark.parametrize("sigmoid_mean", SIGMOID_MEANS)
def test_expectation_of_the_estimator_is_the_gradient_to_six_digits(
    sigmoid_mean, epsilon, estimator
):
    _, gradient = exact_gradient("quartic", sigmoid_mean, epsilon)
    got = expected_gradient(sigmoid_mean, epsilon, estimator=estimator)
    np.testing.assert_allclose(got, gradient, rtol=1e-6, atol=1e-9)


@functools.cache
def constrained_gradient(sigmoid_mean, epsilon):
    """The gradient of the ELBO with T a function of the parameters that keeps Z, and dELBO/dlogZ.

    By the implicit function theorem: ``dT/dphi = -(dZ/dphi) / (dZ/dT)``.
    """
    case = exact.CASES["quartic"]
    t, at_fixed_threshold = exact_gradient("quartic", sigmoid_mean, epsilon)
    with jax.enable_x64():
        arguments = (case.parameters(), jnp.asarray(exact.THETA), jnp.asarray(t))

        def of(field):
            value = lambda p, theta, t: getattr(  # noqa: E731
                exact.quadrature(case, p, theta, t, epsilon), field
            )
            by_p, by_theta, by_t = jax.jit(jax.grad(value, argnums=(0, 1, 2)))(*arguments)
            return np.concatenate([by_p.loc, by_p.log_scale, by_theta]), float(by_t)

        (_, elbo_by_t), (z_by_phi, z_by_t) = of("elbo"), of("normalizer")
        normalizer = exact.quadrature(case, *arguments, epsilon).normalizer
        normalizer = float(normalizer)
    gradient = at_fixed_threshold - elbo_by_t * z_by_phi / z_by_t
    return gradient, elbo_by_t / (z_by_t / normalizer)


@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
@pytest.mark.parametrize("sigmoid_mean", [0.3, *slow(0.03, 0.9)])
def test_with_the_multiplier_it_is_the_gradient_at_constant_acceptance(
    sigmoid_mean, epsilon, estimator
):
    gradient, worth = constrained_gradient(sigmoid_mean, epsilon)
    got = expected_gradient(sigmoid_mean, epsilon, multiplier=worth, estimator=estimator)
    np.testing.assert_allclose(got, gradient, rtol=1e-6, atol=1e-9)
    # It is another gradient than the one at fixed T: a missing or wrong multiplier would show.
    _, at_fixed_threshold = exact_gradient("quartic", sigmoid_mean, epsilon)
    assert np.max(np.abs(gradient / at_fixed_threshold - 1)) > 0.01


@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
@pytest.mark.parametrize("sigmoid_mean", [0.9, *slow(0.03, 0.3)])
def test_the_multiplier_is_what_log_z_is_worth(sigmoid_mean, epsilon):
    case = exact.CASES["quartic"]
    t, _ = exact_gradient("quartic", sigmoid_mean, epsilon)
    _, worth = constrained_gradient(sigmoid_mean, epsilon)
    count = 400_000
    with jax.enable_x64():
        draws = rejection.draw_budget(
            jax.random.key(0), exact.problem(case), exact.targets(case, 1), jnp.full(1, t),
            num_samples=1, epsilon=epsilon, num_proposals=count,
        )  # fmt: skip
        state = threshold.init(jnp.full(1, t))
        state = threshold.observe(state, draws.tally)
        got = float(threshold.multiplier(state)[0])
    # What ratios of sums over this many proposals are right to.
    np.testing.assert_allclose(got, min(worth, 0.0), rtol=0.01, atol=2e-3)


@pytest.mark.parametrize("epsilon", [0.0, 1e-2])
def test_truncated_model_gradient_has_its_known_bias(epsilon):
    case = exact.CASES["quartic"]
    t, gradient = exact_gradient("quartic", 0.3, epsilon)
    got = expected_gradient(0.3, epsilon, model_gradient="truncated")
    np.testing.assert_allclose(got[:2], gradient[:2], rtol=1e-6)
    # What remains is E_r[grad_theta log p]; what is dropped is COV_r[A, c grad_theta log p].
    with jax.enable_x64():
        p, theta = case.parameters(), jnp.asarray(exact.THETA)
        z = jnp.linspace(-9, 9, 4001)[:, None]
        lw = jax.vmap(lambda z: exact.log_weight(case, p, theta, z))(z)
        a_e = exact.acceptance(lw, t, epsilon)
        density = jnp.exp(jax.vmap(lambda z: case.log_joint(theta, z))(z) - lw) * a_e
        density = density / density.sum()
        score = jax.vmap(lambda z: jax.grad(case.log_joint)(theta, z))(z)
        np.testing.assert_allclose(got[2:], density @ score, rtol=1e-6)
    assert np.all(np.abs(got[2:] / gradient[2:] - 1) > 0.02)


@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
@pytest.mark.parametrize("epsilon", [1e-2, *slow(0.0, 1e-4, 0.1)])
@pytest.mark.parametrize("sigmoid_mean", SIGMOID_MEANS)
@pytest.mark.parametrize("name", ["quartic", "banana"])
def test_one_draw_with_the_right_running_baseline_gives_the_gradient_to_five_digits(
    name, sigmoid_mean, epsilon, estimator
):
    # With the exact E_r[A] the estimator from one draw is unbiased too, and its expectation is a
    # sum over single nodes, in one dimension as well as in two. A second slot that was not filled
    # must not count, whatever is in it.
    case = exact.CASES[name]
    t, gradient = exact_gradient(name, sigmoid_mean, epsilon)
    with jax.enable_x64():
        grid = exact.noise_grid(case)
        count = grid.nodes.shape[0]
        lw = exact.log_weights_at(case, grid.nodes)
        r = jnp.exp(grid.log_mass) * exact.acceptance(lw, t, epsilon)
        r = r / r.sum()
        mean = jnp.sum(r * (lw - exact.log_acceptance(lw, t, epsilon)))
        zeros = jnp.zeros(count)
        tally = Tally(zeros.astype(jnp.int32), *[zeros] * 5)
        noise = jnp.stack([grid.nodes, grid.nodes[::-1]])
        draws = Draws(
            noise, jnp.stack([lw, lw[::-1]]), jnp.ones(count, jnp.int32), zeros == 0, zeros, tally
        )
        arguments = (draws, exact.targets(case, count), jnp.full(count, t), r)
        expectation = jax.jit(
            lambda draws, targets, t, weights: surrogate_gradients(
                case, targets, draws, t, epsilon, weights=weights, estimator=estimator,
                running_log_ratio=jnp.full(count, mean),
            )
        )  # fmt: skip
        got = expectation(*arguments)
    np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-8)


def sampled_gradients(name, sigmoid_mean, epsilon, *, copies, num_samples=2, seed=0, **options):
    """Independent gradient estimates, one per copy of the target, in float32."""
    case = exact.CASES[name]
    t, _ = exact_gradient(name, sigmoid_mean, epsilon)
    batch = 50_000
    problem = exact.problem(case)
    targets = exact.targets(case, batch, jnp.float32)
    thresholds = jnp.full(batch, t, jnp.float32)

    @jax.jit
    def estimate(key):
        draws = rejection.draw_exact(
            key, problem, targets, thresholds, num_samples=num_samples, epsilon=epsilon,
            block_size=rejection.block_size(num_samples, sigmoid_mean),
            max_proposals=100_000, reallocate=True,
        )  # fmt: skip
        rows = surrogate_gradients(case, targets, draws, thresholds, epsilon, **options)
        return rows, jnp.all(draws.complete)

    rows = []
    for index in range(-(-copies // batch)):
        row, complete = estimate(jax.random.fold_in(jax.random.key(seed), index))
        assert complete
        rows.append(np.asarray(row, np.float64))
    return np.concatenate(rows)


def z_scores(rows, gradient):
    error = rows.std(0, ddof=1) / np.sqrt(rows.shape[0])
    return (rows.mean(0) - gradient) / error, error


@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
@pytest.mark.parametrize(("sigmoid_mean", "epsilon"), [(0.3, 1e-2), *slow((0.3, 0.0), (0.9, 0.1))])
@pytest.mark.parametrize("name", ["quartic", "banana"])
def test_sampled_gradients_agree_with_the_exact_ones(name, sigmoid_mean, epsilon, estimator):
    _, gradient = exact_gradient(name, sigmoid_mean, epsilon)
    rows = sampled_gradients(name, sigmoid_mean, epsilon, copies=200_000, estimator=estimator)
    z, _ = z_scores(rows, gradient)
    assert np.all(np.abs(z) < 4), z


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("sigmoid_mean", SIGMOID_MEANS)
@pytest.mark.parametrize("name", ["quartic", "banana"])
def test_a_two_percent_bias_of_the_sampled_gradient_would_show(
    name, sigmoid_mean, epsilon, estimator
):
    _, gradient = exact_gradient(name, sigmoid_mean, epsilon)
    rows = sampled_gradients(name, sigmoid_mean, epsilon, copies=2_000_000, estimator=estimator)
    z, _ = z_scores(rows, gradient)
    assert np.all(np.abs(z) < 4), z
    # The linear combination of components that shows a wrong scale of the gradient best.
    covariance = np.cov(rows.T) / rows.shape[0]
    direction = np.linalg.solve(covariance, gradient)
    deviation = direction @ (rows.mean(0) - gradient) / np.sqrt(direction @ gradient)
    assert abs(deviation) < 4
    assert 0.02 * np.sqrt(direction @ gradient) > 4


@pytest.mark.parametrize("num_samples", [5, *slow(3)])
@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
def test_no_factor_of_s_is_missing(num_samples, estimator):
    _, gradient = exact_gradient("quartic", 0.3, 1e-2)
    rows = sampled_gradients(
        "quartic", 0.3, 1e-2, copies=100_000, num_samples=num_samples, estimator=estimator
    )
    z, error = z_scores(rows, gradient)
    assert np.all(np.abs(z) < 4), z
    # S / (S - 1) in place of 1 would shift the covariance terms by a quarter or more.
    assert np.max(np.abs(gradient) * 0.1 / error) > 4


MUTANTS = {
    # The released code's choice: A with log a in place of log a_e.
    "log a for log a_e": lambda a, lw, t, epsilon: a._replace(
        log_ratio=lw - jax.nn.log_sigmoid(lw + t)
    ),
    # The paper's sign of the covariance in the theta gradient.
    "minus sign of c": lambda a, lw, t, epsilon: a._replace(c=-a.c),
    "kappa without the guardrail": lambda a, lw, t, epsilon: a._replace(kappa=a.sigmoid),
    "c without the guardrail": lambda a, lw, t, epsilon: a._replace(c=1 - a.sigmoid),
    "A not centred": lambda a, lw, t, epsilon: a._replace(
        log_ratio=a.log_ratio * jnp.asarray([[1.0], [0.0]])
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_formulas_are_seen(mutant, monkeypatch):
    """What the tests above are worth: each of these mistakes shifts the expected gradient."""
    epsilon = 1e-2

    def wrong(lw, t, epsilon):
        return MUTANTS[mutant](acceptance.evaluate(lw, t, epsilon), lw, t, epsilon)

    monkeypatch.setattr(objectives, "evaluate", wrong)
    _, gradient = exact_gradient("quartic", 0.3, epsilon)
    worst = max(
        np.max(np.abs(expected_gradient(0.3, epsilon, estimator=estimator) / gradient - 1))
        for estimator in ("reparameterized", "score")
    )
    assert worst > 0.02


def test_at_an_infinite_threshold_the_gradient_is_the_pathwise_one_draw_by_draw():
    case = exact.CASES["banana"]
    with jax.enable_x64():
        count = 50
        targets = exact.targets(case, count)
        t = jnp.full(count, jnp.inf)
        draws = rejection.draw_exact(
            jax.random.key(0), exact.problem(case), targets, t, num_samples=2, epsilon=0.0,
            block_size=2, max_proposals=2,
        )  # fmt: skip
        rows = surrogate_gradients(case, targets, draws, t, 0.0)

        def pathwise(parameters, theta, noise):
            z = parameters.loc + jnp.exp(parameters.log_scale) * noise
            fixed = jax.lax.stop_gradient(parameters)
            return exact.log_weight(case, fixed, theta, z)

        one = DiagonalNormal(targets.proposal.loc[0], targets.proposal.log_scale[0])
        gradient = jax.jit(jax.grad(pathwise, argnums=(0, 1)))
        for index in range(count):
            by_p, by_theta = jax.tree.map(
                lambda *g: sum(g) / 2,
                *(gradient(one, targets.data[0], draws.noise[s, index]) for s in range(2)),
            )
            expected = jnp.concatenate([by_p.loc, by_p.log_scale, by_theta])
            np.testing.assert_allclose(rows[index], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["reparameterized", "score"])
@pytest.mark.parametrize("model_gradient", ["truncated", *slow("unbiased")])
def test_the_reported_value_estimates_the_elbo_whatever_the_gradient(estimator, model_gradient):
    case = exact.CASES["quartic"]
    count = 50_000
    t, _ = exact_gradient("quartic", 0.3, 1e-2)
    targets, thresholds = exact.targets(case, count, jnp.float32), jnp.full(count, t, jnp.float32)
    draws = rejection.draw_exact(
        jax.random.key(3), exact.problem(case), targets, thresholds, num_samples=2, epsilon=1e-2,
        block_size=7, max_proposals=10_000,
    )  # fmt: skip
    objective = elbo_surrogate(
        exact.problem(case), targets, draws, thresholds, epsilon=1e-2, estimator=estimator,
        model_gradient=model_gradient,
    )  # fmt: skip
    np.testing.assert_array_equal(objective.surrogate, objective.elbo)
    with jax.enable_x64():
        p, theta = case.parameters(), jnp.asarray(exact.THETA)
        elbo = float(exact.quadrature(case, p, theta, t, 1e-2).elbo)
    values = np.asarray(objective.elbo, np.float64)
    assert abs(values.mean() - elbo) < 4 * values.std() / np.sqrt(count)


def test_forward_mode_agrees_with_reverse_mode():
    case = exact.CASES["quartic"]
    with jax.enable_x64():
        targets, t = exact.targets(case, 4), jnp.full(4, -1.0)
        draws = rejection.draw_exact(
            jax.random.key(0), exact.problem(case), targets, t, num_samples=2, epsilon=1e-4,
            block_size=7, max_proposals=1000,
        )  # fmt: skip

        def total(loc, theta):
            moved = targets._replace(proposal=targets.proposal._replace(loc=loc), data=theta)
            objective = elbo_surrogate(exact.problem(case), moved, draws, t, epsilon=1e-4)
            return jnp.sum(objective.surrogate)

        args = (targets.proposal.loc, targets.data)
        forward = jax.jit(jax.jacfwd(total, argnums=(0, 1)))(*args)
        reverse = jax.jit(jax.grad(total, argnums=(0, 1)))(*args)
        jax.tree.map(np.testing.assert_allclose, forward, reverse)


def test_targets_without_their_draws_contribute_nothing():
    case = exact.CASES["quartic"]
    base = exact.problem(case)
    # The second target has no finite density anywhere, and an infinite derivative there.
    problem = base._replace(
        log_joint=lambda m, d, z: base.log_joint(m, d, z) + jnp.log(jnp.where(d[0] > 5, 0.0, 1.0))
    )
    targets = exact.targets(case, 2)
    targets = targets._replace(data=targets.data.at[1, 0].set(9.0))
    t = jnp.zeros(2)
    draws = rejection.draw_budget(
        jax.random.key(0), problem, targets, t, num_samples=2, epsilon=1e-4, num_proposals=60
    )
    np.testing.assert_array_equal(draws.complete, [True, False])

    def total(proposal):
        moved = targets._replace(proposal=proposal)
        return jnp.sum(elbo_surrogate(problem, moved, draws, t, epsilon=1e-4).surrogate)

    value, gradient = jax.value_and_grad(total)(targets.proposal)
    assert jnp.isfinite(value)
    np.testing.assert_array_equal(gradient.loc[1], 0.0)
    assert gradient.loc[0] != 0
