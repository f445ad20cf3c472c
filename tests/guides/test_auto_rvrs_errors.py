"""What AutoRVRS refuses, and what happens when the model has hardly any density."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDAIS,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
)
from numpyro.infer.initialization import init_to_value

import rvrs
from tests.guides.models import X, Y, line, location, svi_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_acceptance": 0.0}, "target_acceptance must be a number in"),
        ({"target_acceptance": "0.1"}, "target_acceptance must be a number in"),
        ({"target_acceptance": 1e-5}, "cannot be reached with epsilon"),
        ({"num_samples": 1, "baseline": "leave_one_out"}, "num_samples=2 or more"),
        ({"num_samples": 2.0}, "num_samples must be a whole number"),
        ({"epsilon": -0.1}, "epsilon must be a number in"),
        ({"epsilon": None}, "epsilon must be a number in"),
        ({"threshold": float("nan")}, "threshold must be None"),
        ({"threshold": "adapt"}, "threshold must be None"),
        ({"estimator": "vrs"}, "estimator must be one of 'reparameterized', 'score'"),
        ({"model_gradient": True}, "model_gradient must be one of 'unbiased', 'truncated'"),
        ({"max_proposals": 0}, "max_proposals must be a whole number"),
        ({"max_proposals": 1}, "max_proposals=1 is less than num_samples=2"),
        ({"prefix": ""}, "prefix must be a word"),
        ({"prefix": 3}, "prefix must be a word"),
        ({"init_loc_fn": 0.0}, "init_loc_fn must be one of NumPyro's"),
        ({"init_scale": 0.0}, "init_scale must be a finite number above 0"),
        ({"init_scale": "small"}, "init_scale must be a finite number above 0"),
        ({"proposal": "normal"}, "proposal must be one of 'diagonal', 'mvn', 'low_rank'"),
        ({"proposal": 3}, "proposal must be one of"),
        ({"proposal": AutoDiagonalNormal}, r"pass AutoDiagonalNormal\(model\)"),
        ({"proposal": AutoDiagonalNormal(location)}, "built for another model"),
    ],
)
def test_bad_arguments_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        rvrs.AutoRVRS(line, **settings)


def test_a_model_that_is_no_function_is_named():
    with pytest.raises(ValueError, match="model must be a NumPyro model"):
        rvrs.AutoRVRS(3)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(AutoBNAFNormal, marks=pytest.mark.slow),
        AutoDAIS,
        AutoLaplaceApproximation,
    ],
)
def test_autoguides_that_cannot_propose_are_refused_with_alternatives(kind):
    svi = svi_of(line, rvrs.AutoRVRS(line, proposal=kind(line)))
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*AutoIAFNormal"):
        svi.init(jax.random.key(0), X, Y)


def discrete():
    numpyro.sample("k", dist.Bernoulli(0.5))


def no_latent():
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=1.0)


def subsampled():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", 10, subsample_size=5):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=jnp.zeros(5))


def stateful():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.primitives.mutable("count", {"n": 0})
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=0.0)


def impossible():
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.factor("never", jnp.where(jnp.abs(z) < 0, 0.0, -jnp.inf))


def not_a_number():
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=jnp.nan)


@pytest.mark.filterwarnings("ignore:Out-of-support")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (discrete, "latent site 'k' is discrete; sum it out"),
        (no_latent, "no latent variables"),
        (subsampled, r"plate 'rows' is subsampled \(5 of 10\).*remove subsample_size"),
        (stateful, r"mutable state \('count'\)"),
        (impossible, "not finite at any initial point.*init_loc_fn"),
        (not_a_number, "check the data for NaN"),
    ],
)
def test_models_that_it_cannot_take_are_refused_by_name(model, message):
    svi = svi_of(model, rvrs.AutoRVRS(model))
    with pytest.raises(ValueError, match=message):
        svi.init(jax.random.key(0))


def narrow():
    # Finite in about one proposal of a hundred, and a parameter whose gradient is not finite
    # wherever the density is not.
    width = numpyro.param("width", 1.0)
    z = numpyro.sample("z", dist.Normal(0.0, width))
    numpyro.factor("narrow", jnp.where(jnp.abs(z) < 1e-3, width, -jnp.inf))


@pytest.mark.parametrize("way", ["update", "stable_update"])
def test_steps_that_hit_max_proposals_have_no_loss_and_do_no_harm(way):
    guide = rvrs.AutoRVRS(narrow, init_loc_fn=init_to_value(values={"z": 0.0}), max_proposals=20)
    svi = svi_of(narrow, guide)
    start = svi.init(jax.random.key(0))
    step = jax.jit(getattr(svi, way))
    state, capped = start, int(start.mutable_state["auto_state"]["num_capped"])
    for _ in range(100):
        state, loss = step(state)
        now = state.mutable_state["auto_state"]
        assert bool(jnp.isnan(loss)) == (int(now["num_capped"]) > capped)
        capped = int(now["num_capped"])
        assert int(now["num_proposals"]) <= 20
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(now))
    assert capped > 80
    for leaf in jax.tree.leaves(svi.get_params(state)):
        assert np.all(np.isfinite(leaf))


def test_draws_that_could_not_be_made_are_nan_and_say_so():
    guide = rvrs.AutoRVRS(narrow, init_loc_fn=init_to_value(values={"z": 0.0}), max_proposals=2)
    params = {
        "auto_loc": jnp.array([5.0]),
        "auto_log_scale": jnp.array([-3.0]),
        "width": jnp.array(1.0),
    }
    with pytest.warns(UserWarning, match="10 of 10 draws are NaN: max_proposals was hit"):
        draws = guide.sample_posterior(jax.random.key(0), params, sample_shape=(10,))
    assert np.all(np.isnan(draws["z"]))
