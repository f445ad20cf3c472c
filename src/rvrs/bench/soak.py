"""``make soak``: fits of a rotating set of models in one process, for as long as is asked for.

A service or a notebook fits models for days. What would stop it in the end grows a little with
every fit: memory, compiled programs, open files. Every round fits all models, with other data and
keys than the round before, stores and loads what can be stored, and is measured at its end.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO

from rvrs import files, fitting, vae, vae_training, vi
from rvrs.baselines import local
from rvrs.bench import hierarchical, works
from rvrs.bench.compilation import counted
from rvrs.experiments import hierarchical_model
from rvrs.guides import AutoRVRS, AutoSemiRVRS

MOST_GROWTH = 0.05
"""Share by which memory may be larger at the end than once all caches are full."""
# Rounds until caches are full: those of fits to models that are made anew hold 16.
_WARM_UP = 20

Job = Callable[[int, Path], None]
"""``(round, folder)``: fits one model, as in no round before."""


class Round(NamedTuple):
    """What a process holds after a round."""

    megabytes: float
    """Resident memory."""
    programs: int
    """Compiled during the round."""
    open_files: int
    threads: int
    seconds: float


def jobs(num_steps: int = 1000) -> dict[str, Job]:
    """Every way to train that the package has, on small models."""
    return {
        "fit": _fit_job(num_steps),
        "fit of a new model": _new_model_job(num_steps),
        "local latents": _semi_job(num_steps),
        "svi": _svi_job(num_steps),
        "vi": _vi_job(num_steps),
        "vae": _vae_job(),
    }


def _logistic_data(number: int) -> tuple[jax.Array, jax.Array]:
    """As of :func:`works.made_up_logistic`, but of other shapes in no round."""
    work = works.made_up_logistic(100, 5)
    features, labels = work.args
    return features + 0.01 * number, labels


def _fit_job(num_steps: int) -> Job:
    model = works.made_up_logistic(100, 5).model

    def run(number: int, folder: Path) -> None:
        data = _logistic_data(number)
        path = folder / "fit.npz"
        options: dict[str, Any] = {"num_steps": num_steps, "num_evaluation_draws": 10_000}
        options |= {"progress": False, "checkpoint": path}
        fitted = fitting.fit(jax.random.key(number), model, *data, **options)
        fitted.save(path)
        loaded = fitting.load(path, model, *data)
        first, second = (fit.sample(jax.random.key(1), 100) for fit in (fitted, loaded))
        assert np.array_equal(first["weights"], second["weights"])

    return run


def _new_model_job(num_steps: int) -> Job:
    def run(number: int, folder: Path) -> None:
        def model(y: jax.Array) -> None:
            rate: Any = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
            numpyro.sample("y", dist.Poisson(rate), obs=y)

        y = jnp.array([3, 1, 4, 1, 5]) + number % 7
        options: dict[str, Any] = {"num_steps": num_steps, "num_evaluation_draws": 10_000}
        fitting.fit(jax.random.key(number), model, y, progress=False, **options)

    return run


def _semi_job(num_steps: int) -> Job:
    dataset = hierarchical.made_up_data(500, 3)
    models = hierarchical_model.build(dataset, 50)
    guide = AutoSemiRVRS(
        models.model,
        models.local_model,
        local.normals(models.global_model),
        target_acceptance=0.5,
    )

    def run(number: int, folder: Path) -> None:
        path = folder / "semi.npz"
        fitted = fitting.fit(
            jax.random.key(number),
            models.model,
            guide=guide,
            num_steps=num_steps,
            progress=False,
            checkpoint=path,
        )
        fitted.sample(jax.random.key(1), 10, indices=[0, 1])

    return run


def _svi_job(num_steps: int) -> Job:
    model = works.made_up_logistic(100, 5).model
    guide = AutoRVRS(model, proposal="mvn", target_acceptance=0.2)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    update = jax.jit(svi.update)

    def run(number: int, folder: Path) -> None:
        data = _logistic_data(number)
        state = svi.init(jax.random.key(number), *data)
        for _ in range(num_steps // 10):
            state, _ = update(state, *data)
        params = svi.get_params(state)
        guide.sample_posterior(jax.random.key(1), params, *data, sample_shape=(100,))

    return run


def _vi_job(num_steps: int) -> Job:
    work = works.made_up_logistic(100, 5)
    algorithm = vi.as_top_level_api(work.log_density, optax.adam(1e-2))

    def run(number: int, folder: Path) -> None:
        key = jax.random.key(number)
        state, _ = vi.run(key, algorithm, algorithm.init(jnp.zeros(5)), num_steps)
        jax.block_until_ready(algorithm.sample(key, state, 100))

    return run


def _vae_job() -> Job:
    images = np.random.default_rng(0).random((200, 16)) < 0.3
    autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    method = vae_training.rvrs(autoencoder, 0.2)

    def run(number: int, folder: Path) -> None:
        key = jax.random.key(number)
        options: dict[str, Any] = {"batch_size": 20, "num_epochs": 2, "progress": False}
        vae_training.train(method, key, images.astype(np.uint8), **options)

    return run


def measure(programs: int, seconds: float) -> Round:
    """What this process holds now (Linux only)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Round(
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        programs,
        sum(1 for _ in Path("/proc/self/fd").iterdir()),
        sum(1 for _ in Path("/proc/self/task").iterdir()),
        seconds,
    )


def run(
    seconds: float,
    chosen: dict[str, Job],
    *,
    report: Callable[[str], None] = print,
    least_rounds: int = _WARM_UP + 2,
) -> list[Round]:
    """Rounds of all jobs until the time is over."""
    rounds: list[Round] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rvrs-soak-") as folder:
        while time.perf_counter() - began < seconds or len(rounds) < least_rounds:
            start = time.perf_counter()
            with counted() as count, warnings.catch_warnings():
                # Fits this short are doubtful, which is not the question here.
                warnings.simplefilter("ignore", UserWarning)
                for job in chosen.values():
                    job(len(rounds), Path(folder))
                programs = count()
            rounds.append(measure(programs, time.perf_counter() - start))
            report(f"{time.perf_counter() - began:7.0f} s  round {len(rounds):4}: {rounds[-1]}")
    return rounds


def problems(rounds: Sequence[Round], warm_up: int = _WARM_UP) -> list[str]:
    """What has grown since the caches were full, in words; empty if nothing has."""
    later = rounds[warm_up:]
    part = max(1, len(later) // 4)
    first, last = later[:part], later[-part:]
    found = []
    before, after = (float(np.median([r.megabytes for r in part])) for part in (first, last))
    if after > (1 + MOST_GROWTH) * before:
        found.append(f"memory grew from {before:.0f} to {after:.0f} MB")
    for name, word in (("programs", "programs per round"), ("open_files", "open files")):
        before, after = (max(getattr(r, name) for r in part) for part in (first, last))
        if after > before:
            found.append(f"{word} grew from {before} to {after}")
    return found


def summary(rounds: Sequence[Round], warm_up: int = _WARM_UP) -> dict[str, Any]:
    """Figures of a soak, for a file."""
    later = rounds[warm_up:]
    part = max(1, len(later) // 4)
    return {
        "rounds": len(rounds),
        "seconds": sum(r.seconds for r in rounds),
        "first_quarter": _medians(later[:part]),
        "last_quarter": _medians(later[-part:]),
        "problems": problems(rounds, warm_up),
    }


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    return {name: float(np.median([getattr(r, name) for r in rounds])) for name in Round._fields}


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m rvrs.bench.soak``: leaves with an error if anything has grown."""
    parser = argparse.ArgumentParser(prog="python -m rvrs.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long; 30 by default")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error("--minutes must be above 0.")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: the folder does not exist.")
    if options.out is not None and options.out.is_dir():
        parser.error(f"--out {options.out}: this is a folder; name a file in it.")
    if not Path("/proc/self/statm").is_file():
        parser.error("the figures come from /proc, which only Linux has.")
    rounds = run(60 * options.minutes, jobs())
    figures = summary(rounds)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.out is not None:
        files.write_text(options.out, f"{text}\n")
    if figures["problems"]:
        sys.exit(f"soak: {'; '.join(figures['problems'])}.")


if __name__ == "__main__":
    main()
