"""How long a step takes, compared with the work that it cannot avoid.

The bare work of a step is: propose ``ceil(S / Z)`` times and evaluate the log weights in one batch,
take one gradient over S draws, and make one Adam update. Product and bare work run in compiled
loops of the same length, turn by turn in one process, and only their ratio is reported: times of
their own mean little on a shared machine.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rvrs import proposals, vi

NUM_DATA = 100
DIMENSION = 17
NUM_SAMPLES = 2
TARGET_ACCEPTANCES = (0.3, 0.1, 0.05)
# Long enough that a call takes some tenths of a second; the repeats give a median.
NUM_STEPS = 5000
NUM_REPEATS = 15


class StepTimes(NamedTuple):
    """Medians over the repeats, in microseconds per step."""

    target_acceptance: float
    step: float
    bare: float
    """Bare work, drawing the proposals' random numbers included."""
    bare_without_random: float
    """The same at fixed noise."""


def logistic_regression() -> Callable[[jax.Array], jax.Array]:
    """The log density of a Bayesian logistic regression on made-up data."""
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.standard_normal((NUM_DATA, DIMENSION)), jnp.float32)
    coefficients = rng.standard_normal(DIMENSION)
    chance = 1 / (1 + np.exp(-np.asarray(features) @ coefficients))
    labels = jnp.asarray(rng.random(NUM_DATA) < chance, jnp.float32)

    def log_density(z: jax.Array) -> jax.Array:
        logits = features @ z
        return jnp.sum(labels * logits - jax.nn.softplus(logits)) - 0.5 * jnp.sum(z**2)

    return log_density


def measure(target_acceptance: float) -> StepTimes:
    """Time RVRS steps of an adapted state beside the bare work."""
    log_density = logistic_regression()
    optimizer = optax.adam(1e-3)
    algorithm = vi.as_top_level_api(
        log_density, optimizer, target_acceptance=target_acceptance, num_samples=NUM_SAMPLES
    )
    state = algorithm.init(jnp.zeros(DIMENSION))
    # T and the proposal settle first: a step's cost depends on the acceptance.
    state, _ = vi.run(jax.random.key(0), algorithm, state, NUM_STEPS, chunk_size=NUM_STEPS)

    def product(key: jax.Array) -> Any:
        return vi.run(key, algorithm, state, NUM_STEPS, chunk_size=NUM_STEPS)

    num_proposals = math.ceil(NUM_SAMPLES / target_acceptance)
    contestants = [
        product,
        _bare_work(log_density, optimizer, num_proposals, random=True),
        _bare_work(log_density, optimizer, num_proposals, random=False),
    ]
    return StepTimes(target_acceptance, *_interleaved_medians(contestants))


def _bare_work(
    log_density: Callable[[jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
    num_proposals: int,
    *,
    random: bool,
) -> Callable[[jax.Array], Any]:
    family = proposals.diagonal_normal()
    parameters = family.init(jnp.zeros(DIMENSION), 0.3)
    fixed = family.sample_noise(jax.random.key(1), (num_proposals,), parameters)

    def log_weight(parameters: Any, noise: jax.Array) -> jax.Array:
        z, _ = family.propose(parameters, noise)
        # From z rather than from the noise: the faster of the two forms in this program.
        return log_density(z) - family.log_density(parameters, z)

    def loss(parameters: Any, noise: jax.Array) -> jax.Array:
        frozen = lax.stop_gradient(parameters)
        z = jax.vmap(family.propose, (None, 0))(parameters, noise)[0]
        log_q = jax.vmap(family.log_density, (None, 0))(frozen, z)
        return -jnp.mean(jax.vmap(log_density)(z) - log_q)

    def step(index: jax.Array, carry: Any, key: jax.Array) -> Any:
        parameters, opt_state, log_weights = carry
        if random:
            key = jax.random.fold_in(key, index)
            noise = family.sample_noise(key, (num_proposals,), parameters)
        else:
            # A dependence on the carry keeps the compiler from hoisting anything.
            noise = fixed + 1e-20 * log_weights[0]
        log_weights = jax.vmap(log_weight, (None, 0))(parameters, noise)
        gradient = jax.grad(loss)(parameters, noise[:NUM_SAMPLES])
        updates, opt_state = optimizer.update(gradient, opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state, log_weights

    @jax.jit
    def loop(key: jax.Array) -> Any:
        start = (parameters, optimizer.init(parameters), jnp.zeros(num_proposals))
        return lax.fori_loop(0, NUM_STEPS, lambda i, carry: step(i, carry, key), start)

    return loop


def _interleaved_medians(contestants: list[Callable[[jax.Array], Any]]) -> list[float]:
    """Median microseconds per step of each, taking turns; the first turn compiles."""
    times: list[list[float]] = [[] for _ in contestants]
    for repeat in range(NUM_REPEATS + 1):
        key = jax.random.key(repeat)
        for contestant, record in zip(contestants, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(contestant(key))
            record.append((time.perf_counter() - start) / NUM_STEPS * 1e6)
    return [statistics.median(record[1:]) for record in times]


def main() -> None:
    """Measure and print the table of ratios."""
    console = Console()
    table = Table(
        title=f"Step over bare work: logistic regression, N={NUM_DATA}, D={DIMENSION}, "
        f"S={NUM_SAMPLES}"
    )
    table.add_column("Z_target")
    table.add_column("step / bare work", justify="right")
    table.add_column("step / bare work without random numbers", justify="right")
    progress = track(TARGET_ACCEPTANCES, "Measuring", console=console, transient=True)
    for times in [measure(target_acceptance) for target_acceptance in progress]:
        table.add_row(
            f"{times.target_acceptance:g}",
            f"{times.step / times.bare:.2f}",
            f"{times.step / times.bare_without_random:.2f}",
        )
    console.print(table)
