"""What holds in the core whatever its numbers: over all log weights, T, Z, epsilon, S and B."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import expit, logsumexp

from rvrs.core import acceptance, evidence, rejection, threshold
from tests.properties import strategies
from tests.properties.conftest import EFFORT, checked, precision
from tests.properties.strategies import DTYPES, EPSILONS, acceptance_and_epsilon, cast


def plain(tree):
    """As NumPy arrays, which keep their type outside of x64 mode."""
    return jax.tree.map(np.asarray, tree)


def rounding(dtype, *values):
    """The rounding error of numbers as large as the largest of these."""
    sizes = [float(np.max(np.abs(np.where(np.isfinite(v), v, 0.0)))) for v in values]
    return float(np.spacing(np.asarray(max([1.0, *sizes]), dtype)))


@EFFORT
def test_acceptance_probabilities_are_between_epsilon_and_1_and_0_outside_the_support(effort):
    @checked(
        effort, lw=strategies.weights(), t=strategies.thresholds(), epsilon=EPSILONS, dtype=DTYPES
    )
    def _(lw, t, epsilon, dtype):
        with precision(dtype):
            lw, t = cast(lw, dtype), cast(t, dtype)
            found = plain(acceptance.evaluate(lw, t, epsilon))
            log_again = plain(acceptance.log_acceptance(lw, t, epsilon))
        finite = np.isfinite(lw)
        for name, value in found._asdict().items():
            assert value.dtype == dtype, name
            assert value.shape == lw.shape, name
            assert not np.any(np.isnan(value)), name
        probability = found.probability
        least, ulp = np.asarray(epsilon, dtype), rounding(dtype)
        assert np.all(probability[~finite] == 0)
        assert np.all((probability[finite] >= least) & (probability[finite] <= 1))
        assert np.all(found.log_probability <= 0)
        assert np.all(found.log_probability[~finite] == -np.inf)
        np.testing.assert_allclose(log_again, found.log_probability, rtol=20 * ulp, atol=20 * ulp)
        kappa, c = found.kappa[finite], found.c[finite]
        np.testing.assert_allclose(kappa + c, 1, atol=10 * ulp)
        assert np.all((c >= 0) & (kappa >= 0))
        for value in (found.kappa, found.c, found.sigmoid, found.log_ratio):
            assert np.all(value[~finite] == 0)


@EFFORT
def test_acceptance_agrees_with_its_definition(effort):
    @checked(
        effort, lw=strategies.weights(), t=strategies.thresholds(), epsilon=EPSILONS, dtype=DTYPES
    )
    def _(lw, t, epsilon, dtype):
        with precision(dtype):
            lw, t = cast(lw, dtype), cast(t, dtype)
            found = plain(acceptance.evaluate(lw, t, epsilon))
            # What is left for float64 is the sum of lw and T, which the type has rounded.
            x = np.asarray(jnp.where(jnp.isfinite(lw), lw, 0.0) + t, np.float64)
        wanted = np.where(np.isfinite(lw), epsilon + (1 - epsilon) * expit(x), 0.0)
        tiny = float(np.finfo(dtype).tiny)
        np.testing.assert_allclose(found.probability, wanted, rtol=10 * rounding(dtype), atol=tiny)


@EFFORT
def test_acceptance_grows_with_the_threshold_and_with_the_weight(effort):
    @checked(
        effort,
        lw=strategies.weights(),
        t=strategies.thresholds(2 * strategies.NUM_TARGETS),
        epsilon=EPSILONS,
        dtype=DTYPES,
    )
    def _(lw, t, epsilon, dtype):
        with precision(dtype):
            low, high = (cast(part, dtype) for part in np.sort(t.reshape(2, -1), axis=0))
            lw = cast(np.sort(lw, axis=0), dtype)
            lower = np.asarray(acceptance.evaluate(lw, low, epsilon).probability)
            higher = np.asarray(acceptance.evaluate(lw, high, epsilon).probability)
        slack = 1 - 4 * rounding(dtype)
        assert np.all(higher >= slack * lower)
        finite = np.isfinite(lw)
        both = finite[1:] & finite[:-1]
        assert np.all((lower[1:] >= slack * lower[:-1])[both])


@EFFORT
def test_a_constant_of_the_log_density_moves_the_threshold_by_as_much(effort):
    @checked(
        effort,
        lw=strategies.weights(finite=True),
        shift=st.floats(-1e4, 1e4),
        pair=acceptance_and_epsilon(),
    )
    def _(lw, shift, pair):
        z, epsilon = pair
        with precision("float64"):
            here = threshold.calibrate(jnp.asarray(lw), z, epsilon)
            there = threshold.calibrate(jnp.asarray(lw + shift), z, epsilon) + shift
            means = [
                np.mean(acceptance.evaluate(jnp.asarray(lw), t, epsilon).probability, axis=0)
                for t in (here, there)
            ]
            t = jnp.zeros(strategies.NUM_TARGETS)
            before, after = plain(
                [
                    evidence.from_log_weights(jnp.asarray(lw + by), t - by, epsilon=epsilon)
                    for by in (0.0, shift)
                ]
            )
        ulp = rounding("float64", lw, [shift])
        # Where Z hardly depends on T, T is not determined: compare what it is for.
        np.testing.assert_allclose(*means, rtol=1e-6, atol=10 * ulp)
        for name in ("elbo", "log_evidence"):
            moved = getattr(before, name) + shift
            np.testing.assert_allclose(getattr(after, name), moved, rtol=1e-6, atol=100 * ulp)
        np.testing.assert_allclose(
            after.log_normalizer, before.log_normalizer, rtol=1e-6, atol=100 * ulp
        )


@EFFORT
def test_the_solved_threshold_has_the_wanted_acceptance_wherever_there_is_one(effort):
    @checked(effort, lw=strategies.weights(), pair=acceptance_and_epsilon(), dtype=DTYPES)
    def _(lw, pair, dtype):
        z, epsilon = pair
        with precision(dtype):
            lw = cast(lw, dtype)
            t = threshold.calibrate(lw, z, epsilon)
            found = plain(acceptance.evaluate(lw, t, epsilon).probability)
            lw, t = plain((lw, t))
        assert t.dtype == dtype
        assert not np.any(np.isnan(t))
        share = np.mean(np.isfinite(lw), axis=0)
        # All that T can do is to accept between epsilon and all of the proposals with a density.
        wanted = np.clip(z, epsilon * share, share)
        got = np.mean(np.asarray(found, np.float64), axis=0)
        tolerance = 4 * rounding(dtype, lw, t if z < 1 else [0.0]) * z + 20 * rounding(dtype)
        assert np.all(np.abs(got - wanted) <= tolerance + 3e-9 * z), (got, wanted)


@EFFORT
def test_estimates_agree_with_the_definition_in_float64(effort):
    @checked(
        effort,
        lw=strategies.weights(),
        t=strategies.thresholds(),
        epsilon=st.sampled_from([0.0, 1e-4, 0.3]),
        dtype=DTYPES,
    )
    def _(lw, t, epsilon, dtype):
        with precision(dtype):
            lw, t = cast(lw, dtype), cast(t, dtype)
            found = plain(evidence.from_log_weights(lw, t, epsilon=epsilon))
            a = plain(acceptance.evaluate(lw, t, epsilon))
            lw, t = plain((lw, t))
        log_a, finite = np.asarray(a.log_probability, np.float64), np.isfinite(lw)
        rows = strategies.NUM_WEIGHTS
        log_z = logsumexp(log_a, axis=0) - math.log(rows)
        ulp = rounding(dtype, lw, np.where(np.abs(t) < 1e29, t, 0.0))
        np.testing.assert_allclose(found.log_normalizer, log_z, rtol=20 * ulp, atol=20 * ulp)
        importance = np.where(finite, np.asarray(lw, np.float64), -np.inf)
        log_p = logsumexp(importance, axis=0) - math.log(rows)
        np.testing.assert_allclose(found.log_evidence, log_p, rtol=1e-5, atol=20 * ulp)
        for name, value in found._asdict().items():
            assert value.dtype == dtype, name
            if "error" in name:
                assert np.all(value >= 0), name
        # Jensen: the ELBO is no more than the evidence of the same proposals.
        some = np.isfinite(found.elbo)
        slack = 1e-4 * (1 + np.abs(log_p)) + 100 * ulp
        assert np.all((found.elbo <= log_p + slack)[some])


@EFFORT
def test_a_block_holds_as_many_proposals_as_the_draws_need_and_no_more(effort):
    @checked(effort, num_samples=st.integers(1, 10_000), z=strategies.ACCEPTANCES)
    def _(num_samples, z):
        size = rejection.block_size(num_samples, z)
        assert isinstance(size, int)
        assert size >= num_samples
        assert abs(size * z - num_samples) <= z + 1e-6 * num_samples


@EFFORT
def test_the_threshold_follows_the_acceptance_and_stays_a_number(effort):
    counts = st.integers(1, 10_000)

    @checked(
        effort,
        pair=acceptance_and_epsilon(),
        share=st.floats(0, 1),
        count=counts,
        size=counts,
        memory=st.floats(0, 1000),
        t=st.floats(-1e6, 1e6),
        rule=st.sampled_from(["tracking", "sgd"]),
        dtype=DTYPES,
    )
    def _(pair, share, count, size, memory, t, rule, dtype):
        z, _ = pair
        with precision(dtype):
            one = jnp.ones(1, dtype)
            state = threshold.init(jnp.asarray([t], dtype), memory)
            accepted = share * count * one
            # Of proposals that all have the same acceptance.
            slope = (1 - share) * accepted
            tally = rejection.Tally(
                jnp.asarray([count], jnp.int32), accepted, slope, share * slope, one, one
            )
            moved = threshold.adapt(state, tally, z, block_size=size, rule=rule)
            observed = threshold.observe(moved, tally)
            others = (threshold.multiplier(observed), threshold.mean_log_ratio(observed))
            state, moved, observed, others = plain((state, moved, observed, others))
        if rule == "sgd" and count == 1:
            # The rule needs two proposals; training goes on with T as it was.
            return
        for leaf in (*observed, *others):
            assert leaf.dtype == dtype
            assert np.all(np.isfinite(leaf))
        assert np.all(others[0] <= 0)
        step, tolerance = float(moved.value[0] - state.value[0]), 1e-5 * max(1, abs(t))
        if share > z * (1 + 1e-4):
            assert step <= tolerance
        if share < z * (1 - 1e-4):
            assert step >= -tolerance
