"""Models that several tests share."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
Y = np.array([-1.1, -0.9, -0.1, -0.4, 0.4, 0.1, 0.8, 0.9], np.float32)


def line(x, y=None):
    """A regression with a positive latent, a plate and a deterministic site."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.deterministic("double", 2 * slope)
    with numpyro.plate("observations", len(x)):
        numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)


def location(y):
    """Normal data of unit scale with a nearly flat prior: the posterior is N(mean, 1 / n)."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1000.0))
    numpyro.sample("y", dist.Normal(mu, jnp.ones_like(y)), obs=y)


def rate(y):
    """Counts with a gamma prior: the posterior is Gamma(1 / 2 + sum, 1 + n)."""
    value = numpyro.sample("rate", dist.Gamma(0.5, 1.0))
    numpyro.deterministic("log rate", jnp.log(value))
    numpyro.sample("y", dist.Poisson(value * jnp.ones_like(y)), obs=y)


def svi_of(model, guide, learning_rate=1e-2):
    return SVI(model, guide, optax.adam(learning_rate), Trace_ELBO())
