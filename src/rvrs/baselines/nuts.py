"""NUTS, the reference that posterior draws are compared with."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS

from rvrs.baselines.task import DivergedError, Fitted, Report, Task

# Chains that advance together in one program.
_CHAINS = 4


def fit(
    rng_key: jax.Array,
    name: str,
    task: Task,
    *,
    num_steps: int,
    num_warmup: int,
    thinning: int,
    report: Report,
) -> Fitted:
    """``num_steps`` draws, over all chains, of which every ``thinning``-th is kept."""
    per_chain = -(-num_steps // _CHAINS)
    mcmc = MCMC(
        NUTS(task.model),
        num_warmup=num_warmup,
        num_samples=per_chain,
        thinning=thinning,
        num_chains=_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    report(0.0, "warming up")
    mcmc.warmup(rng_key)
    report(0.3, "drawing")
    begin = time.perf_counter()
    mcmc.run(jax.random.fold_in(rng_key, 1), extra_fields=("diverging",))
    draws: Any = jax.block_until_ready(mcmc.get_samples(group_by_chain=True))
    seconds = time.perf_counter() - begin
    flat = np.concatenate(
        [np.asarray(value, np.float64).reshape(*value.shape[:2], -1) for value in draws.values()],
        axis=-1,
    )
    if not np.all(np.isfinite(flat)):
        raise DivergedError("NUTS has draws that are not finite")
    merged = {key: value.reshape(-1, *value.shape[2:]) for key, value in draws.items()}
    count = len(next(iter(merged.values())))

    def draw(rng_key: jax.Array, num_samples: int) -> dict[str, jax.Array]:
        if num_samples > count:
            raise ValueError(
                f"num_samples must be at most {count}, the draws of NUTS that there are."
            )
        chosen = jax.random.choice(rng_key, count, (num_samples,), replace=False)
        return {key: jnp.asarray(value)[chosen] for key, value in merged.items()}

    return Fitted(
        method=name,
        elbo=None,
        elbo_error=None,
        seconds_per_step=seconds / per_chain,
        params={},
        losses=np.zeros(0),
        details={
            "num_draws": count,
            "least_ess": float(np.min(effective_sample_size(flat))),
            "largest_rhat": float(np.max(gelman_rubin(flat))),
            "num_divergences": int(np.sum(mcmc.get_extra_fields()["diverging"])),
        },
        draw=draw,
    )
