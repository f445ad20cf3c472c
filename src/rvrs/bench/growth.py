"""How the time of a training step grows with each size of a problem."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rvrs import vi
from rvrs.bench import hierarchical, works
from rvrs.bench.bare import NUM_SAMPLES
from rvrs.bench.report import Figure, Row, Suite
from rvrs.bench.timing import interleaved, median_ratio
from rvrs.core import rejection, threshold
from rvrs.core.objectives import elbo_surrogate
from rvrs.core.problem import log_weights

NAME = "growth"
TITLE = "A training step of RVRS at growing sizes"
NOTES = (
    "Over half the size: 2 would be linear growth. The exponent is that of the whole range, "
    "log(ratio of times) / log(ratio of sizes); at most 1 is linear. What does not grow is a "
    "logistic regression with N=100, D=17, Z=0.1, S=2; B are data points of a robust regression."
)

_LEARNING_RATE = 1e-3
_EPSILON = 1e-4


class Program(NamedTuple):
    """Training steps at one size, not compiled yet."""

    function: Callable[[jax.Array, Any], Any]
    """``(rng_key, state) -> result`` of ``num_steps`` steps."""
    state: Any
    num_steps: int


class Axis(NamedTuple):
    """One of the sizes of a problem."""

    name: str
    sizes: tuple[int, ...]
    """Each twice the one before."""
    program: Callable[[int, int], Program]
    """``(size, num_steps)``."""


def vi_program(
    num_steps: int,
    *,
    num_data: int = 100,
    dimension: int = 17,
    target_acceptance: float = 0.1,
    num_samples: int = NUM_SAMPLES,
) -> Program:
    """Steps of ``rvrs.vi`` on a logistic regression."""
    work = works.made_up_logistic(num_data, dimension)
    algorithm = vi.as_top_level_api(
        work.log_density,
        optax.adam(_LEARNING_RATE),
        target_acceptance=target_acceptance,
        num_samples=num_samples,
        epsilon=min(_EPSILON, target_acceptance / 100),
    )

    def run(key: jax.Array, state: Any) -> Any:
        return vi.run(key, algorithm, state, num_steps, chunk_size=num_steps)

    # T is calibrated to the first proposal, which hardly moves within these steps.
    return Program(run, algorithm.init(jnp.zeros(dimension)), num_steps)


def targets_program(num_targets: int, num_steps: int, *, target_acceptance: float = 0.5) -> Program:
    """Steps for many targets: one local variable of each data point of a robust regression."""
    dataset = hierarchical.made_up_data(num_targets)
    task = hierarchical.hierarchical_task(dataset, num_targets, target_acceptance)
    optimizer = optax.adam(_LEARNING_RATE)
    block = task.num_proposals
    problem, targets, _ = task.build(task.parameters, jax.random.key(0), task.batch(0))
    # So many proposals that Z is near its target.
    noise = problem.sample_noise(jax.random.key(1), (20 * block, num_targets))
    t = threshold.calibrate(log_weights(problem, targets, noise), target_acceptance, _EPSILON)

    def step(key: jax.Array, carry: Any) -> Any:
        parameters, opt_state = carry

        def loss(parameters: Any) -> jax.Array:
            problem, targets, rest = task.build(parameters, key, task.batch(0))
            draws = rejection.draw_exact(
                key,
                problem,
                targets,
                t,
                num_samples=NUM_SAMPLES,
                epsilon=_EPSILON,
                block_size=block,
                max_proposals=50 * block,
                reallocate=True,
            )
            found = elbo_surrogate(problem, targets, draws, t, epsilon=_EPSILON)
            return -(task.weight * jnp.sum(found.surrogate) + rest)

        updates, opt_state = optimizer.update(jax.grad(loss)(parameters), opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state

    def run(key: jax.Array, state: Any) -> Any:
        return lax.fori_loop(
            0, num_steps, lambda i, carry: step(jax.random.fold_in(key, i), carry), state
        )

    return Program(run, (task.parameters, optimizer.init(task.parameters)), num_steps)


def axes(*, quick: bool) -> list[Axis]:
    """The sizes that grow, one at a time."""

    def doublings(first: int, count: int) -> tuple[int, ...]:
        return tuple(first * 2**k for k in range(1 + (1 if quick else count)))

    found = [
        Axis("dimension D", doublings(16, 5), lambda d, n: vi_program(n, dimension=d)),
        Axis("targets B", doublings(32, 6), targets_program),
        Axis("data points N", doublings(128, 6), lambda size, n: vi_program(n, num_data=size)),
        Axis("1 / Z", doublings(5, 5), lambda s, n: vi_program(n, target_acceptance=1 / s)),
        Axis("draws S", doublings(2, 5), lambda s, n: vi_program(n, num_samples=s)),
    ]
    # One for each kind of program.
    return found[:2] if quick else found


def measure(*, quick: bool, progress: Callable[[str], None]) -> Suite:
    """Time the steps at all sizes; the sizes of an axis take turns."""
    rows: list[Row] = []
    for axis in axes(quick=quick):
        progress(axis.name)
        programs = {size: axis.program(size, 2 if quick else 200) for size in axis.sizes}
        contestants = {}
        for size, program in programs.items():
            compiled = jax.jit(program.function)
            contestants[str(size)] = lambda key, f=compiled, p=program: f(key, p.state)
        times = interleaved(contestants, repeats=1 if quick else 9)
        rows += _rows(axis, times, {str(size): p.num_steps for size, p in programs.items()})
    return Suite(NAME, TITLE, NOTES, rows)


def _rows(axis: Axis, times: dict[str, list[float]], num_steps: dict[str, int]) -> list[Row]:
    rows, smaller = [], None
    first, last = (str(axis.sizes[place]) for place in (0, -1))
    for size, record in times.items():
        names = ("over half the size", "lower quartile", "upper quartile")
        ratio = (None,) * 3 if smaller is None else median_ratio(record, times[smaller])
        figures: dict[str, Figure] = dict(zip(names, ratio, strict=True))
        figures["exponent"] = None
        if size == last:
            whole = median_ratio(times[last], times[first]).value
            figures["exponent"] = math.log(whole) / math.log(axis.sizes[-1] / axis.sizes[0])
        figures["µs per step"] = sorted(record)[len(record) // 2] / num_steps[size] * 1e6
        rows.append(Row(axis.name, size, figures))
        smaller = size
    return rows
