"""Many data points with local latents: time and memory of a step, on one device or several.

``python -m rvrs.bench.scaling --points 1e4 1e6``; every number of points in a process of its own,
so that memory is that of one of them.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoNormal

from rvrs import semi_fitting, spread
from rvrs.bench import collectives
from rvrs.guides import AutoSemiRVRS

_CHUNKS, _CHUNK = 4, 500


def data(num_points: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Covariates, and responses with Student-t noise."""
    random = np.random.default_rng(0)
    x = random.normal(size=(num_points, 2))
    y = x @ np.array([1.0, -1.0]) + random.standard_t(3, size=num_points)
    return x.astype(dtype), y.astype(dtype)


def global_model(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Coefficients."""
    beta: Any = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    return beta, x, y


def local_model(outputs: tuple[Any, Any, Any]) -> None:
    """Student-t noise as a mixture of normals, with a precision of every data point."""
    beta, x, y = outputs
    with numpyro.plate("data", len(y)):
        precision: Any = numpyro.sample("precision", dist.Gamma(1.5, 1.5))
        numpyro.sample("y", dist.Normal(x @ beta, precision**-0.5), obs=y)


def model(x: Any, y: Any) -> None:
    """The regression."""
    local_model(global_model(x, y))


def guide(**settings: Any) -> AutoSemiRVRS:
    """Rejection for the precisions."""
    settings = {"target_acceptance": 0.3} | settings
    return AutoSemiRVRS(model, local_model, AutoNormal(global_model), **settings)


def measure(num_points: int, batch_size: int, num_devices: int) -> dict[str, Any]:
    """Steps of a training, by chunks; the first has compilation and the first sight of points."""
    devices = jax.devices()[:num_devices]
    mesh = spread.check(jax.make_mesh((num_devices,), ("data",), devices=devices))
    trainer, params = semi_fitting.prepare(
        jax.random.key(0), guide(), (data(num_points), {}), batch_size, None, mesh
    )
    first = trainer.first_state(params)
    state, seconds = trainer.place(first), []
    for number in range(_CHUNKS):
        begin = time.perf_counter()
        state, _ = trainer.run_chunk(
            "training", jax.random.key(1), state, number * _CHUNK, _CHUNK, _CHUNKS * _CHUNK
        )
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - begin) / _CHUNK)
    leaves = jax.tree.leaves(first)
    found = {
        "points": num_points,
        "batch": batch_size,
        "devices": num_devices,
        "milliseconds": [round(1e3 * s, 3) for s in seconds],
        "bytes_per_point": sum(jnp.asarray(leaf).nbytes for leaf in leaves) / num_points,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if trainer.spread is not None:
        program = collectives.program_of(trainer, first, jax.random.key(0))
        found["bytes_moved"] = collectives.moved(program)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every number of points in turn."""
    parser = argparse.ArgumentParser(prog="python -m rvrs.bench.scaling", description=__doc__)
    parser.add_argument("--points", type=float, nargs="+", default=[1e4, 1e6])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--devices", type=int, default=1, help="virtual ones, of the CPU")
    options = parser.parse_args(arguments)
    if min([*options.points, options.batch, options.devices]) < 1:
        parser.error("--points, --batch and --devices must be 1 or more.")
    if len(options.points) > 1:
        for points in options.points:
            command = [sys.executable, "-m", "rvrs.bench.scaling", "--points", str(points)]
            command += ["--batch", str(options.batch), "--devices", str(options.devices)]
            subprocess.run(command, check=True)
        return
    jax.config.update("jax_num_cpu_devices", options.devices)
    print(json.dumps(measure(int(options.points[0]), options.batch, options.devices)), flush=True)


if __name__ == "__main__":
    main()
