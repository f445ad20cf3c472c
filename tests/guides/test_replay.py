"""Draws from stored noise: the value, its density and its derivative are the distribution's."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import transforms
from scipy import stats

from rvrs.guides import _replay

NUM_DRAWS = 5000
# Distributions are stacked, as those of a batch of data points are; parameters times these.
ROWS = np.array([1.0, 1.3])


class Case(NamedTuple):
    build: Callable[..., Any]
    """The distribution with these parameters."""
    start: dict[str, Any]
    moments: Callable[..., tuple[Any, Any]]
    """``E[z]`` and ``E[z^2]`` with these parameters, for each coordinate."""
    noise: str = "key"
    """Of what kind it is: ``"normal"``, ``"gamma"`` or ``"key"``."""

    @property
    def explicit(self) -> bool:
        return self.noise == "normal"


def of_normal(loc, scale):
    return loc, loc**2 + scale**2


def of_lognormal(loc, scale):
    return jnp.exp(loc + scale**2 / 2), jnp.exp(2 * loc + 2 * scale**2)


def of_gamma(shape, rate):
    return shape / rate, shape * (shape + 1) / rate**2


def of_beta(a, b):
    total = a + b
    return a / total, a * (a + 1) / (total * (total + 1))


def of_dirichlet(a):
    return of_beta(a, a.sum() - a)


def of_multivariate_normal(loc, root):
    return loc, loc**2 + jnp.sum(jnp.tril(root) ** 2, axis=-1)


def by_quadrature(transform):
    """Moments of transformed independent normals in two dimensions."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    grid = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(weights, weights).ravel() / weights.sum() ** 2

    def moments(loc, scale):
        z = transform(loc + scale * jnp.asarray(grid))
        return jnp.asarray(weights) @ z, jnp.asarray(weights) @ z**2

    return moments


STICK_BREAKING = transforms.StickBreakingTransform()
SQUASHED = [transforms.AffineTransform(0.3, 0.8), transforms.SigmoidTransform()]
LOC = np.array([0.4, -0.2])
SCALE = np.array([0.5, 0.3])

CASES = {
    "Normal": Case(dist.Normal, {"loc": 0.4, "scale": 0.6}, of_normal, "normal"),
    "Normal.to_event": Case(
        lambda loc, scale: dist.Normal(loc, scale).to_event(1),
        {"loc": LOC, "scale": SCALE},
        of_normal,
        "normal",
    ),
    "Normal.expand": Case(
        lambda loc, scale: dist.Normal(loc, scale).expand([2, 3]),
        {"loc": LOC[:, None], "scale": np.array(0.6)},
        lambda loc, scale: of_normal(jnp.broadcast_to(loc, (2, 3)), scale),
        "normal",
    ),
    "Normal.to_event.expand": Case(
        lambda loc, scale: dist.Normal(loc, scale).to_event(1).expand([3]),
        {"loc": LOC, "scale": SCALE},
        lambda loc, scale: of_normal(jnp.broadcast_to(loc, (3, 2)), scale),
        "normal",
    ),
    "LogNormal": Case(dist.LogNormal, {"loc": 0.1, "scale": 0.4}, of_lognormal, "normal"),
    "LogNormal.expand.to_event": Case(
        lambda loc, scale: dist.LogNormal(loc, scale).expand([3, 2]).to_event(1),
        {"loc": LOC, "scale": np.array(0.4)},
        lambda loc, scale: of_lognormal(jnp.broadcast_to(loc, (3, 2)), scale),
        "normal",
    ),
    "several transforms": Case(
        lambda loc, scale: dist.TransformedDistribution(
            dist.Normal(loc, scale),
            [
                transforms.AffineTransform(0.2, -0.5),
                transforms.ExpTransform(),
                transforms.AffineTransform(1.0, jnp.array([2.0, 3.0])),
            ],
        ),
        {"loc": 0.3, "scale": 0.7},
        lambda loc, scale: of_affine(
            *of_lognormal(0.2 - 0.5 * loc, 0.5 * scale), 1.0, jnp.array([2.0, 3.0])
        ),
        "normal",
    ),
    "transforms of an event": Case(
        lambda loc, scale: dist.TransformedDistribution(
            dist.Normal(loc, scale).to_event(1), SQUASHED
        ),
        {"loc": LOC, "scale": SCALE},
        by_quadrature(transforms.ComposeTransform(SQUASHED)),
        "normal",
    ),
    "simplex of normals": Case(
        lambda loc, scale: dist.TransformedDistribution(
            dist.Normal(loc, scale).to_event(1), STICK_BREAKING
        ),
        {"loc": LOC, "scale": SCALE},
        by_quadrature(STICK_BREAKING),
    ),
    "Gamma": Case(dist.Gamma, {"concentration": 1.7, "rate": 2.2}, of_gamma, "gamma"),
    "Gamma.to_event": Case(
        lambda shape, rate: dist.Gamma(shape, rate).to_event(1),
        {"shape": np.array([0.6, 4.0]), "rate": np.array([1.0, 2.0])},
        of_gamma,
        "gamma",
    ),
    "Beta": Case(dist.Beta, {"concentration1": 1.6, "concentration0": 2.4}, of_beta, "gamma"),
    "Dirichlet": Case(
        dist.Dirichlet, {"concentration": np.array([1.5, 0.8, 3.0])}, of_dirichlet, "gamma"
    ),
    "MultivariateNormal": Case(
        lambda loc, root: dist.MultivariateNormal(loc, scale_tril=jnp.tril(root)),
        {"loc": LOC, "root": np.array([[0.8, 0.0], [-0.5, 0.4]])},
        of_multivariate_normal,
    ),
}


def of_affine(mean, square, loc, scale):
    return loc + scale * mean, loc**2 + 2 * loc * scale * mean + scale**2 * square


# Those that differ from others in how they are put together only.
LONG = (
    *("Normal.to_event.expand", "LogNormal.expand.to_event", "transforms of an event"),
    *("Gamma.to_event", "Dirichlet"),
)


def cases(*long):
    names = [pytest.param(n, marks=pytest.mark.slow if n in long else ()) for n in CASES]
    return pytest.mark.parametrize("name", names)


every_case = cases(*LONG)


def parameters(name):
    """Those of the stacked distributions, by position."""
    start = CASES[name].start.values()
    return tuple(jnp.asarray(np.multiply.outer(ROWS, value), float) for value in start)


def of_row(name, row):
    return tuple(leaf[row] for leaf in parameters(name))


def shape_of(name):
    return CASES[name].build(*of_row(name, 0)).shape()


def moments(name, parameters):
    return jax.vmap(CASES[name].moments)(*parameters)


@functools.cache
def weights(name):
    return np.random.default_rng(1).uniform(0.5, 1.5, (2, *shape_of(name))).astype(np.float32)


def weighted_sum(name, mean, square):
    """A sum over coordinates in which each has a weight of its own."""
    return jnp.sum(weights(name)[0] * mean + weights(name)[1] * square)


class Found(NamedTuple):
    """What is found out about a case; leaves ``(draws, rows, ...)``."""

    noise: Any
    values: Any
    log_density: Any
    """Of the replayed draws."""
    log_density_there: Any
    """At their values."""
    log_prob: Any
    """NumPyro's, at their values."""
    gradients: Any
    """Of the weighted sum of the value and its square, by parameter."""


KEY = jax.random.wrap_key_data(jnp.array([5, 7], jnp.uint32))


@functools.cache
def found(name):
    """Many draws, of which the first one has the noise of ``KEY``."""
    build = CASES[name].build

    def total(given, noise):
        stacked = jax.vmap(lambda given: {"z": build(*given)})(given)
        values, log_density = jax.vmap(_replay.propose)(stacked, noise)
        return weighted_sum(name, values["z"], values["z"] ** 2), (values, log_density)

    def log_prob(fn, values):
        return jnp.sum(fn["z"].log_prob(values["z"]))

    @jax.jit
    def look(given, key):
        stacked = jax.vmap(lambda given: {"z": build(*given)})(given)
        noise = _replay.sample_noise(key, (NUM_DRAWS, len(ROWS)), stacked)
        if CASES[name].noise != "gamma":
            noise["z"] = noise["z"].at[0].set(noise_of_key(name, KEY))
        gradients, (values, log_density) = jax.vmap(jax.grad(total, has_aux=True), (None, 0))(
            given, noise
        )
        return Found(
            noise["z"],
            values["z"],
            log_density,
            jax.vmap(jax.vmap(_replay.log_density), (None, 0))(stacked, values),
            jax.vmap(jax.vmap(log_prob), (None, 0))(stacked, values),
            gradients,
        )

    return jax.tree.map(np.asarray, look(parameters(name), jax.random.key(0)))


def noise_of_key(name, key):
    """What NumPyro's samplers make of a key."""
    if not CASES[name].explicit:
        return jax.random.key_data(key)
    if name == "Normal.expand":
        # NumPyro draws the axis of length 1 that was expanded first.
        return dist.Normal(jnp.zeros((2, 1)), 1.0).expand([2, 3]).sample(key)
    return jax.random.normal(key, shape_of(name))


def z_scores(rows, wanted):
    rows = rows.astype(float)
    spread = rows.std(0, ddof=1) / np.sqrt(len(rows))
    # What is the same in all draws (a zero, say) has to be exact.
    return (rows.mean(0) - wanted) / np.where(spread > 0, spread, 1e-6)


@every_case
def test_the_same_noise_gives_the_same_draw_alone_and_in_a_stack(name):
    got, row = found(name), 1
    assert got.values.shape == (NUM_DRAWS, len(ROWS), *shape_of(name))
    assert got.log_density.shape == (NUM_DRAWS, len(ROWS))
    alone = jax.jit(lambda *given: _replay.propose({"z": CASES[name].build(*given)}, noise))
    noise = {"z": jnp.asarray(got.noise[5, row])}
    values, log_density = alone(*of_row(name, row))
    np.testing.assert_allclose(got.values[5, row], values["z"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.log_density[5, row], log_density, rtol=1e-5, atol=1e-5)


@every_case
def test_the_log_density_is_that_of_the_distribution_at_the_value(name):
    got = found(name)
    # By the inverse transforms, which round where a draw is far out.
    np.testing.assert_allclose(got.log_density, got.log_prob, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got.log_density_there, got.log_prob, rtol=1e-5, atol=1e-5)


@every_case
def test_replayed_draws_have_the_moments_of_the_distribution(name):
    values = found(name).values.astype(float)
    mean, square = moments(name, parameters(name))
    assert np.all(np.abs(z_scores(values, mean)) < 4)
    assert np.all(np.abs(z_scores(values**2, square)) < 4)


@every_case
def test_coordinates_and_rows_have_noise_of_their_own(name):
    noise = found(name).noise
    if CASES[name].noise == "key":
        # Of keys, any bit.
        noise = (noise[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    flat = noise.reshape(NUM_DRAWS, -1)
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    # The largest of up to 8000 numbers.
    assert np.all(np.abs(correlation) < 5 / np.sqrt(NUM_DRAWS))
    # One draw and the next.
    correlation = np.corrcoef(flat[1:].T, flat[:-1].T)
    assert np.all(np.abs(correlation - np.eye(len(correlation))) < 5 / np.sqrt(NUM_DRAWS))


@every_case
def test_derivatives_of_replayed_draws_are_those_of_the_moments(name):
    wanted = jax.jit(jax.grad(lambda given: weighted_sum(name, *moments(name, given))))
    exact = wanted(parameters(name))
    for rows, gradient in zip(found(name).gradients, exact, strict=True):
        assert np.all(np.abs(z_scores(rows, gradient)) < 4)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].noise != "gamma" and n not in LONG])
def test_value_and_derivative_are_those_of_numpyros_sampler_with_the_same_noise(name):
    def sampled(given):
        z = CASES[name].build(*given).sample(KEY)
        return weighted_sum(name, z, z**2), z

    wanted = jax.jit(jax.grad(sampled, has_aux=True))(of_row(name, 0))
    got = found(name)
    first = tuple(leaf[0, 0] for leaf in got.gradients), got.values[0, 0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), first, wanted)


def test_the_derivative_of_a_gamma_draw_is_the_implicit_one():
    got = found("Gamma")
    shape, rate = (np.asarray(leaf, float) for leaf in parameters("Gamma"))
    z, step = got.values.astype(float), 1e-5
    # z is a fixed quantile: dz / da = -(dF / da) / f, by central differences.
    above, below = (stats.gamma(shape + d, scale=1 / rate).cdf(z) for d in (step, -step))
    slope = -(above - below) / (2 * step) / stats.gamma(shape, scale=1 / rate).pdf(z)
    outer = weights("Gamma")[0] + 2 * weights("Gamma")[1] * z
    np.testing.assert_allclose(got.gradients[0], outer * slope, rtol=5e-3)
    np.testing.assert_allclose(got.gradients[1], outer * -z / rate, rtol=1e-4)


@every_case
def test_noise_is_normal_wherever_a_normal_distribution_is_at_the_bottom(name):
    noise = found(name).noise
    if CASES[name].explicit:
        assert noise.shape == (NUM_DRAWS, len(ROWS), *shape_of(name))
        assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-4
    elif CASES[name].noise == "gamma":
        assert noise.dtype == np.float32
    else:
        assert noise.shape == (NUM_DRAWS, len(ROWS), 2)
        assert noise.dtype == np.uint32


def test_sites_have_noise_of_their_own_and_densities_that_add_up():
    sites = {"one": dist.Normal(0.4, 0.6), "other": dist.Normal(0.4, 0.6)}
    sites |= {"third": dist.Uniform(0.0, 2.0), "last": dist.Uniform(0.0, 3.0)}
    noise = _replay.sample_noise(jax.random.key(0), (1000,), sites)
    correlation = np.corrcoef(noise["one"], noise["other"])[0, 1]
    assert abs(correlation) < 4 / np.sqrt(1000)
    assert not np.any(np.all(noise["third"] == noise["last"], axis=1))
    first = {name: rows[0] for name, rows in noise.items()}
    values, log_density = jax.jit(lambda first: _replay.propose(sites, first))(first)
    assert set(values) == set(sites)
    wanted = sum(float(fn.log_prob(values[name])) for name, fn in sites.items())
    np.testing.assert_allclose(log_density, wanted, rtol=1e-5)
    np.testing.assert_allclose(_replay.log_density(sites, values), wanted, rtol=1e-5)
