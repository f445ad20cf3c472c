"""AutoSemiRVRS on data points each of which is a target that breaks samplers."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

import rvrs
from tests.wild import targets as wild

EPSILON = 1e-4
# Those that leave the others of their batch alone: of a batch all branches are run, and a NaN in
# the gradient of one, or 1e6 nats, are in the sum.
MIXED = tuple(
    target
    for target in wild.ONE_DIMENSIONAL
    if target not in (wild.OFFSET, wild.OVERFLOW, wild.NO_GRADIENT)
)


def local_model_of(targets):
    def local_model(kinds):
        def log_density(kind, z):
            return wild.one_of(targets, kind, z[None])

        with numpyro.plate("points", len(kinds)):
            z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
            numpyro.factor("target", jax.vmap(log_density)(kinds, z))

    return local_model


def guide_of(*targets, **settings):
    model = local_model_of(targets)
    return rvrs.AutoSemiRVRS(model, model, epsilon=EPSILON, **settings)


def fitted_quietly(guide, kinds, num_steps, **options):
    """A fit that warns of nothing but what it holds in its own list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = rvrs.fit(
            jax.random.key(0), guide.model, kinds, guide=guide, num_steps=num_steps,
            progress=False, **options,
        )  # fmt: skip
    assert tuple(str(warning.message) for warning in caught) == fit.warnings
    return fit


def assert_whole(fit) -> None:
    settings = fit.guide.settings
    assert np.max(fit.proposals_per_draw) * settings.num_samples <= settings.max_proposals
    for leaf in jax.tree.leaves((fit.params, fit.thresholds)):
        assert np.all(np.isfinite(leaf))


def exact(targets, kinds, params, found):
    """ELBO and log Z of every point by quadrature."""
    loc, scale = np.asarray(params["auto_z_loc"]), np.asarray(params["auto_z_scale"])
    points = zip(kinds, loc, scale, np.asarray(found.threshold), strict=True)
    return [
        wild.quadrature(targets[kind], float(at), float(wide), float(t), EPSILON)
        for kind, at, wide, t in points
    ]


KINDS = np.arange(len(MIXED), dtype=np.int32)


@functools.cache
def fitted(sampler):
    return fitted_quietly(guide_of(*MIXED, sampler=sampler), KINDS, 200)


BOTH_SAMPLERS = pytest.mark.parametrize(
    "sampler", ["exact", pytest.param("budget", marks=pytest.mark.slow)]
)


@BOTH_SAMPLERS
def test_a_batch_of_wild_points_keeps_to_its_bound_and_stays_finite(sampler):
    fit = fitted(sampler)
    assert_whole(fit)
    assert np.all(np.isfinite(fit.losses))


@BOTH_SAMPLERS
def test_the_elbo_of_the_batch_and_z_of_every_point_are_those_of_quadrature(sampler):
    fit = fitted(sampler)
    found = fit.guide.evaluate(jax.random.key(1), fit.params, KINDS, num_local=5000)
    wanted = exact(MIXED, KINDS, fit.params, found)
    right = sum(point.elbo for point in wanted)
    assert abs(float(found.elbo) - right) < 4 * float(found.elbo_error) + wild.rounding(right)
    for log_z, point in zip(found.log_normalizer, wanted, strict=True):
        # 5000 proposals at an acceptance of about 0.1: a tenth at four standard errors, or two
        # where it is accepted or not.
        assert abs(float(log_z) - point.log_normalizer) < 0.2
    most = sum(target.log_evidence for target in MIXED)
    assert float(found.marginal_elbo) < most + 4 * float(found.marginal_elbo_error)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "budget"])
def test_draws_of_every_point_lie_where_its_target_has_a_density(sampler):
    fit = fitted(sampler)
    draws = np.asarray(fit.sample(jax.random.key(2), 200)["z"])
    assert np.all(np.isfinite(draws))
    for kind, column in zip(KINDS, draws.T, strict=True):
        assert np.all(np.isfinite(jax.vmap(MIXED[kind].log_density)(jnp.asarray(column)[:, None])))


@pytest.mark.slow
def test_log_densities_of_a_million_are_told_apart_to_their_last_digit():
    kinds = np.zeros(3, np.int32)
    fit = fitted_quietly(guide_of(wild.OFFSET), kinds, 200)
    assert_whole(fit)
    right = 3 * wild.OFFSET.log_evidence
    assert abs(fit.marginal_elbo - right) < 4 * fit.marginal_elbo_error + wild.rounding(right)
    assert fit.elbo < right + 4 * fit.elbo_error + wild.rounding(right)
    assert fit.elbo > right - 0.1 - 4 * fit.elbo_error - wild.rounding(right)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "budget"])
def test_steps_without_gradient_are_skipped_and_the_fit_says_how_many(sampler):
    fit = fitted_quietly(guide_of(wild.NO_GRADIENT, sampler=sampler), np.zeros(2, np.int32), 200)
    assert_whole(fit)
    assert any("no finite loss or gradient and were skipped" in text for text in fit.warnings)


@pytest.mark.slow
def test_a_density_that_overflows_harms_nothing():
    fit = fitted_quietly(guide_of(wild.OVERFLOW), np.zeros(2, np.int32), 500)
    assert_whole(fit)
    assert fit.elbo < 4 * fit.elbo_error


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "budget"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_proposals_of_extreme_scale_stay_finite_within_their_bound(scale, sampler):
    guide = guide_of(wild.CAUCHY, wild.BOTH_EDGES, init_scale=scale, sampler=sampler)
    kinds = np.asarray([0, 1], np.int32)
    fit = fitted_quietly(guide, kinds, 100)
    assert_whole(fit)
    found = guide.evaluate(jax.random.key(1), fit.params, kinds, num_local=20_000)
    right = sum(p.elbo for p in exact((wild.CAUCHY, wild.BOTH_EDGES), kinds, fit.params, found))
    assert abs(float(found.elbo) - right) < 4 * float(found.elbo_error) + wild.rounding(right)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["exact", "budget"])
def test_points_that_lost_their_support_are_left_out_and_the_fit_says_so(sampler):
    def nowhere(z):
        return jnp.where(jnp.abs(z[0] - 5) < 1e-3, 0.0, -jnp.inf)

    lost = wild.Target("out of reach", nowhere, (5.0,), math.log(2e-3))
    guide = guide_of(wild.HALF_MISSING, lost, sampler=sampler, max_proposals=400)
    fit = fitted_quietly(guide, np.asarray([0, 0, 1], np.int32), 100)
    assert_whole(fit)
    assert any("33 % of the data points of a batch" in text for text in fit.warnings)
    assert any("1 of 3 data points accept less than" in text for text in fit.warnings)
    # The others are trained all the same.
    loc, scale = (np.asarray(fit.params[f"auto_z_{name}"])[:2] for name in ("loc", "scale"))
    assert np.all((loc > 0.2) & (scale > 0.2))
    with pytest.warns(UserWarning, match=r"hit at 1 of 3 data points \(first: 2\)"):
        fit.sample(jax.random.key(1), 10)


@pytest.mark.slow
def test_stock_svi_trains_a_wild_batch_within_the_bound():
    guide = guide_of(*MIXED)
    svi = SVI(guide.model, guide, optax.adam(1e-2), Trace_ELBO())
    result = svi.run(jax.random.key(0), 200, jnp.asarray(KINDS), progress_bar=False)
    state = result.state.mutable_state["auto_state"]
    for leaf in jax.tree.leaves((result.params, state)):
        assert np.all(np.isfinite(leaf))
    assert np.all(np.isfinite(result.losses))
    assert int(state["num_proposals"]) <= len(KINDS) * guide.settings.max_proposals
