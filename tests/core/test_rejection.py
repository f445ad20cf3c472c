import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import digamma

from rvrs.core import rejection
from rvrs.core.problem import Problem, Targets
from tests import exact

CASE = exact.CASES["quartic"]
SIGMOID_MEANS = (0.9, 0.3, 0.1, 0.03, 0.01)
COPIES = 3000
EXACT = [
    "exact",
    "reallocated",
    pytest.param("one is enough", marks=pytest.mark.slow),
    "one is enough, reallocated",
]


def draws_of(sampler, rng_key, problem, targets, threshold, *, num_samples=2, **options):
    """Both samplers through one door, as the tests need them."""
    if sampler == "budget":
        options = {"num_proposals": 300}
        draw = rejection.draw_budget
    else:
        options = {"block_size": 20, "max_proposals": 20_000} | options
        options["reallocate"] = "reallocated" in sampler
        options["min_samples"] = 1 if "one" in sampler else None
        draw = rejection.draw_exact
    settings = {"num_samples": num_samples, "epsilon": 1e-3} | options
    compiled = jax.jit(lambda key, targets, t: draw(key, problem, targets, t, **settings))
    return compiled(rng_key, targets, threshold)


def mixed_targets(dtype=None):
    """Copies of one target under thresholds whose acceptance runs from 0.9 to 0.01, shuffled."""
    with jax.enable_x64():
        values = [exact.threshold_for(CASE, mean) for mean in SIGMOID_MEANS]
    which = np.random.default_rng(0).permutation(np.arange(len(values)).repeat(COPIES))
    t = jnp.asarray(np.asarray(values)[which], dtype)
    return exact.targets(CASE, which.size, dtype), t, which, values


def exact_cdf(threshold, epsilon):
    """The CDF of r on a grid of z."""
    with jax.enable_x64():
        p = CASE.parameters()
        z = np.linspace(-9, 9, 20001)
        lw = jax.vmap(lambda z: exact.log_weight(CASE, p, jnp.asarray(exact.THETA), z[None]))(z)
        q = stats.norm.pdf(z, CASE.loc[0], np.exp(CASE.log_scale[0]))
        density = q * np.asarray(exact.acceptance(lw, threshold, epsilon))
    cdf = np.cumsum((density[1:] + density[:-1]) / 2)
    cdf = np.concatenate([[0.0], cdf / cdf[-1]])
    return lambda x: np.interp(x, z, cdf)


@pytest.mark.parametrize("sampler", [*EXACT, "budget"])
def test_draws_follow_the_exact_cdf_of_r_for_every_acceptance(sampler):
    targets, t, which, values = mixed_targets()
    problem = exact.problem(CASE)
    draws = draws_of(sampler, jax.random.key(1), problem, targets, t)
    z = CASE.loc + np.exp(CASE.log_scale) * np.asarray(draws.noise)[..., 0]
    complete, count = np.asarray(draws.complete), np.asarray(draws.num_draws)
    for index, value in enumerate(values):
        cdf = exact_cdf(value, 1e-3)
        for slot in range(2):
            rows = (which == index) & complete & (count > slot)
            # Each slot by itself: keeping draws by value would show in the order.
            assert stats.kstest(z[slot, rows], cdf).pvalue > 1e-3, (value, slot)
        assert rows.sum() > (0.02 if "one" in sampler else 0.7) * COPIES
        assert stats.kstest(z[:, rows].ravel(), cdf).pvalue > 1e-3
        # And the draws of one target are independent of each other.
        assert abs(stats.spearmanr(z[0, rows], z[1, rows]).statistic) < 4 / np.sqrt(rows.sum())
    if sampler != "budget":
        assert complete.all()


def test_the_test_of_the_cdf_sees_draws_kept_by_value():
    # What the test above is worth: choosing the best accepted draw instead of the first one.
    targets, t, which, values = mixed_targets()
    problem = exact.problem(CASE)
    draws = draws_of("exact", jax.random.key(1), problem, targets, t)
    z = CASE.loc + np.exp(CASE.log_scale) * np.asarray(draws.noise)[..., 0]
    best = np.take_along_axis(z, np.argmax(draws.log_weight, 0)[None], 0)[0]
    assert stats.kstest(best[which == 2], exact_cdf(values[2], 1e-3)).pvalue < 1e-6


@pytest.mark.parametrize("sampler", EXACT)
def test_log_normalizer_is_unbiased(sampler):
    targets, t, which, values = mixed_targets()
    problem = exact.problem(CASE)
    draws = draws_of(sampler, jax.random.key(2), problem, targets, t)
    for index, value in enumerate(values):
        with jax.enable_x64():
            p, theta = CASE.parameters(), jnp.asarray(exact.THETA)
            log_z = np.log(exact.quadrature(CASE, p, theta, value, 1e-3).normalizer)
        estimates = np.asarray(draws.log_normalizer)[which == index]
        z_score = (estimates.mean() - log_z) / (estimates.std() / np.sqrt(estimates.size))
        assert abs(z_score) < 4, value
        # The log of the observed rate S / n would be off by about 1 / (2 S); this sees it.
        assert estimates.std() / np.sqrt(estimates.size) < 0.25 / 8


def test_one_draw_is_enough_where_it_is_said_to_be():
    targets, t, _, _ = mixed_targets()
    problem = exact.problem(CASE)
    draws = draws_of("one is enough", jax.random.key(2), problem, targets, t)
    assert draws.complete.all()
    assert set(np.asarray(draws.num_draws)) == {1, 2}
    every = draws_of("exact", jax.random.key(2), problem, targets, t)
    assert np.all(np.asarray(every.num_draws) == 2)
    # Of the same blocks: what both have is the same, and less was proposed.
    np.testing.assert_array_equal(draws.noise[0], every.noise[0])
    assert np.sum(draws.tally.num_proposals) < np.sum(every.tally.num_proposals)


@pytest.mark.parametrize("sampler", [*EXACT, "budget"])
def test_tally_sums_have_the_expectations_of_walds_identity(sampler):
    targets, t, which, values = mixed_targets()
    problem = exact.problem(CASE)
    tally = draws_of(sampler, jax.random.key(3), problem, targets, t).tally
    for index, value in enumerate(values):
        with jax.enable_x64():
            p, theta = CASE.parameters(), jnp.asarray(exact.THETA)
            normalizer, slope = jax.value_and_grad(
                lambda t: exact.quadrature(CASE, p, theta, t, 1e-3).normalizer  # noqa: B023
            )(value)
        rows = which == index
        count = np.asarray(tally.num_proposals)[rows]
        for total, mean in ((tally.acceptance, normalizer), (tally.slope, slope)):
            excess = np.asarray(total)[rows] - float(mean) * count
            assert abs(excess.mean() / (excess.std() / np.sqrt(COPIES))) < 4


def test_the_first_accepted_proposals_are_kept_in_order():
    # With noise equal to a running number, what is kept tells which proposals were accepted.
    def sample_noise(key, shape):
        return jnp.arange(shape[0], dtype=jnp.float32)[:, None] + jnp.zeros(shape, jnp.float32)

    accepted = jnp.asarray([3.0, 4.0, 9.0])
    problem = Problem(
        sample_noise,
        propose=lambda phi, noise: (noise, jnp.zeros(())),
        log_proposal=lambda phi, z: jnp.zeros(()),
        log_joint=lambda model, data, z: jnp.where(jnp.any(z == accepted + data), 1e6, -1e6),
    )
    targets = Targets(jnp.zeros((3, 1)), None, jnp.asarray([0.0, 1.0, 90.0]))
    draws = rejection.draw_budget(
        jax.random.key(0), problem, targets, jnp.zeros(3), num_samples=2, epsilon=0.0,
        num_proposals=12,
    )  # fmt: skip
    np.testing.assert_array_equal(draws.complete, [True, True, False])
    np.testing.assert_array_equal(draws.noise[:, :2], [[3, 4], [4, 5]])
    np.testing.assert_array_equal(draws.tally.acceptance, [3, 3, 0])
    draws = rejection.draw_exact(
        jax.random.key(0), problem, targets, jnp.zeros(3), num_samples=2, epsilon=0.0,
        block_size=12, max_proposals=12,
    )  # fmt: skip
    # Three of twelve were accepted: log Z is H_3 - H_12, wherever they were.
    np.testing.assert_allclose(draws.log_normalizer[:2], digamma(4) - digamma(13), rtol=1e-5)


@pytest.mark.parametrize("reallocate", [False, True])
def test_the_bound_on_proposals_holds_and_is_reported(reallocate):
    targets = exact.targets(CASE, 4)
    t = jnp.asarray([0.0, -60.0, 0.0, -60.0])
    draws = rejection.draw_exact(
        jax.random.key(0), exact.problem(CASE), targets, t, num_samples=2, epsilon=0.0,
        block_size=8, max_proposals=100, reallocate=reallocate,
    )  # fmt: skip
    np.testing.assert_array_equal(draws.complete, [True, False, True, False])
    assert int(draws.tally.num_proposals.sum()) <= 4 * 100
    assert jnp.all(jnp.isfinite(draws.log_normalizer))
    if not reallocate:
        assert int(draws.tally.num_proposals.max()) <= 100


def test_a_bound_below_the_block_size_shrinks_the_block():
    draws = rejection.draw_exact(
        jax.random.key(0), exact.problem(CASE), exact.targets(CASE, 1), jnp.asarray([-60.0]),
        num_samples=2, epsilon=0.0, block_size=50, max_proposals=7,
    )  # fmt: skip
    assert int(draws.tally.num_proposals[0]) == 7


@pytest.mark.slow
def test_reallocation_saves_proposals_where_one_target_is_hard():
    with jax.enable_x64():
        values = [exact.threshold_for(CASE, mean) for mean in (0.5, 1e-3)]
    t = jnp.asarray([values[0]] * 63 + [values[1]], jnp.float32)
    targets = exact.targets(CASE, 64)
    total = {
        sampler: int(
            draws_of(
                sampler, jax.random.key(0), exact.problem(CASE), targets, t, block_size=4
            ).tally.num_proposals.sum()
        )
        for sampler in ("exact", "reallocated")
    }
    assert total["reallocated"] < total["exact"] / 10


def test_gradients_pass_around_the_loop_in_both_modes():
    # The parameters reach the densities by argument and by closure, as a NumPyro model's do.
    def replayed(loc):
        base = exact.problem(CASE)
        problem = base._replace(log_joint=lambda m, d, z: base.log_joint(m, d, z - loc))
        targets = exact.targets(CASE, 3)
        targets = targets._replace(proposal=targets.proposal._replace(
            loc=targets.proposal.loc + loc))  # fmt: skip
        draws = rejection.draw_exact(
            jax.random.key(0), problem, targets, jnp.full(3, -4.0) + loc, num_samples=2,
            epsilon=1e-4, block_size=4, max_proposals=4000,
        )  # fmt: skip
        assert draws.noise.shape == (2, 3, 1)
        z = jax.vmap(jax.vmap(problem.propose), (None, 0))(targets.proposal, draws.noise)[0]
        return jnp.sum(z) + jnp.sum(draws.log_weight) + jnp.sum(draws.log_normalizer)

    # Only the replay depends on loc: six draws with derivative one each.
    assert jnp.allclose(jax.grad(replayed)(0.3), 6.0)
    assert jnp.allclose(jax.jvp(replayed, (0.3,), (1.0,))[1], 6.0)
    assert jnp.allclose(jax.jit(jax.grad(replayed))(0.3), 6.0)


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_proposals_of_non_finite_density_are_rejected(bad, epsilon):
    base = exact.problem(CASE)
    problem = base._replace(
        log_joint=lambda m, d, z: jnp.where(z[0] > 0, bad, base.log_joint(m, d, z))
    )
    targets = exact.targets(CASE, 500)
    draws = rejection.draw_exact(
        jax.random.key(0), problem, targets, jnp.zeros(500), num_samples=2, epsilon=epsilon,
        block_size=4, max_proposals=4000,
    )  # fmt: skip
    assert draws.complete.all()
    z = CASE.loc + np.exp(CASE.log_scale) * np.asarray(draws.noise)[..., 0]
    assert np.all(z <= 0)
    for leaf in jax.tree.leaves(draws):
        assert np.all(np.isfinite(leaf))


def test_a_target_without_any_finite_density_ends_at_the_bound():
    base = exact.problem(CASE)
    problem = base._replace(log_joint=lambda m, d, z: jnp.nan * z[0])
    draws = rejection.draw_exact(
        jax.random.key(0), problem, exact.targets(CASE, 2), jnp.zeros(2), num_samples=2,
        epsilon=0.1, block_size=4, max_proposals=40,
    )  # fmt: skip
    assert not draws.complete.any()
    assert jnp.all(draws.tally.acceptance == 0)
    assert jnp.all(jnp.isfinite(draws.log_normalizer))


def test_everything_is_accepted_at_an_infinite_threshold():
    draws = rejection.draw_exact(
        jax.random.key(0), exact.problem(CASE), exact.targets(CASE, 1000),
        jnp.full(1000, jnp.inf), num_samples=2, epsilon=0.0, block_size=2, max_proposals=2,
    )  # fmt: skip
    assert draws.complete.all()
    np.testing.assert_array_equal(draws.log_normalizer, 0.0)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_both_key_styles_and_noise_made_of_keys_give_the_same_law(make_key):
    base = exact.problem(CASE)
    by_key = base._replace(
        sample_noise=lambda key, shape: jax.random.split(key, shape),
        propose=lambda phi, key: base.propose(phi, jax.random.normal(key, (1,))),
    )
    targets = exact.targets(CASE, 200)
    t = jnp.full(200, -2.0)
    for problem in (base, by_key):
        draws = draws_of("exact", make_key(0), problem, targets, t)
        z, _ = jax.vmap(jax.vmap(problem.propose), (None, 0))(targets.proposal, draws.noise)
        assert stats.kstest(np.asarray(z).ravel(), exact_cdf(-2.0, 1e-3)).pvalue > 1e-3


@pytest.mark.parametrize("sampler", ["exact", "reallocated", "budget"])
def test_float64_is_kept(sampler):
    with jax.enable_x64():
        targets = exact.targets(CASE, 8)
        t = jnp.full(8, -3.0)
        draws = draws_of(sampler, jax.random.key(0), exact.problem(CASE), targets, t)
        for leaf in (draws.noise, draws.log_weight, draws.log_normalizer, draws.tally.acceptance):
            assert leaf.dtype == jnp.float64
        assert draws.tally.num_proposals.dtype == jnp.int32


def test_acceptance_far_below_float32_steps_of_the_uniform_is_right():
    # 2e7 proposals at a = 1e-7: an ordinary float32 uniform would accept about twice as many.
    u = jax.jit(lambda key: rejection._uniform(key, (20_000_000,), jnp.dtype(jnp.float32)))(
        jax.random.key(0)
    )
    assert float(u.min()) > 0
    for a in (1e-5, 1e-6, 1e-7):
        accepted = int(jnp.sum(u <= a))
        assert abs(accepted - 2e7 * a) < 4 * np.sqrt(2e7 * a) + 1e-9


@pytest.mark.parametrize(
    ("num_samples", "acceptance", "size"), [(2, 0.1, 20), (2, 0.3, 7), (2, 1.0, 2), (3, 0.004, 750)]
)
def test_block_size_is_the_expected_number_of_proposals(num_samples, acceptance, size):
    assert rejection.block_size(num_samples, acceptance) == size


@pytest.mark.parametrize("reallocate", [False, True])
def test_trials_are_counted_across_blocks(reallocate):
    # Noise numbers the proposals of a block. The first block (12) accepts the 4th and the 10th,
    # the second one (6) the 4th: the third draw took 12 + 4 trials.
    problem = Problem(
        lambda key, shape: jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape),
        propose=lambda phi, noise: (noise, jnp.zeros(())),
        log_proposal=lambda phi, z: jnp.zeros(()),
        log_joint=lambda model, data, z: jnp.where((z == 3) | (z == 9), 1e6, -1e6),
    )
    draws = rejection.draw_exact(
        jax.random.key(0), problem, Targets(jnp.zeros((1, 1))), jnp.zeros(1), num_samples=3,
        epsilon=0.0, block_size=12, max_proposals=100, reallocate=reallocate,
    )  # fmt: skip
    np.testing.assert_array_equal(draws.noise[:, 0], [3, 9, 3])
    assert int(draws.tally.num_proposals[0]) == 18
    np.testing.assert_allclose(draws.log_normalizer, digamma(3) - digamma(16), rtol=1e-6)
