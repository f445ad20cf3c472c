"""Models that are fitted on several devices: with local latents, and without."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from rvrs.bench.scaling import data, guide, model

__all__ = ["data", "guide", "logistic", "model"]


def logistic(x, y):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=jnp.asarray(x) @ weights), obs=(y > 0).astype(int))
