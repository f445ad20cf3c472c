"""NUTS of NumPyro, ready to be timed."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import NUTS

from rvrs.bench.works import Work
from rvrs.core.arguments import check_count


class Nuts:
    """NumPyro's NUTS, warmed up and compiled, ready to draw again and again.

    Its ``MCMC`` would compile a program at every run, so the kernel is driven from here. Chains
    advance together in one program: several times as many effective draws per second as with one
    chain after the other.

    Parameters
    ----------
    num_samples
        Draws per chain and call.
    """

    def __init__(self, work: Work, *, num_warmup: int, num_samples: int, num_chains: int) -> None:
        check_count("num_warmup", num_warmup)
        check_count("num_samples", num_samples)
        check_count("num_chains", num_chains)
        kernel: Any = NUTS(work.model)
        room = jnp.zeros((num_samples, num_chains, work.dimension))

        def run(state: Any, length: jax.Array) -> tuple[Any, jax.Array]:
            def step(index: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
                state, draws = carry
                state = kernel.sample(state, work.args, {})
                (z,) = state.z.values()
                return state, draws.at[index % num_samples].set(z)

            return lax.fori_loop(0, length, step, (state, room))

        # One program for warm-up and draws, since it takes long to compile.
        self._run = jax.jit(run)
        self._num_samples, self._num_chains = num_samples, num_chains
        first = kernel.init(self._keys(jax.random.key(0)), num_warmup, None, work.args, {})
        jax.block_until_ready(self._run(first, 1))
        began = time.perf_counter()
        self._warm, _ = jax.block_until_ready(self._run(first, num_warmup))
        self.warmup_seconds = time.perf_counter() - began
        """Seconds of the warm-up, without compilation."""

    def draw(self, rng_key: jax.Array) -> jax.Array:
        """Unconstrained draws ``(draws, chains, D)`` from where the warm-up ended."""
        state = self._warm._replace(rng_key=self._keys(rng_key))
        return self._run(state, self._num_samples)[1]

    def _keys(self, rng_key: jax.Array) -> jax.Array:
        return jax.random.split(rng_key, self._num_chains)


def min_ess(draws: Any) -> float:
    """Least effective sample size of any coordinate of draws ``(draws, chains, D)``."""
    chains = np.swapaxes(np.asarray(draws, np.float64), 0, 1)
    return float(np.min(effective_sample_size(chains)))
