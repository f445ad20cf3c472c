"""AutoRVRS in stock SVI on targets that break samplers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.initialization import init_to_value

import rvrs
from tests.wild import targets as wild
from tests.wild.targets import ONE_DIMENSIONAL, Target

EPSILON = 1e-4
NUM_STEPS = 300
MAX_PROPOSALS = 400
# All but the one whose gradient is NaN, which stock SVI takes over as it is.
TARGETS = tuple(target for target in ONE_DIMENSIONAL if target is not wild.NO_GRADIENT)
QUICK = (wild.HALF_MISSING, wild.SPRINKLED_NAN)

GUIDE = rvrs.AutoRVRS(
    wild.model_of_one,
    epsilon=EPSILON,
    max_proposals=MAX_PROPOSALS,
    # All of the targets have a density and a gradient there.
    init_loc_fn=init_to_value(values={"z": jnp.asarray([0.25])}),
)
SVI_OF_GUIDE = SVI(wild.model_of_one, GUIDE, optax.adam(2e-2), Trace_ELBO())


@functools.partial(jax.jit, static_argnames="way")
def train(state, which, way="update"):
    def step(state, _):
        state, loss = getattr(SVI_OF_GUIDE, way)(state, which)
        return state, (loss, state.mutable_state["auto_state"])

    return jax.lax.scan(step, state, length=NUM_STEPS)


@functools.cache
def trained(target: Target, way: str = "update"):
    which = jnp.int32(ONE_DIMENSIONAL.index(target))
    state, (losses, states) = train(SVI_OF_GUIDE.init(jax.random.key(0), which), which, way)
    return which, SVI_OF_GUIDE.get_params(state), np.asarray(losses), states


def assert_whole(params, losses, states) -> None:
    for leaf in jax.tree.leaves((params, states)):
        assert np.all(np.isfinite(leaf))
    assert int(states["num_proposals"].max()) <= MAX_PROPOSALS
    # A step without loss is one that was capped, and is counted.
    assert np.isnan(losses).sum() == int(states["num_capped"][-1])


@wild.few(TARGETS, QUICK)
def test_steps_keep_to_the_bound_and_parameters_and_threshold_stay_finite(target):
    _, *rest = trained(target)
    assert_whole(*rest)


@wild.few(TARGETS, QUICK)
def test_elbo_and_normalizer_are_those_of_quadrature_and_the_evidence_is_no_more_than_there_is(
    target,
):
    which, params, _, _ = trained(target)
    found = GUIDE.evaluate(jax.random.key(1), params, which, num_draws=10_000)
    loc, scale = float(params["auto_loc"][0]), math.exp(float(params["auto_log_scale"][0]))
    wanted = wild.quadrature(target, loc, scale, float(found.threshold), EPSILON)
    for name in ("elbo", "log_normalizer"):
        value, error = float(getattr(found, name)), float(getattr(found, f"{name}_error"))
        right = getattr(wanted, name)
        assert abs(value - right) < 4 * error + wild.rounding(right), name
    excess = float(found.log_evidence) - target.log_evidence
    assert excess < 4 * float(found.log_evidence_error) + wild.rounding(target.log_evidence)


@wild.few(TARGETS, ())
def test_draws_lie_where_the_target_has_a_density(target):
    which, params, _, _ = trained(target)
    draws = GUIDE.sample_posterior(jax.random.key(2), params, which, sample_shape=(500,))["z"]
    assert np.all(np.isfinite(draws))
    assert np.all(np.isfinite(jax.vmap(target.log_density)(draws)))


@pytest.mark.slow
def test_stable_update_skips_steps_without_gradient_and_the_threshold_goes_on():
    _, params, _, states = trained(wild.NO_GRADIENT, "stable_update")
    for leaf in jax.tree.leaves((params, states)):
        assert np.all(np.isfinite(leaf))


def svi_of(target: Target, **settings):
    model = wild.model_of(target)
    start = init_to_value(values={"z": jnp.asarray(target.start)})
    guide = rvrs.AutoRVRS(model, init_loc_fn=start, **settings)
    return guide, SVI(model, guide, optax.adam(2e-2), Trace_ELBO())


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("target", [wild.FUNNEL, wild.HORSESHOE], ids=lambda t: t.name)
def test_many_dimensions_stay_finite_at_any_scale_and_claim_no_more_than_there_is(target, scale):
    guide, svi = svi_of(target, init_scale=scale)
    result = svi.run(jax.random.key(0), 100, progress_bar=False)
    for leaf in jax.tree.leaves((result.params, result.state.mutable_state)):
        assert np.all(np.isfinite(leaf))
    num_capped = int(result.state.mutable_state["auto_state"]["num_capped"])
    assert np.isnan(result.losses).sum() == num_capped
    found = guide.evaluate(jax.random.key(1), result.params, num_draws=5000)
    assert not any(np.isnan(leaf) for leaf in found)
    assert float(found.elbo) < target.log_evidence + 4 * float(found.elbo_error)
    excess = float(found.log_evidence) - target.log_evidence
    assert excess < 4 * float(found.log_evidence_error)


@pytest.mark.slow
def test_a_proposal_that_lost_the_support_counts_its_steps_and_says_so_of_its_draws():
    guide, svi = svi_of(wild.HALF_MISSING, init_scale=1e-6)
    result = svi.run(jax.random.key(0), 20, progress_bar=False)
    now = result.state.mutable_state["auto_state"]
    assert int(now["num_capped"]) == int(np.isnan(result.losses).sum()) > 0
    assert int(now["num_proposals"]) <= guide.settings.max_proposals
    for leaf in jax.tree.leaves((result.params, now)):
        assert np.all(np.isfinite(leaf))
    found = guide.evaluate(jax.random.key(1), result.params, num_draws=100)
    assert float(found.elbo) == -math.inf
    assert float(found.elbo_error) == math.inf
    with pytest.warns(UserWarning, match="10 of 10 draws are NaN: max_proposals was hit"):
        guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(10,))


@pytest.mark.slow
def test_an_acceptance_of_one_in_a_million_is_reached_within_the_bound():
    settings = {"target_acceptance": 1e-6, "epsilon": 0.0, "max_proposals": 10_000_000}
    _, svi = svi_of(wild.HALF_MISSING, init_scale=1.0, **settings)
    result = svi.run(jax.random.key(0), 2, progress_bar=False)
    now = result.state.mutable_state["auto_state"]
    assert int(now["num_proposals"]) <= 10_000_000
    assert 0.9e-6 < float(now["acceptance"]) < 1.1e-6
    assert np.all(np.isfinite(result.losses))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result.params))
