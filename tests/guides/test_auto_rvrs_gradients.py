"""Gradients of stock ``Trace_ELBO()`` with AutoRVRS against autodiff of the quadrature ELBO.

Every model is one of :mod:`tests.exact` written as a NumPyro program, whose log density over
unconstrained values is stated a second time, by hand, for the quadrature. A wrong sign, a lost
Jacobian or a gradient that leaks through the emitted draw would each shift the mean over many keys.
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import gammaln
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

import rvrs
from rvrs.core import threshold
from rvrs.proposals import DiagonalNormal
from tests import exact

EPSILON = 1e-2
COUNT = 5.0


def quartic_model():
    theta = numpyro.param("theta", jnp.asarray(exact.THETA))
    z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), (1,)))
    numpyro.factor("density", exact.CASES["quartic"].log_joint(theta, z))


def rate_model():
    # A positive latent: the density over its logarithm has a Jacobian.
    theta = numpyro.param("theta", jnp.asarray(exact.THETA), constraint=constraints.positive)
    rate = numpyro.sample("rate", dist.Gamma(2.0, theta[0]))
    numpyro.sample("count", dist.Poisson(rate * jnp.exp(theta[1])), obs=COUNT)


def rate_log_joint(theta, z):
    prior = 2 * jnp.log(theta[0]) + z[0] - theta[0] * jnp.exp(z[0])
    mean = jnp.exp(z[0] + theta[1])
    likelihood = COUNT * jnp.log(mean) - mean - gammaln(COUNT + 1)
    return prior + likelihood + z[0]


def part_model():
    # The support of the second latent depends on the first one.
    theta = numpyro.param("theta", jnp.asarray(exact.THETA))
    whole = numpyro.sample("whole", dist.Exponential(1.0))
    part = numpyro.sample("part", dist.Uniform(0.0, whole))
    numpyro.sample("y", dist.Normal(part + theta[0], jnp.exp(theta[1])), obs=1.5)


def part_log_joint(theta, z):
    # The flat vector is in the order of the model's sites.
    whole, share = jnp.exp(z[0]), jax.nn.sigmoid(z[1])
    density = -whole - jnp.log(whole)
    standard = (1.5 - whole * share - theta[0]) * jnp.exp(-theta[1])
    likelihood = -0.5 * standard**2 - theta[1] - 0.5 * jnp.log(2 * jnp.pi)
    jacobians = z[0] + jnp.log(whole * share * (1 - share))
    return density + likelihood + jacobians


MODELS = {
    "real": (quartic_model, exact.CASES["quartic"]),
    "positive": (
        rate_model,
        exact.Case(rate_log_joint, np.array([1.0]), np.array([-0.3]), 9.0, 4001),
    ),
    "dynamic support": (
        part_model,
        exact.Case(part_log_joint, np.array([0.3, 0.5]), np.array([-0.2, 0.2]), 8.0, 501),
    ),
}


class Exact(NamedTuple):
    threshold: float
    elbo: float
    gradient: np.ndarray  # loc, log scale, theta


@functools.cache
def exact_elbo(name, sigmoid_mean=0.3):
    _, case = MODELS[name]
    with jax.enable_x64():
        t = exact.threshold_for(case, sigmoid_mean)
        elbo = lambda p, theta: exact.quadrature(case, p, theta, t, EPSILON).elbo  # noqa: E731
        value, (by_p, by_theta) = jax.jit(jax.value_and_grad(elbo, argnums=(0, 1)))(
            case.parameters(), jnp.asarray(exact.THETA)
        )
    return Exact(t, float(value), np.concatenate([by_p.loc, by_p.log_scale, by_theta]))


def parameters(case, prefix="auto") -> dict[str, Any]:
    return {
        f"{prefix}_loc": jnp.asarray(case.loc, jnp.float32),
        f"{prefix}_log_scale": jnp.asarray(case.log_scale, jnp.float32),
        "theta": jnp.asarray(exact.THETA, jnp.float32),
    }


def losses(guide, model, params, count, *, state=None, seed=0):
    """Losses ``(count,)`` and rows ``(count, ...)`` of gradients of the stock loss."""
    batch = 25_000

    def loss(params, state, key):
        return Trace_ELBO().loss(key, params | state, model, guide)

    @jax.jit
    def estimate(key):
        keys = jax.random.split(key, batch)
        states = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape)), state or {}
        )
        value, rows = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))(params, states, keys)
        return value, jnp.concatenate([rows[name].reshape(batch, -1) for name in params], axis=1)

    keys = jax.random.split(jax.random.key(seed), -(-count // batch))
    values, rows = zip(*[estimate(key) for key in keys], strict=True)
    return np.concatenate(values).astype(float), np.concatenate(rows).astype(float)


def z_scores(rows, wanted):
    error = rows.std(0, ddof=1) / np.sqrt(len(rows))
    return (rows.mean(0) - wanted) / error, error


@functools.cache
def sampled(name, **settings):
    model, case = MODELS[name]
    guide = rvrs.AutoRVRS(
        model, epsilon=EPSILON, target_acceptance=0.3, threshold=exact_elbo(name).threshold,
        **settings,
    )  # fmt: skip
    return losses(guide, model, parameters(case), 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_stock_loss_averages_to_minus_the_elbo(name):
    values, _ = sampled(name)
    z, error = z_scores(values, -exact_elbo(name).elbo)
    assert abs(z) < 4
    assert error < 0.02


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_the_stock_loss_averages_to_that_of_the_elbo(name):
    gradient = exact_elbo(name).gradient
    _, rows = sampled(name)
    z, _ = z_scores(rows, -gradient)
    assert np.all(np.abs(z) < 4), z
    # A gradient that is wrong by a factor of 1.05 would show.
    covariance = np.cov(rows.T) / len(rows)
    assert 0.05 * np.sqrt(gradient @ np.linalg.solve(covariance, gradient)) > 4


@pytest.mark.slow
def test_the_score_estimator_has_the_same_mean_and_more_variance():
    _, rows = sampled("positive", estimator="score")
    z, error = z_scores(rows, -exact_elbo("positive").gradient)
    assert np.all(np.abs(z) < 4), z
    _, pathwise = z_scores(sampled("positive")[1], 0.0)
    assert np.all(error[:2] > 1.1 * pathwise[:2])


@pytest.mark.slow
def test_the_truncated_model_gradient_is_biased_and_leaves_the_proposal_alone():
    _, rows = sampled("positive", model_gradient="truncated")
    z, _ = z_scores(rows, -exact_elbo("positive").gradient)
    assert np.all(np.abs(z[:2]) < 4), z
    assert np.all(np.abs(z[2:]) > 6), z


@pytest.mark.slow
def test_more_draws_a_step_keep_the_mean_and_lower_the_variance():
    _, rows = sampled("positive", num_samples=6)
    z, error = z_scores(rows, -exact_elbo("positive").gradient)
    assert np.all(np.abs(z) < 4), z
    assert np.all(error < 0.7 * z_scores(sampled("positive")[1], 0.0)[1])


def test_a_stock_autoguide_as_proposal_gives_the_gradient_of_our_own_diagonal_family():
    model, case = MODELS["positive"]
    guide = rvrs.AutoRVRS(
        model, proposal=AutoDiagonalNormal(model, prefix="stock"), epsilon=EPSILON,
        target_acceptance=0.3, threshold=exact_elbo("positive").threshold,
    )  # fmt: skip
    own = parameters(case)
    scale = jnp.exp(own["auto_log_scale"])
    params = {"stock_loc": own["auto_loc"], "stock_scale": scale, "theta": own["theta"]}
    values, rows = losses(guide, model, params, 50_000)
    rows[:, 1] *= scale  # by the scale to by its logarithm
    z, _ = z_scores(rows, -exact_elbo("positive").gradient)
    assert np.all(np.abs(z) < 4), z
    assert abs(z_scores(values, -exact_elbo("positive").elbo)[0]) < 4


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["running", "leave_one_out"])
def test_with_an_adapted_threshold_the_gradient_is_the_one_at_constant_acceptance(baseline):
    # The exact answer by central differences: T is solved again at every moved parameter.
    model, case = MODELS["positive"]
    t, step = exact_elbo("positive").threshold, 1e-4
    with jax.enable_x64():
        start = np.concatenate([case.loc, case.log_scale, exact.THETA])

        @jax.jit
        def at(flat, t):
            p = DiagonalNormal(flat[:1], flat[1:2])
            return exact.quadrature(case, p, flat[2:], t, EPSILON)

        wanted = float(at(start, t).normalizer)

        def constrained_elbo(flat):
            low, high = t - 5, t + 5
            for _ in range(45):
                middle = (low + high) / 2
                too_low = at(flat, middle).normalizer < wanted
                low, high = (middle, high) if too_low else (low, middle)
            return float(at(flat, low).elbo)

        moves = step * np.eye(start.size)
        gradient = np.array(
            [constrained_elbo(start + m) - constrained_elbo(start - m) for m in moves]
        ) / (2 * step)
        # What the running moments of a long training converge to.
        grid = exact.noise_grid(case)
        lw = exact.log_weights_at(case, grid.nodes)
        a_e = exact.acceptance(lw, t, EPSILON)
        slope = (1 - EPSILON) * jax.nn.sigmoid(lw + t) * jax.nn.sigmoid(-lw - t)
        ratio = lw - jnp.log(a_e) + t
        mass = jnp.exp(grid.log_mass)
        moments = [jnp.sum(mass * m) for m in (a_e, slope, a_e * ratio, slope * ratio)]
    state = threshold.init(jnp.full(1, t, jnp.float32))
    # T has not drifted for long, so that they count.
    known = jnp.asarray(moments, jnp.float32)[:, None]
    state = state._replace(moments=known, memory=jnp.full(1, 1000.0))
    counts = {"acceptance": 0.0, "num_proposals": 0, "num_capped": 0}
    guide = rvrs.AutoRVRS(model, epsilon=EPSILON, target_acceptance=wanted, baseline=baseline)
    full = {"auto_state": state._asdict() | jax.tree.map(jnp.asarray, counts)}
    _, rows = losses(guide, model, parameters(case), 50_000, state=full)
    z, error = z_scores(rows, -gradient)
    assert np.all(np.abs(z) < 4), z
    # And it is another gradient than the one at fixed T.
    assert np.max(np.abs(gradient - exact_elbo("positive").gradient) / error) > 5


@pytest.mark.slow
def test_forward_mode_gives_the_gradient_of_reverse_mode():
    model, _ = MODELS["positive"]
    guide = rvrs.AutoRVRS(model, target_acceptance=0.3)
    with jax.enable_x64():
        svi = SVI(model, guide, numpyro.optim.SGD(1.0), Trace_ELBO())
        state = svi.init(jax.random.key(0))
        moved = [
            svi.get_params(
                jax.jit(partial(svi.update, forward_mode_differentiation=mode))(state)[0]
            )
            for mode in (False, True)
        ]
    start = svi.get_params(state)
    for name in start:
        assert np.all(moved[0][name] != start[name])
        np.testing.assert_allclose(moved[1][name], moved[0][name], rtol=1e-10)
