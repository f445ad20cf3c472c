"""A regression with a latent precision of every data point, and its guide."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoNormal

import rvrs


def data(num_points, dtype=np.float32):
    random = np.random.default_rng(0)
    x = random.normal(size=(num_points, 2))
    y = x @ np.array([1.0, -1.0]) + random.standard_t(3, size=num_points)
    return x.astype(dtype), y.astype(dtype)


def global_model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    return beta, x, y


def local_model(outputs):
    beta, x, y = outputs
    with numpyro.plate("data", len(y)):
        precision = numpyro.sample("precision", dist.Gamma(1.5, 1.5))
        numpyro.sample("y", dist.Normal(x @ beta, precision**-0.5), obs=y)


def model(x, y):
    local_model(global_model(x, y))


def guide(**settings):
    settings = {"target_acceptance": 0.3} | settings
    return rvrs.AutoSemiRVRS(model, local_model, AutoNormal(global_model), **settings)


def logistic(x, y):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(x) @ weights), obs=(y > 0).astype(int))
