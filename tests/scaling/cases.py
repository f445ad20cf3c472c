"""What is computed on eight virtual devices, in a process of its own: figures, as JSON.

``python -m tests.scaling.cases NAME``; a process cannot have more devices once it has started.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import rvrs
from rvrs import semi_fitting, spread
from rvrs.bench import collectives
from rvrs.core import rejection
from rvrs.core.problem import Problem, Targets
from rvrs.semi_training import Trainer
from tests.scaling import models

NUM_RUNS = 4000
THRESHOLD, SLOTS = -1.0, 3


def mesh(count):
    return spread.check(jax.make_mesh((count,), ("devices",), devices=jax.devices()[:count]))


def draws():
    """Draws from a quartic density by a normal proposal, whose proposals devices share."""
    problem = Problem(
        sample_noise=jax.random.normal,
        propose=lambda _, noise: (noise, -0.5 * noise**2),
        log_proposal=lambda _, z: -0.5 * z**2,
        log_joint=lambda *args: -((args[-1] - 0.5) ** 4),
    )
    targets = Targets(jnp.zeros(1), None)

    def one(key):
        found = rejection.draw_exact(
            key,
            problem,
            targets,
            jnp.array([THRESHOLD]),
            num_samples=SLOTS,
            min_samples=2,
            epsilon=0.0,
            block_size=16,
            max_proposals=2000,
            axis="devices",
        )
        tally = found.tally
        figures = (found.log_normalizer, tally.num_proposals, tally.acceptance, found.num_draws)
        return found.noise[:, 0], jnp.stack([figure[0].astype(float) for figure in figures])

    def run(keys):
        return jax.tree.map(lambda leaf: leaf[None], jax.lax.map(one, keys))

    keys = jax.random.split(jax.random.key(0), NUM_RUNS)
    every_device = PartitionSpec("devices")
    result = {}
    for count in (1, 2, 4, 8):
        spread_out = jax.shard_map(
            run,
            mesh=mesh(count),
            in_specs=PartitionSpec(),
            out_specs=every_device,
            check_vma=False,
        )
        noise, figures = map(np.asarray, jax.jit(spread_out)(keys))
        same = all(np.array_equal(leaf, leaf[:1].repeat(count, 0)) for leaf in (noise, figures))
        result[count] = {"same": same, "noise": noise[0].tolist(), "figures": figures[0].tolist()}
    return result


class Plain(Trainer):
    """A trainer whose parameters move by their gradients, so little that these stay the same."""

    @property
    def optimizer(self):
        return optax.identity()


RATE, NUM_CHUNKS, CHUNK = 1e-9, 20, 100


def gradients(kind):
    """Mean gradients of the global guide's parameters, with and without devices."""
    jax.config.update("jax_enable_x64", True)
    # Some devices have two points and others one.
    x, y = models.data(12, np.float64)
    settings = {"exact": {}, "budget": {"sampler": "budget", "num_proposals": 5}}[kind]
    guide = models.guide(threshold=3.0, init_scale=0.5, **settings)
    result = {}
    for count in (0, 4, 8):
        trainer, params = semi_fitting.prepare(
            jax.random.key(0), guide, ((x, y), {}), 8, RATE, mesh(count) if count else None
        )
        trainer = Plain(*trainer)
        state, means = trainer.place(trainer.first_state(params)), []
        for chunk in range(NUM_CHUNKS):
            before = trainer.fetch(state).trainable
            state, _ = trainer.run_chunk(
                "training", jax.random.key(1), state, chunk * CHUNK, CHUNK, 10**9
            )
            after = trainer.fetch(state).trainable
            moved = [
                (np.asarray(before[name]) - np.asarray(after[name])) / (RATE * CHUNK)
                for name in ("beta_auto_loc", "beta_auto_scale")
            ]
            means.append(np.concatenate([np.ravel(leaf) for leaf in moved]).tolist())
        result[count] = means
    return result


def _summary(fit):
    return {
        "elbo": fit.elbo,
        "error": fit.elbo_error,
        "acceptance": fit.acceptance,
        "losses": np.asarray(fit.losses).tolist(),
        "params": {name: np.asarray(value).tolist() for name, value in fit.params.items()},
    }


def fits(counts):
    """The same fit with local latents on several numbers of devices, stored and loaded on one."""
    data, guide, result = models.data(203), models.guide(), {}
    for count in counts.split(","):
        fit = rvrs.fit(
            jax.random.key(2),
            models.model,
            *data,
            guide=guide,
            batch_size=40,
            num_steps=1000,
            progress=False,
            mesh=mesh(int(count)) if int(count) else None,
        )
        result[count] = _summary(fit)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "fit.npz"
            fit.save(path)
            loaded = rvrs.load(path, models.model, *data, guide=guide)
        result[count]["loaded"] = _summary(loaded) == _summary(fit)
    return result


def global_fits(counts):
    """The same fit with global latents on several numbers of devices."""
    x, y = models.data(30)
    return {
        count: _summary(
            rvrs.fit(
                jax.random.key(2),
                models.logistic,
                x,
                y,
                num_steps=500,
                num_evaluation_draws=20_000,
                progress=False,
                mesh=mesh(int(count)) if int(count) else None,
            )
        )
        for count in counts.split(",")
    }


def moved():
    """Bytes between devices in a step, by points, batch, Z and global parameters."""
    result = {}
    for name, (num_points, batch, acceptance) in {
        "plain": (400, 40, 0.3),
        "points": (4000, 40, 0.3),
        "batch": (400, 160, 0.3),
        "proposals": (400, 40, 0.05),
    }.items():
        guide = models.guide(target_acceptance=acceptance)
        arguments = (models.data(num_points), {})
        trainer, params = semi_fitting.prepare(
            jax.random.key(0), guide, arguments, batch, None, mesh(8)
        )
        program = collectives.program_of(trainer, trainer.first_state(params), jax.random.key(0))
        result[name] = collectives.moved(program)
    return result


def layouts():
    """Rows of data points to devices and back, for numbers that devices do not divide."""
    result = {}
    for count in (2, 8):
        for num_rows in (8, 11, 203):
            found = spread.over(mesh(count), num_rows, count)
            rows = {"a": np.arange(num_rows), "b": np.arange(2 * num_rows).reshape(2, -1)}
            axes = {"a": 0, "b": 1}
            placed = found.place(rows, axes)
            back = found.fetch(placed, axes)
            result[f"{count} {num_rows}"] = {
                "same": all(np.array_equal(rows[name], back[name]) for name in rows),
                "shape": placed["b"].shape,
                "on each": placed["b"].addressable_shards[0].data.shape,
                "sizes": [shard.size for shard in found.shards],
                "weights": found.weights_of_all,
            }
    return result


def refused():
    """Messages about batches that do not go with a mesh."""
    result = {}
    for name, (num_points, batch) in {"batch": (100, 42), "points": (9, 16)}.items():
        try:
            rvrs.fit(
                jax.random.key(0),
                models.model,
                *models.data(num_points),
                guide=models.guide(),
                batch_size=batch,
                mesh=mesh(8),
            )
        except ValueError as error:
            result[name] = str(error)
    return result


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))
