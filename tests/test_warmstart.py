"""Starts on targets whose mode and curvature are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.warmstart import find_start

D = 6


def caller(log_density):
    programs = {}

    def call(function, static, dynamic):
        key = (function, static)
        if key not in programs:
            programs[key] = jax.jit(lambda dynamic: function(*static, *dynamic, log_density))
        return programs[key](dynamic)

    return call


def normal(seed=0):
    """A correlated normal: standard deviations from 1e-3 to 1e3, 100 of them away from zero."""
    rng = np.random.default_rng(seed)
    sds = 10.0 ** np.linspace(-3, 3, D)
    root = rng.standard_normal((D, 2 * D))
    covariance = root @ root.T / (2 * D)
    covariance = covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    mean = 100 * sds * rng.choice([-1, 1], D)
    precision = jnp.asarray(np.linalg.inv(covariance), jnp.float32)

    def log_density(z):
        standard = (z - mean.astype(np.float32)) / sds.astype(np.float32)
        return -0.5 * standard @ precision @ standard

    return log_density, mean, sds, covariance


def test_a_badly_scaled_normal_far_away_is_found_with_its_covariance():
    log_density, mean, sds, covariance = normal()
    start = find_start(jax.random.key(0), caller(log_density), D, "triangular")
    assert np.max(np.abs((start.location - mean) / sds)) < 0.1
    factor = np.asarray(start.scale, float) / sds[:, None]
    np.testing.assert_allclose(factor @ factor.T, covariance, atol=0.02)
    assert np.all(np.triu(start.scale, 1) == 0)
    assert np.all(np.diag(start.scale) > 0)


def test_a_diagonal_start_has_the_scales_that_are_best_for_it():
    log_density, mean, sds, covariance = normal()
    start = find_start(jax.random.key(0), caller(log_density), D, "diagonal")
    assert np.max(np.abs((start.location - mean) / sds)) < 0.1
    # The mean-field optimum of a normal has the conditional standard deviations.
    best = sds / np.sqrt(np.diag(np.linalg.inv(covariance)))
    np.testing.assert_allclose(start.scale, best, rtol=0.01)


def test_the_elbo_is_that_of_the_normal_distribution():
    log_density, _, sds, covariance = normal()
    start = find_start(jax.random.key(0), caller(log_density), D, "triangular")
    # The target is normal itself, so its ELBO is the log of its integral, exactly.
    log_evidence = 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1] + np.log(sds).sum()
    assert abs(float(start.elbo) - log_evidence) < 0.05


def test_a_density_without_a_mode_gets_a_usable_start():
    # A funnel: its density grows without bound where the scale exp(z[0]) goes to zero.
    def log_density(z):
        return -0.5 * (z[0] / 1.5) ** 2 - 0.5 * jnp.sum((z[1:] * jnp.exp(-z[0])) ** 2) - 5 * z[0]

    start = find_start(jax.random.key(0), caller(log_density), D, "triangular")
    assert np.isfinite(start.elbo)
    assert np.all(np.isfinite(start.location))
    # It stays where the mass is, within a few standard deviations of z[0].
    assert abs(float(start.location[0])) < 4.5


def test_a_density_that_overflows_at_ordinary_points_is_searched_closer_to_zero():
    def log_density(z):
        return jnp.where(jnp.all(jnp.abs(z) < 0.6), -0.5 * jnp.sum((z / 0.1) ** 2), -jnp.inf)

    start = find_start(jax.random.key(0), caller(log_density), D, "diagonal")
    np.testing.assert_allclose(start.location, 0, atol=0.02)
    np.testing.assert_allclose(start.scale, 0.1, rtol=1e-3)


def test_a_given_point_is_where_the_search_begins():
    # Two modes: the nearer one is found.
    def log_density(z):
        apart = jnp.stack([-0.5 * jnp.sum((z - 8.0) ** 2), -0.5 * jnp.sum((z + 8.0) ** 2)])
        return jax.nn.logsumexp(apart)

    for mode in (8.0, -8.0):
        given = jnp.full(2, mode / 2)
        start = find_start(jax.random.key(0), caller(log_density), 2, "diagonal", given=given)
        np.testing.assert_allclose(start.location, mode, atol=0.05)


@pytest.mark.parametrize("shape", ["diagonal", "triangular"])
def test_a_density_that_is_nowhere_finite_has_no_elbo(shape):
    start = find_start(jax.random.key(0), caller(lambda z: jnp.sum(z) * jnp.nan), D, shape)
    assert float(start.elbo) == -np.inf


def test_curvature_in_many_dimensions_is_estimated():
    sds = np.geomspace(0.01, 100.0, 400).astype(np.float32)
    start = find_start(
        jax.random.key(0), caller(lambda z: -0.5 * jnp.sum((z / sds) ** 2)), 400, "diagonal"
    )
    np.testing.assert_allclose(start.scale, sds, rtol=1e-3)
