"""Gamma draws from explicit noise against SciPy's distribution function and JAX's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import digamma
from scipy import special, stats

from rvrs.guides import _gamma

SHAPES = [0.05, 0.4, 1.0, 1.7, 30.0]


def draws(shape, count=200_000):
    noise = _gamma.sample_noise(jax.random.key(0), (count,))
    log_z, slope = jax.jvp(
        lambda a: _gamma.log_gamma(a, noise), (jnp.asarray(shape),), (jnp.ones(()),)
    )
    return np.asarray(log_z, float), np.asarray(slope, float)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_have_the_distribution_function_of_a_gamma_variable(shape):
    log_z, _ = draws(shape)
    log_z = log_z[~np.isnan(log_z)]
    if shape < 0.1:
        # Far below the smallest number: z^a is uniform, nearly.
        uniform = np.exp(shape * log_z - special.gammaln(shape + 1))
        low = log_z < -20
        assert low.mean() == pytest.approx(stats.gamma(shape).cdf(np.exp(-20)), abs=0.005)
        assert stats.kstest(uniform[low] / uniform[low].max(), "uniform").pvalue > 1e-4
    else:
        assert stats.kstest(np.exp(log_z), stats.gamma(shape).cdf).pvalue > 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draw_fails_at_most_six_times_in_a_million(shape):
    log_z, slope = draws(shape)
    assert np.isnan(log_z).sum() <= 6
    assert np.all(np.isfinite(slope))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_derivative_is_that_of_the_mean_logarithm(shape):
    # E[log z] = digamma(a), so the mean derivative is trigamma(a).
    log_z, slope = draws(shape)
    error = slope.std() / np.sqrt(len(slope))
    assert abs(slope.mean() - special.polygamma(1, shape)) < 4 * error
    error = np.nanstd(log_z) / np.sqrt(len(log_z))
    assert abs(np.nanmean(log_z) - float(digamma(shape))) < 4 * error


def test_the_derivative_of_one_draw_is_that_of_its_quantile():
    log_z, slope = draws(1.7, 100)
    z, step = np.exp(log_z), 1e-5
    above, below = (stats.gamma(1.7 + d).cdf(z) for d in (step, -step))
    wanted = -(above - below) / (2 * step) / stats.gamma(1.7).pdf(z) / z
    np.testing.assert_allclose(slope, wanted, rtol=5e-3)


def test_a_failed_draw_is_nan_and_has_no_gradient():
    noise = jnp.full(_gamma.NOISE, -40.0)  # 1 + x / sqrt(9 d) is negative in all attempts
    value, slope = jax.jvp(lambda a: _gamma.log_gamma(a, noise), (jnp.ones(()),), (jnp.ones(()),))
    assert np.isnan(value)
    assert slope == 0


def test_shapes_broadcast_against_the_noise():
    noise = _gamma.sample_noise(jax.random.key(0), (3, 2))
    together = _gamma.log_gamma(jnp.array([1.5, 2.5]), noise)
    assert together.shape == (3, 2)
    np.testing.assert_array_equal(together[:, 1], _gamma.log_gamma(jnp.array(2.5), noise[:, 1]))
