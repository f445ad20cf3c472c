"""How much memory training and sampling take, by the figures of the compiler.

A compiled program knows the bytes that it needs besides arguments and results, whatever else the
machine does. These are the same in every run.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rvrs import vi
from rvrs.bench import growth, works
from rvrs.bench.report import Figure, Row, Suite
from rvrs.guides import AutoRVRS

NAME = "memory"
TITLE = "Memory of training and sampling"
NOTES = (
    "Temporary: bytes that a compiled program needs besides its arguments and results, by XLA's "
    "own analysis. The exponent is that of the whole range. Temporary memory of sampling should "
    "not grow with the number of draws. Resident peak: of a process that does nothing else, over "
    "that of the process with the fewest draws."
)

DIMENSION = 17


class Memory(NamedTuple):
    """Bytes of a compiled program."""

    temporary: int
    arguments: int
    results: int


def of(function: Callable[..., Any], *arguments: Any) -> Memory:
    """What a function takes once it is compiled for these arguments; it does not run."""
    analysis: Any = jax.jit(function).lower(*arguments).compile().memory_analysis()
    if analysis is None:
        raise RuntimeError("this backend of JAX has no memory analysis.")
    return Memory(
        analysis.temp_size_in_bytes,
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
    )


def measure(*, quick: bool, progress: Callable[[str], None]) -> Suite:
    """Analyse the programs of the growth suite, and of sampling more and more draws."""
    rows: list[Row] = []
    key = jax.random.key(0)
    for axis in growth.axes(quick=quick):
        progress(axis.name)
        found = {}
        for size in axis.sizes[:: 1 if quick else 2]:
            program = axis.program(size, 2)
            found[size] = of(program.function, key, program.state)
        rows += _rows(f"training, {axis.name}", found)
    counts = (100, 1000) if quick else (10_000, 100_000, 1_000_000)
    for name, sampler in (("vi", vi_sampler()), ("AutoRVRS", guide_sampler())):
        progress(f"sampling by {name}")
        found = {
            count: of(partial(sampler.draw, num_draws=count), key, sampler.state)
            for count in counts
        }
        peaks = {}
        if name == "vi" and not quick and Path("/proc/self/status").is_file():
            peaks = {count: resident_peak(count) for count in counts}
        rows += _rows(f"sampling by {name}", found, peaks)
    return Suite(NAME, TITLE, NOTES, rows)


def _rows(work: str, found: dict[int, Memory], peaks: dict[int, int] | None = None) -> list[Row]:
    rows, before = [], None
    sizes = list(found)
    for size, memory in found.items():
        figures: dict[str, Figure] = {
            "temporary bytes": memory.temporary,
            "result bytes": memory.results,
            "argument bytes": memory.arguments,
            "over the size before": None if before is None else memory.temporary / before,
            "exponent": None,
        }
        if size == sizes[-1]:
            whole = memory.temporary / found[sizes[0]].temporary
            figures["exponent"] = math.log(whole) / math.log(size / sizes[0])
        if peaks:
            figures["resident peak"] = peaks[size] / peaks[sizes[0]]
        before = memory.temporary
        rows.append(Row(work, f"{size:,}", figures))
    return rows


class Sampler(NamedTuple):
    """A posterior to draw from."""

    draw: Callable[..., Any]
    """``(rng_key, state, num_draws)``."""
    state: Any


def vi_sampler() -> Sampler:
    """Draws by ``rvrs.vi``."""
    work = works.made_up_logistic(100, DIMENSION)
    algorithm = vi.as_top_level_api(work.log_density, optax.adam(1e-3))

    def draw(key: jax.Array, state: Any, num_draws: int) -> Any:
        return algorithm.sample(key, state, num_draws)

    return Sampler(draw, algorithm.init(jnp.zeros(DIMENSION)))


def guide_sampler() -> Sampler:
    """Draws by a guide, which is what ``rvrs.fit`` returns them from."""
    work = works.made_up_logistic(100, DIMENSION)
    guide = AutoRVRS(work.model, proposal="mvn")
    family = guide.settings.proposal
    params = guide.proposal.sites(family.init(jnp.zeros(DIMENSION), 0.3))

    def draw(key: jax.Array, params: Any, num_draws: int) -> Any:
        return guide.sample_posterior(key, params, *work.args, sample_shape=(num_draws,))

    return Sampler(draw, params)


def resident_peak(num_draws: int) -> int:
    """Kilobytes of the largest resident set of a process that makes so many draws."""
    # Not by getrusage, which counts what the process was before it became Python: a copy of us.
    program = (
        "import jax, pathlib; from rvrs.bench import memory\n"
        "sampler = memory.vi_sampler()\n"
        f"jax.block_until_ready(sampler.draw(jax.random.key(0), sampler.state, {num_draws}))\n"
        "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return int(done.stdout)
