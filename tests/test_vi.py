import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from rvrs import loop, proposals, vi
from rvrs.core import threshold
from tests import exact

# exp(-z^4 / 2 + z / 2): skewed and light-tailed in one dimension, with a known integral.
GRID = np.linspace(-4, 4, 8001)
WEIGHTS = np.exp(-0.5 * GRID**4 + 0.5 * GRID)
LOG_EVIDENCE = math.log(WEIGHTS.sum() * (GRID[1] - GRID[0]))


def quartic(z):
    return jnp.sum(-0.5 * z**4 + 0.5 * z)


def algorithm(logdensity_fn=quartic, **settings):
    optimizer = settings.pop("optimizer", None) or optax.adam(1e-2)
    return vi.as_top_level_api(logdensity_fn, optimizer, **settings)


@functools.cache
def trained(num_steps=3000, **settings):
    alg = algorithm(optimizer=optax.adam(optax.cosine_decay_schedule(2e-2, num_steps)), **settings)
    state, info = vi.run(jax.random.key(0), alg, alg.init(jnp.zeros(2)), num_steps)
    return alg, state, info


@pytest.mark.slow
def test_training_closes_the_gap_that_mean_field_leaves():
    gaps = {}
    for target_acceptance in (1.0, 0.3, 0.05):
        alg, state, _ = trained(target_acceptance=target_acceptance)
        got = alg.evaluate(jax.random.key(1), state, 200_000)
        gaps[target_acceptance] = 2 * LOG_EVIDENCE - float(got.elbo)
        assert float(got.elbo_error) < 3e-3
    assert gaps[1.0] > 0.08
    assert gaps[0.3] < 0.2 * gaps[1.0]
    assert gaps[0.05] < 0.02 * gaps[1.0] + 4 * 3e-3


def test_log_evidence_is_found_within_error():
    alg, state, _ = trained(target_acceptance=0.3)
    got = alg.evaluate(jax.random.key(2), state, 400_000)
    assert abs(float(got.log_evidence) - 2 * LOG_EVIDENCE) < 4 * float(got.log_evidence_error)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"proposal": "mvn"}, id="full rank"),
        pytest.param(
            {"proposal": proposals.low_rank_normal(1)}, id="low rank", marks=pytest.mark.slow
        ),
        pytest.param({"estimator": "score", "num_samples": 4}, id="score"),
        pytest.param(
            {"num_samples": 1, "baseline": "running"}, id="one draw", marks=pytest.mark.slow
        ),
        pytest.param({"num_samples": 5}, id="five draws", marks=pytest.mark.slow),
        pytest.param({"threshold_rule": "sgd"}, id="sgd rule", marks=pytest.mark.slow),
        pytest.param({"epsilon": 0.0}, id="no guardrail"),
    ],
)
def test_every_option_trains_to_the_same_answer(settings):
    alg, state, info = trained(target_acceptance=0.3, **settings)
    got = alg.evaluate(jax.random.key(1), state, 200_000)
    assert 2 * LOG_EVIDENCE - float(got.elbo) < 0.025
    assert abs(float(jnp.mean(info.acceptance[-1000:])) / 0.3 - 1) < 0.1
    assert not info.capped.any()


def test_the_elbo_of_the_steps_is_unbiased():
    # Steps at a learning rate of zero: one ELBO, estimated by every step, against evaluate().
    _, state, _ = trained(target_acceptance=0.3)
    frozen = algorithm(
        optimizer=optax.sgd(0.0), target_acceptance=0.3, threshold=float(state.threshold.value[0])
    )
    start = frozen.init(jnp.zeros(2))._replace(parameters=state.parameters)
    _, info = vi.run(jax.random.key(3), frozen, start, 20_000, chunk_size=20_000)
    elbo = np.asarray(info.elbo, np.float64)
    exact_elbo = frozen.evaluate(jax.random.key(4), start, 1_000_000)
    error = math.hypot(elbo.std() / math.sqrt(elbo.size), float(exact_elbo.elbo_error))
    assert abs(elbo.mean() - float(exact_elbo.elbo)) < 4 * error


def test_draws_follow_r_and_r_the_target():
    alg, state, _ = trained(target_acceptance=0.05)
    z = np.asarray(alg.sample(jax.random.key(5), state, 4000))
    assert z.shape == (4000, 2)
    cdf = np.cumsum(WEIGHTS) / WEIGHTS.sum()
    for coordinate in z.T:
        assert stats.kstest(coordinate, lambda x: np.interp(x, GRID, cdf)).pvalue > 1e-3
    assert abs(np.corrcoef(z.T)[0, 1]) < 4 / math.sqrt(4000)


def test_positions_may_be_any_pytree():
    def log_density(position):
        return -0.5 * jnp.sum(position["a"] ** 2) - 2 * jnp.sum((position["b"]["c"] - 3) ** 2)

    alg = algorithm(log_density, target_acceptance=0.5)
    state = alg.init({"a": jnp.zeros((2, 3)), "b": {"c": jnp.asarray(2.5)}})
    state, _ = vi.run(jax.random.key(0), alg, state, 3000)
    draws = alg.sample(jax.random.key(1), state, 500)
    assert draws["a"].shape == (500, 2, 3)
    assert draws["b"]["c"].shape == (500,)
    assert abs(float(draws["b"]["c"].mean()) - 3) < 0.1


def test_a_run_of_many_chunks_compiles_once():
    alg = algorithm()
    state = alg.init(jnp.zeros(2))
    before = loop._run_chunk._cache_size()
    # 3 whole chunks and a shorter one, then more steps from the state that came out.
    state, _ = vi.run(jax.random.key(0), alg, state, 350, chunk_size=100)
    state, _ = vi.run(jax.random.key(1), alg, state, 123, chunk_size=100)
    assert loop._run_chunk._cache_size() == before + 1


def test_the_result_does_not_depend_on_the_chunk_size_and_equals_a_scan_of_steps():
    alg = algorithm()
    start = alg.init(jnp.zeros(2))
    key = jax.random.key(0)
    states = [vi.run(key, alg, start, 90, chunk_size=size)[0] for size in (90, 40)]
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(90))
    scanned, _ = jax.jit(lambda s: jax.lax.scan(lambda s, k: alg.step(k, s), s, keys))(start)
    for other in (states[1], scanned):
        jax.tree.map(np.testing.assert_array_equal, states[0], other)


def test_progress_is_reported_after_every_chunk():
    alg = algorithm()
    seen = []
    _, info = vi.run(
        jax.random.key(0), alg, alg.init(jnp.zeros(1)), 25, chunk_size=10,
        callback=lambda done, state, info: seen.append((done, info.elbo.size)),
    )  # fmt: skip
    assert seen == [(10, 10), (20, 10), (25, 5)]
    assert info.elbo.shape == (25,)


@pytest.mark.parametrize(
    ("make_key", "x64"),
    [
        (jax.random.PRNGKey, True),
        pytest.param(jax.random.key, True, marks=pytest.mark.slow),
        pytest.param(jax.random.PRNGKey, False, marks=pytest.mark.slow),
        pytest.param(jax.random.key, False, marks=pytest.mark.slow),
    ],
)
def test_both_precisions_and_key_styles(make_key, x64):
    with jax.enable_x64(x64):
        alg = algorithm(proposal="mvn")
        state, info = vi.run(make_key(0), alg, alg.init(jnp.zeros(2)), 50)
        wanted = jnp.float64 if x64 else jnp.float32
        for leaf in (state.parameters.loc, state.threshold.value, info.elbo, info.acceptance):
            assert leaf.dtype == wanted
        assert alg.sample(make_key(1), state, 10).dtype == wanted
        assert alg.evaluate(make_key(2), state, 1000).elbo.dtype == wanted


@pytest.mark.slow
def test_steps_can_be_mapped_over_seeds():
    alg = algorithm(target_acceptance=0.3)
    start = alg.init(jnp.zeros(2))

    def run(key):
        return jax.lax.scan(lambda s, k: alg.step(k, s), start, jax.random.split(key, 200))

    state, info = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 3))
    assert state.parameters.loc.shape == (3, 2)
    assert len(np.unique(state.parameters.loc[:, 0])) == 3
    one, _ = jax.jit(run)(jax.random.split(jax.random.key(0), 3)[1])
    np.testing.assert_allclose(one.parameters.loc, state.parameters.loc[1], rtol=1e-4)
    assert not info.capped.any()


def test_a_step_that_hits_the_bound_moves_the_threshold_and_nothing_else():
    alg = algorithm(target_acceptance=0.1, epsilon=0.0, max_proposals=200)
    start = alg.init(jnp.zeros(2))
    low = start._replace(
        threshold=start.threshold._replace(value=start.threshold.value - 60.0),
    )
    state, info = jax.jit(alg.step)(jax.random.key(0), low)
    assert bool(info.capped)
    assert int(info.num_proposals) <= 200
    assert jnp.isnan(info.elbo)
    assert state.threshold.value[0] > low.threshold.value[0]
    jax.tree.map(np.testing.assert_array_equal, state.parameters, low.parameters)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, low.opt_state)
    # And it gets out of there.
    _, info = vi.run(jax.random.key(1), alg, low, 500)
    assert not info.capped[-100:].any()


def test_a_fixed_threshold_stays_where_it_is():
    alg = algorithm(threshold=-2.5)
    state, info = vi.run(jax.random.key(0), alg, alg.init(jnp.zeros(2)), 20)
    np.testing.assert_array_equal(info.threshold, -2.5)
    assert state.threshold.value.tolist() == [-2.5]


@pytest.mark.slow
def test_a_density_that_is_nan_now_and_then_does_no_harm():
    def log_density(z):
        return jnp.where(jnp.abs(jnp.sin(1000 * z[0])) < 0.02, jnp.nan, quartic(z))

    alg = algorithm(log_density, target_acceptance=0.2)
    state, info = vi.run(jax.random.key(0), alg, alg.init(jnp.full(2, 0.3)), 2000)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
    assert np.all(np.isfinite(info.elbo))
    assert np.all(np.isfinite(alg.sample(jax.random.key(1), state, 100)))


def test_a_density_without_finite_gradient_skips_the_step():
    # The square root's derivative is infinite where its argument is exactly zero.
    def log_density(z):
        return -jnp.sum(z**2) + jnp.sum(jnp.sqrt(jnp.maximum(z, 0.0) * 0.0))

    alg = algorithm(log_density)
    start = alg.init(jnp.zeros(2))
    state, info = jax.jit(alg.step)(jax.random.key(0), start)
    jax.tree.map(np.testing.assert_array_equal, state.parameters, start.parameters)
    assert jnp.isfinite(info.elbo)


def test_draws_that_could_not_be_made_are_nan_and_say_so():
    alg = algorithm(lambda z: jnp.where(jnp.abs(z[0]) < 1e-7, 0.0, -jnp.inf), epsilon=0.0)
    state = alg.init(jnp.zeros(1))
    with pytest.warns(UserWarning, match="10 of 10 draws are NaN: max_proposals was hit"):
        draws = alg.sample(jax.random.key(0), state, 10)
    assert np.all(np.isnan(draws))


def test_sampling_memory_does_not_grow_with_the_number_of_draws():
    alg, state, _ = trained(target_acceptance=0.3)
    settings = alg.sample.keywords["settings"]

    def temporary(num_samples):
        lowered = vi._sample.lower(jax.random.key(0), state, quartic, settings, num_samples)
        memory = lowered.compile().memory_analysis()
        return memory.temp_size_in_bytes - 3 * memory.output_size_in_bytes

    assert temporary(200_000) < 1.5 * max(temporary(20_000), 1_000_000)


@pytest.mark.parametrize(
    "baseline", [pytest.param("running", marks=pytest.mark.slow), "leave_one_out"]
)
def test_exact_gradients_reach_the_optimizer(baseline):
    # One S = 2 step with plain SGD: the mean move over many keys is the exact gradient.
    case = exact.CASES["quartic"]
    with jax.enable_x64():
        theta = jnp.asarray(exact.THETA)
        t = exact.threshold_for(case, 0.3)
        alg = algorithm(
            lambda z: case.log_joint(theta, z), optimizer=optax.sgd(1.0), target_acceptance=0.3,
            threshold=t, epsilon=1e-2, baseline=baseline,
        )  # fmt: skip
        start = alg.init(jnp.asarray(case.loc))._replace(parameters=case.parameters())
        # What the running mean converges to, from points of equal mass under the proposal.
        nodes = jax.scipy.special.ndtri((jnp.arange(100_000.0) + 0.5) / 100_000)
        lw = exact.log_weights_at(case, nodes[:, None])[:, None]
        known = threshold.observe_weights(start.threshold, lw, 1e-2, 7)
        start = start._replace(threshold=known)
        keys = jax.random.split(jax.random.key(0), 20_000)
        states, _ = jax.jit(jax.vmap(alg.step, (0, None)))(keys, start)
        gradient = jax.grad(lambda p: exact.quadrature(case, p, theta, t, 1e-2).elbo)(
            case.parameters()
        )
        for name in ("loc", "log_scale"):
            moves = np.asarray(getattr(states.parameters, name) - getattr(start.parameters, name))
            error = moves.std(0) / math.sqrt(len(keys))
            assert np.all(np.abs(moves.mean(0) - getattr(gradient, name)) < 4 * error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_acceptance": 0.0}, "target_acceptance must be"),
        ({"target_acceptance": 1.1}, "target_acceptance must be"),
        ({"target_acceptance": 0.05, "epsilon": 0.1}, "cannot be reached with epsilon"),
        ({"epsilon": 1.0}, "epsilon must be"),
        ({"epsilon": -0.1}, "epsilon must be"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"num_samples": 1, "baseline": "leave_one_out"}, 'baseline="running"'),
        ({"num_samples": "two"}, "num_samples must be"),
        ({"max_proposals": 1}, "max_proposals=1 is less than num_samples=2"),
        ({"estimator": "pathwise"}, "estimator must be one of 'reparameterized', 'score'"),
        ({"baseline": "none"}, "baseline must be one of"),
        ({"threshold_rule": "adam"}, "threshold_rule must be one of 'tracking', 'sgd'"),
        ({"threshold": math.nan}, "threshold must be None"),
        ({"proposal": "flow"}, "proposal must be one of 'diagonal', 'mvn'"),
        ({"init_scale": 0.0}, "init_scale must be"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        algorithm(**settings)


@pytest.mark.parametrize(
    ("log_density", "position", "message"),
    [
        (lambda z: -(z**2), jnp.zeros(2), r"logdensity_fn must return a scalar.*shape \(2,\)"),
        (lambda z: (quartic(z), 1.0), jnp.zeros(2), "logdensity_fn must return a scalar"),
        (lambda z: jnp.log(z[0]), jnp.asarray([-1.0]), "logdensity_fn is nan at the initial"),
        (lambda z: -jnp.inf * z[0] ** 0, jnp.zeros(1), "logdensity_fn is -inf at the initial"),
        (quartic, jnp.zeros(2, int), "position must be a pytree of floating-point arrays"),
        (quartic, {}, "position must be a pytree of floating-point arrays"),
    ],
)
def test_bad_densities_and_positions_are_refused_before_anything_is_compiled(
    log_density, position, message
):
    alg = algorithm(log_density)
    before = vi._calibration_weights._cache_size()
    with pytest.raises(ValueError, match=message):
        alg.init(position)
    assert vi._calibration_weights._cache_size() == before


def test_a_density_or_optimizer_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="logdensity_fn must be a function"):
        vi.as_top_level_api(None, optax.adam(1e-2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer must be an optax optimizer, got 0\.01"):
        vi.as_top_level_api(quartic, 1e-2)  # type: ignore[arg-type]


def test_counts_of_draws_and_steps_are_checked():
    alg, state, _ = trained(target_acceptance=0.3)
    with pytest.raises(ValueError, match="num_samples must be a whole number"):
        alg.sample(jax.random.key(0), state, 0)
    with pytest.raises(ValueError, match="num_proposals must be a whole number"):
        alg.evaluate(jax.random.key(0), state, 1e5)
    with pytest.raises(ValueError, match="num_steps must be a whole number"):
        vi.run(jax.random.key(0), alg, state, 0)


def test_sampling_under_jit_gives_no_warning():
    alg, state, _ = trained(target_acceptance=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws = jax.jit(lambda key: alg.sample(key, state, 7))(jax.random.key(0))
    assert draws.shape == (7, 2)
