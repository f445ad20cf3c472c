"""Robust regression with a latent variable per data point, on batches: steps of all methods."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoSemiDAIS

from rvrs import semi_fitting
from rvrs.baselines import LocalParts, local
from rvrs.bench.bare import NUM_SAMPLES, Task, bare_steps, normal_problem
from rvrs.bench.contest import Entry
from rvrs.bench.timing import Contestant
from rvrs.core.problem import Problem, Targets
from rvrs.datasets import Dataset
from rvrs.experiments import hierarchical_model as experiment
from rvrs.guides import AutoSemiRVRS
from rvrs.proposals.normal import DiagonalNormal

NUM_DATA, NUM_COVARIATES, BATCH_SIZE = 5000, 26, 256
"""The size of the data set ``pol``, and of the batches that it is trained on."""
PEERS = ("mean-field", "semi-DAIS-16")
_DAIS_STEPS = 16
_INIT_SCALE = 0.5
_LEARNING_RATE = 0.01


def made_up_data(num_data: int = NUM_DATA, num_covariates: int = NUM_COVARIATES) -> Dataset:
    """A regression whose noise has the tails of Student's distribution with 3 degrees."""
    rng = np.random.default_rng(0)
    covariates = rng.standard_normal((num_data, num_covariates)).astype(np.float32)
    noise = 0.3 * rng.standard_t(3, num_data)
    responses = covariates @ rng.standard_normal(num_covariates) / num_covariates**0.5 + noise
    names = tuple(f"x{number}" for number in range(num_covariates))
    return Dataset("made up", covariates, responses.astype(np.float32), names)


def entries(
    dataset: Dataset,
    batch_size: int,
    target_acceptances: tuple[float, ...],
    num_steps: int,
    *,
    num_settling: int,
    peers: tuple[str, ...] = PEERS,
) -> dict[str, Entry]:
    """Semi-RVRS after ``num_settling`` steps, its bare work, and peers."""
    models = experiment.build(dataset, batch_size)
    found: dict[str, Entry] = {}
    for target in target_acceptances:
        product, proposals = _semi_rvrs(models, batch_size, target, num_steps, num_settling)
        bare, quiet = f"bare work Z={target:g}", f"bare work Z={target:g}, fixed noise"
        over = {"over bare work": bare, "over bare work with fixed noise": quiet}
        over |= {f"over {peer}": peer for peer in peers}
        found[f"semi-RVRS Z={target:g}"] = Entry(product, num_steps, over, proposals, NUM_SAMPLES)
        task = hierarchical_task(dataset, batch_size, target)
        for name, random in ((bare, True), (quiet, False)):
            work = bare_steps(task, optax.adam(_LEARNING_RATE), num_steps, random=random)
            found[name] = Entry(work, num_steps, {}, task.num_proposals, NUM_SAMPLES)
    reference = {"over bare work": f"bare work Z={target_acceptances[0]:g}"}
    index = _batches(len(dataset.responses), batch_size)
    for peer in peers:
        mean_field = peer == "mean-field"
        guide = local.normals(models.model) if mean_field else _semi_dais(models)
        found[peer] = Entry(_svi_steps(models.model, guide, index, num_steps), num_steps, reference)
    return found


def _batches(num_data: int, batch_size: int) -> jax.Array:
    """Rows of the batches of an epoch."""
    order = np.random.default_rng(1).permutation(num_data)
    per_epoch = num_data // batch_size
    return jnp.asarray(order[: per_epoch * batch_size].reshape(per_epoch, batch_size))


def _semi_rvrs(
    models: experiment.Models,
    batch_size: int,
    target_acceptance: float,
    num_steps: int,
    num_settling: int,
) -> tuple[Contestant, float]:
    """Steps as ``rvrs.fit`` takes them, from a state that has settled; proposals per point."""
    guide = AutoSemiRVRS(
        models.model,
        models.local_model,
        local.normals(models.global_model),
        target_acceptance=target_acceptance,
        num_samples=NUM_SAMPLES,
        init_scale=_INIT_SCALE,
    )
    key = jax.random.key(0)
    trainer, params = semi_fitting.prepare(key, guide, ((), {}), batch_size, None)
    state, info = trainer.first_state(params), None
    # The cost of a step depends on T, which is solved for at the first sight of a point and then
    # followed.
    for start in range(0, num_settling, trainer.chunk_size):
        length = min(trainer.chunk_size, num_settling - start)
        state, info = trainer.run_chunk("training", key, state, start, length, num_settling)
    assert info is not None
    proposals = float(np.mean(info.num_proposals)) / batch_size

    def product(key: jax.Array) -> Any:
        now = state
        for start in range(0, num_steps, trainer.chunk_size):
            length = min(trainer.chunk_size, num_steps - start)
            now, _ = trainer.run_chunk("training", key, now, start, length, num_steps)
        return now

    return product, proposals


def _semi_dais(models: experiment.Models) -> AutoSemiDAIS:
    parts = LocalParts(models.global_model, models.local_model)
    return local.semi_dais(models.model, parts, _DAIS_STEPS, subsample_plate=experiment.PLATE)


def _svi_steps(model: Any, guide: Any, index: jax.Array, num_steps: int) -> Contestant:
    """Steps of NumPyro's SVI on given batches, in one compiled loop."""

    def on_rows(rows: jax.Array, program: Any) -> Any:
        return handlers.substitute(program, data={experiment.PLATE: rows})()

    programs = partial(on_rows, program=model), partial(on_rows, program=guide)
    svi = SVI(*programs, optim=optax.adam(_LEARNING_RATE), loss=Trace_ELBO())
    first = svi.init(jax.random.key(0), index[0])

    @jax.jit
    def loop(key: jax.Array, state: Any, index: jax.Array) -> Any:
        def step(number: jax.Array, state: Any) -> Any:
            return svi.update(state, index[number % len(index)])[0]

        return lax.fori_loop(0, num_steps, step, state._replace(rng_key=key))

    return lambda key: loop(key, first, index)


def hierarchical_task(dataset: Dataset, batch_size: int, target_acceptance: float) -> Task:
    """Normal proposals of the logarithm of every local variable, and a normal global guide."""
    num_data, num_covariates = dataset.covariates.shape
    covariates, responses = jnp.asarray(dataset.covariates), jnp.asarray(dataset.responses)
    # Coefficients, and the logarithms of scale and degrees of freedom.
    num_global = num_covariates + 2
    start = {
        "global": DiagonalNormal(jnp.zeros(num_global), jnp.full(num_global, -1.0)),
        "local": DiagonalNormal(
            jnp.zeros((num_data, 1)), jnp.full((num_data, 1), np.log(_INIT_SCALE))
        ),
    }
    problem = normal_problem(1, log_local)

    def build(parameters: Any, key: jax.Array, rows: jax.Array) -> tuple[Problem, Targets, Any]:
        guide = parameters["global"]
        # Another key than that of the proposals.
        noise = jax.random.normal(jax.random.fold_in(key, 0), (num_global,))
        latents = guide.loc + jnp.exp(guide.log_scale) * noise
        entropy = jnp.sum(guide.log_scale)
        proposal = jax.tree.map(lambda leaf: leaf[rows], parameters["local"])
        targets = Targets(proposal, latents, (covariates[rows], responses[rows]))
        return problem, targets, log_global(latents) + entropy

    index = _batches(num_data, batch_size)
    return Task(start, build, target_acceptance, index, num_data / batch_size)


def log_global(latents: jax.Array) -> jax.Array:
    """``log p`` of coefficients, log scale and log degrees of freedom, up to constants."""
    coefficients, log_scale, log_nu = latents[:-2], latents[-2], latents[-1]
    prior = -0.5 * jnp.sum(coefficients**2) - 0.5 * jnp.exp(2 * log_scale) + log_scale
    return prior + dist.Gamma(2.0, 0.1).log_prob(jnp.exp(log_nu)) + log_nu


def log_local(latents: jax.Array, row: tuple[jax.Array, jax.Array], u: jax.Array) -> jax.Array:
    """``log p(tau_n, y_n)`` of one data point as a density of ``u = log tau_n``."""
    coefficients, scale, nu = latents[:-2], jnp.exp(latents[-2]), jnp.exp(latents[-1])
    covariates, response = row
    tau = jnp.exp(u[0])
    prior: Any = dist.Gamma(nu / 2, nu / 2).log_prob(tau)
    likelihood: Any = dist.Normal(covariates @ coefficients, scale / jnp.sqrt(tau)).log_prob(
        response
    )
    return prior + u[0] + likelihood
