"""Table 2 of the paper: robust regression with one local latent variable per data point.

Bayesian linear regression with a Student-t likelihood, which is a normal one whose precision is
mixed by a Gamma variable, local to the data point::

    tau_n ~ Gamma(nu / 2, nu / 2),    y_n ~ Normal(x_n . beta, sigma / sqrt(tau_n))

All methods have independent normals for ``beta``, ``log sigma`` and ``log nu``. ``mean-field`` also
gives each ``log tau_n`` one, ``semi-dais-K`` improves on those by K steps of annealed Hamiltonian
dynamics and ``semi-rvrs-Z`` by rejection at the acceptance Z (``-gamma``: with Gamma proposals;
``-budget``: by Algorithm 3). ``oracle`` integrates ``tau`` out, which bounds all others from above,
and ``optimum-Z`` is what normal proposals of ``log tau_n`` with rejection could reach at best.

The paper gives neither the priors (here: :func:`build`) nor the size of the noise that is added to
the responses (:func:`load`). With ours oracle gains about as many nats over mean-field: 134 on
``pol`` (143 in the paper) and 247 on ``bike`` (229).
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.distributions.constraints import positive
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from rvrs import datasets, semi_fitting
from rvrs.baselines import LocalParts, local
from rvrs.core.arguments import check_choice, check_count
from rvrs.datasets import Dataset
from rvrs.experiments import lognormal_family
from rvrs.guides import AutoSemiRVRS
from rvrs.settings import Sampler

DATASETS = ("pol", "bike")  # 5000 rows each
BATCH_SIZE, NUM_STEPS = 256, 100_000  # the paper has six times as many steps
NOISY_SHARE, NOISE_SD = 0.25, 2.5
"""Share of the responses that get noise, and its scale over that of least squares' residuals."""
PLATE = "data"

_LEARNING_RATE = 0.01
# A local parameter has a gradient in one step of 20, so that Adam's usual memory of 1000 steps has
# only 50. For skewed gradients that moves the optimum: mean-field would lose 30 nats on pol.
_SECOND_MOMENT_DECAY = 0.99999
_CHUNK_SIZE = 10_000  # steps between which a run can be interrupted
_ELBO_ERROR = 0.25  # nats; evaluation ends when the standard error is less, or after all rounds
_DRAWS_PER_ROUND, _MAX_ROUNDS = 500, 40


def load(name: str) -> Dataset:
    """A regression with heavy tails: responses in standard deviations, a quarter of them noisy.

    Covariates are standardised, with an intercept and without constant columns. The noise is normal
    and the same every time. It is in units of the residuals, as tails are heavy or not compared
    with what the regression leaves unexplained.
    """
    check_choice("name", name, DATASETS)
    dataset = datasets.load(name)
    varying = dataset.covariates.any(axis=0)  # the loader turns constant columns into zeros
    covariates = dataset.covariates[:, varying]
    responses = dataset.responses.astype(np.float64)
    responses = (responses - responses.mean()) / responses.std()
    coefficients = np.linalg.lstsq(covariates.astype(np.float64), responses)[0]
    noise_sd = NOISE_SD * (responses - covariates @ coefficients).std()
    random = np.random.RandomState(0)
    noisy = random.permutation(len(responses))[: round(NOISY_SHARE * len(responses))]
    responses[noisy] += noise_sd * random.normal(size=len(noisy))
    names = tuple(np.asarray(dataset.covariate_names)[varying].tolist())
    return Dataset(name, covariates, responses.astype(np.float32), names)


class Models(NamedTuple):
    """The regression in the form that NumPyro's ``AutoSemiDAIS`` takes, and without ``tau``."""

    global_model: Callable[[], tuple[Any, ...]]
    """Returns coefficients, scale and degrees of freedom: the argument of ``local_model``."""
    local_model: Callable[[tuple[Any, ...]], None]
    model: Callable[[], None]
    oracle_model: Callable[..., None]
    """``(local_gap=None)``: a function of the shape of the posteriors of ``tau``, if given, tells
    what each of them loses against the exact one."""
    gamma_guide: Callable[[tuple[Any, ...]], None]
    """Gamma proposals, with two parameters of every data point."""


def build(dataset: Dataset, batch_size: int) -> Models:
    """The regression on random batches of a data set; of all its rows, there is only one batch.

    The coefficients are standard normal, ``sigma`` is half normal with scale 1, and ``nu`` has the
    prior Gamma(2, 0.1) of Juarez and Steel (2010).
    """
    size, num_covariates = dataset.covariates.shape
    if not 1 <= batch_size <= size:
        raise ValueError(f"batch_size must be from 1 to {size}, the rows; got {batch_size}.")
    covariates, responses = jnp.asarray(dataset.covariates), jnp.asarray(dataset.responses)

    def global_model() -> tuple[Any, ...]:
        prior = dist.Normal(0.0, 1.0).expand([num_covariates]).to_event(1)
        coefficients = numpyro.sample("coefficients", prior)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        return coefficients, scale, numpyro.sample("degrees_of_freedom", dist.Gamma(2.0, 0.1))

    def local_model(latents: tuple[Any, ...]) -> None:
        coefficients, scale, nu = latents
        with numpyro.plate(PLATE, size, subsample_size=batch_size) as rows:
            tau = numpyro.sample("tau", dist.Gamma(nu / 2, nu / 2))
            likelihood = dist.Normal(covariates[rows] @ coefficients, scale / jnp.sqrt(tau))
            numpyro.sample("responses", likelihood, obs=responses[rows])

    def gamma_guide(latents: tuple[Any, ...]) -> None:
        with numpyro.plate(PLATE, size, subsample_size=batch_size) as rows:
            shape, rate = (
                cast(Any, numpyro.param(f"tau_{name}", jnp.ones(size), constraint=positive))
                for name in ("shape", "rate")
            )
            numpyro.sample("tau", dist.Gamma(shape[rows], rate[rows]))

    def oracle_model(local_gap: Callable[[Any], Any] | None = None) -> None:
        coefficients, scale, nu = global_model()
        if local_gap is not None:
            numpyro.factor("local_gap", -size * local_gap(nu / 2 + 0.5))
        with numpyro.plate(PLATE, size, subsample_size=batch_size) as rows:
            likelihood = dist.StudentT(nu, covariates[rows] @ coefficients, scale)
            numpyro.sample("responses", likelihood, obs=responses[rows])

    def model() -> None:
        local_model(global_model())

    return Models(global_model, local_model, model, oracle_model, gamma_guide)


def train(
    rng_key: jax.Array, model: Any, guide: Any, num_rows: int, num_steps: int, num_draws: int = 1
) -> tuple[dict[str, Any], float]:
    """Train a guide by NumPyro's SVI; its parameters, and seconds per step without compilation.

    The learning rate falls to 0, as the noise of thousands of local parameters adds up in the ELBO;
    more draws per step make less of it. Batches are cut from shuffled rows: to let the plate draw
    them would take more time than all else in a step of mean-field.
    """
    check_count("num_steps", num_steps)
    rate = optax.cosine_decay_schedule(_LEARNING_RATE, num_steps)
    optimizer = optax.adam(rate, b2=_SECOND_MOMENT_DECAY)
    on_rows = lambda rows, program: handlers.substitute(program, data={PLATE: rows})()  # noqa: E731
    programs = partial(on_rows, program=model), partial(on_rows, program=guide)
    svi = SVI(*programs, optim=optimizer, loss=Trace_ELBO(num_draws))
    init_key, shuffle_key = jax.random.split(rng_key)

    def step(index: jax.Array, carry: tuple[Any, jax.Array, jax.Array]) -> Any:
        state, rows, num_skipped = carry
        batch = index % (num_rows // BATCH_SIZE)
        shuffle = partial(jax.random.permutation, jax.random.fold_in(shuffle_key, index))
        rows = jax.lax.cond(batch == 0, shuffle, lambda rows: rows, rows)
        chosen = jax.lax.dynamic_slice_in_dim(rows, batch * BATCH_SIZE, BATCH_SIZE)
        state, loss = svi.stable_update(state, chosen)
        return state, rows, num_skipped + jnp.isnan(loss)

    carry = svi.init(init_key, jnp.arange(BATCH_SIZE)), jnp.arange(num_rows), jnp.array(0)
    steps = jax.jit(lambda start, end, carry: jax.lax.fori_loop(start, end, step, carry))
    compiled = steps.lower(0, num_steps, carry).compile()
    begin = time.perf_counter()
    for start in range(0, num_steps, _CHUNK_SIZE):
        carry = jax.block_until_ready(compiled(start, min(start + _CHUNK_SIZE, num_steps), carry))
    seconds = time.perf_counter() - begin
    if carry[2] > 0.01 * num_steps:
        raise RuntimeError(f"{carry[2]} of {num_steps} steps had no finite gradient.")
    return svi.get_params(carry[0]), seconds / num_steps


def evaluate(rng_key: jax.Array, model: Any, guide: Any, params: Any) -> tuple[float, float]:
    """The ELBO and its standard error by NumPyro's own loss; on batches, it would be very noisy."""
    handlers.seed(guide, rng_key)()  # a guide has to see its model before anything is compiled

    @jax.jit
    def losses(rng_key: jax.Array, params: Any) -> jax.Array:
        keys = jax.random.split(rng_key, _DRAWS_PER_ROUND)
        return jax.lax.map(lambda key: Trace_ELBO().loss(key, params, model, guide), keys)

    elbos, error = np.array([]), math.inf
    for key in jax.random.split(rng_key, _MAX_ROUNDS):
        elbos = np.append(elbos, -losses(key, params))
        error = float(elbos.std(ddof=1) / math.sqrt(len(elbos)))
        if not error > _ELBO_ERROR:
            break
    return float(elbos.mean()), error


class Result(NamedTuple):
    """The ELBO with its Monte Carlo standard error, the posterior mean of ``nu``, the time."""

    elbo: float
    elbo_error: float
    degrees_of_freedom: float
    seconds_per_step: float
    dropped: float = 0.0
    """Share of the data points of a batch that were left out at the end of training."""
    shortfall: float = 0.0
    """Nats that the best proposals of ``semi-rvrs`` would add, with the same global guide."""


def mean_degrees_of_freedom(params: Mapping[str, Any]) -> float:
    """Posterior mean of ``nu`` from the parameters of :func:`rvrs.baselines.local.normals`."""
    loc, scale = (params[f"degrees_of_freedom_auto_{key}"] for key in ("loc", "scale"))
    return float(jnp.exp(loc + scale**2 / 2))


def _semi_dais(models: Models, num_leapfrog: int) -> tuple[Any, Any]:
    # In log tau, the local posteriors differ by a shift alone (see optimal_fraction), so that one
    # dynamics is best for all.
    parts = LocalParts(models.global_model, models.local_model)
    guide = local.semi_dais(models.model, parts, num_leapfrog, subsample_plate=PLATE)
    return models.model, guide


def _by_svi(
    choose: Any, rng_key: jax.Array, dataset: Dataset, num_steps: int, num_draws: int = 1
) -> Result:
    """Train on batches, and evaluate on all rows, what ``choose(models)`` returns: model, guide."""
    train_key, evaluate_key = jax.random.split(rng_key)
    size = len(dataset.responses)
    model, guide = choose(build(dataset, BATCH_SIZE))
    params, seconds = train(train_key, model, guide, size, num_steps, num_draws)
    model, guide = choose(build(dataset, size))
    elbo, error = evaluate(evaluate_key, model, guide, params)
    return Result(elbo, error, mean_degrees_of_freedom(params), seconds)


def _optimum(models: Models, target_acceptance: float) -> tuple[Any, Any]:
    """What normal proposals could reach if they also followed the global variables: a bound."""
    gap = lognormal_family.interpolated_gap(target_acceptance)
    model = partial(models.oracle_model, local_gap=gap)
    return model, local.normals(model)


# The evaluation of rejection: global draws, and proposals per data point at each of them.
_GLOBAL_DRAWS, _LOCAL_PROPOSALS = 200, 200


def _semi_rvrs(
    rng_key: jax.Array,
    dataset: Dataset,
    num_steps: int,
    target_acceptance: float,
    sampler: Sampler = "exact",
    gamma: bool = False,
) -> Result:
    """Train as ``rvrs.fit`` does; the time counts its warm-up of half as many steps."""
    models = build(dataset, BATCH_SIZE)
    guide = AutoSemiRVRS(
        models.model,
        models.local_model,
        local.normals(models.global_model),
        models.gamma_guide if gamma else None,
        target_acceptance=target_acceptance,
        sampler=sampler,
        epsilon=1e-6,
        init_scale=0.5,
    )
    fit_key, evaluate_key = jax.random.split(rng_key)
    trainer, params = semi_fitting.prepare(fit_key, guide, ((), {}), BATCH_SIZE, None)

    def train_for(num_steps: int) -> semi_fitting.SemiRun:
        run = semi_fitting.first_run(fit_key, trainer.first_state(params))
        run = semi_fitting.warm_up(run, trainer, num_steps, progress=False)
        return semi_fitting.train(run, trainer, num_steps, False, None, None, {})

    train_for(2)  # compiles
    begin = time.perf_counter()
    run = jax.block_until_ready(train_for(num_steps))
    seconds = (time.perf_counter() - begin) / num_steps
    found = trainer.constrain(run.state.trainable)
    dropped = run.history.num_dropped[-trainer.data.per_epoch :].mean() / BATCH_SIZE
    evidence = guide.evaluate(
        evaluate_key, found, num_global=_GLOBAL_DRAWS, num_local=_LOCAL_PROPOSALS
    )
    return Result(
        float(evidence.elbo),
        float(evidence.elbo_error),
        mean_degrees_of_freedom(found),
        seconds,
        float(dropped),
        0.0 if gamma else _shortfall(evaluate_key, dataset, guide, found),
    )


# Draws of the global variables, and data points, that the shortfall is estimated from.
_SHORTFALL_DRAWS, _SHORTFALL_POINTS = 20, 100


def _shortfall(rng_key: jax.Array, dataset: Dataset, guide: AutoSemiRVRS, params: Any) -> float:
    global_guide = cast(AutoNormal, guide.global_guide)
    parts: Any = global_guide.sample_posterior(rng_key, params, sample_shape=(_SHORTFALL_DRAWS,))
    # Rows are in random order.
    count = min(_SHORTFALL_POINTS, len(dataset.responses))
    means = parts["coefficients"] @ dataset.covariates[:count].T
    squares = ((dataset.responses[:count] - means) / parts["scale"][:, None]) ** 2
    nu = parts["degrees_of_freedom"]
    found = lognormal_family.shortfall(
        nu / 2 + 0.5,
        nu[:, None] / 2 + squares / 2,
        params["auto_tau_loc"][:count],
        params["auto_tau_scale"][:count],
        guide.settings.target_acceptance,
    )
    return float(len(dataset.responses) * jnp.mean(found))


METHODS: dict[str, Callable[[jax.Array, Dataset, int], Result]] = {
    # With one draw, it would still gain 3 nats from twice the steps.
    "mean-field": partial(_by_svi, lambda of: (of.model, local.normals(of.model)), num_draws=8),
    "oracle": partial(_by_svi, lambda of: (of.oracle_model, local.normals(of.oracle_model))),
    "semi-dais-8": partial(_by_svi, partial(_semi_dais, num_leapfrog=8)),
    "semi-dais-16": partial(_by_svi, partial(_semi_dais, num_leapfrog=16)),
    "semi-dais-32": partial(_by_svi, partial(_semi_dais, num_leapfrog=32)),
    "semi-rvrs-0.5": partial(_semi_rvrs, target_acceptance=0.5),
    "semi-rvrs-0.1": partial(_semi_rvrs, target_acceptance=0.1),
    "semi-rvrs-0.5-budget": partial(_semi_rvrs, target_acceptance=0.5, sampler="budget"),
    "semi-rvrs-0.1-budget": partial(_semi_rvrs, target_acceptance=0.1, sampler="budget"),
    "semi-rvrs-0.5-gamma": partial(_semi_rvrs, target_acceptance=0.5, gamma=True),
    "optimum-1": partial(_by_svi, partial(_optimum, target_acceptance=1.0)),
    "optimum-0.5": partial(_by_svi, partial(_optimum, target_acceptance=0.5)),
    "optimum-0.1": partial(_by_svi, partial(_optimum, target_acceptance=0.1)),
}
"""By name, functions that fit a data set in a number of steps. All run in double precision."""


def run(dataset: str, method: str, seed: int, num_steps: int, folder: str | Path) -> Result:
    """The result of a method, from a file in ``folder`` if it is there, else computed and stored.

    Runs of different lengths lie side by side. One whose settings have changed is repeated.
    """
    check_choice("dataset", dataset, DATASETS)
    check_choice("method", method, METHODS)
    settings = {"dataset": dataset, "method": method, "seed": seed, "num_steps": num_steps}
    settings |= {"batch_size": BATCH_SIZE, "noise": [NOISY_SHARE, NOISE_SD]}
    settings |= {"adam": [_LEARNING_RATE, _SECOND_MOMENT_DECAY], "elbo_error": _ELBO_ERROR}
    path = Path(folder) / f"{dataset}_{method}_{num_steps}_seed{seed}.json"
    if path.is_file():
        try:
            stored = json.loads(path.read_text())
            if stored["settings"] == settings:
                return Result(**stored["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no result of this experiment; delete it.") from error
    with jax.enable_x64(True):
        result = METHODS[method](jax.random.key(seed), load(dataset), num_steps)
    if not math.isfinite(result.elbo):
        raise RuntimeError(f"the ELBO of {method} on {dataset} is {result.elbo}; not stored.")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # no other process ever reads half a file
    part.write_text(json.dumps({"settings": settings, "result": result._asdict()}, indent=1))
    part.replace(path)
    return result


def table(results: Mapping[str, Result]) -> str:
    """The results of methods on one data set as lines of text; what is unknown is NaN."""
    elbos = {name: result.elbo for name, result in results.items()}
    base, best = elbos.get("mean-field", math.nan), elbos.get("oracle", math.nan)
    head = "method                    ELBO  error     gain  of gap     nu  ms/step  dropped  short"
    lines = [head]
    for name, (elbo, error, nu, seconds, dropped, short) in results.items():
        share = (elbo - base) / (best - base) if best != base else math.nan
        figures = f"{elbo:>10.2f}{error:>7.2f}{elbo - base:>9.2f}{share:>8.1%}{nu:>7.2f}"
        lines.append(f"{name:<20}{figures}{1e3 * seconds:>9.3f}{dropped:>9.1%}{short:>7.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run methods on a data set, those whose results are not stored yet, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--dataset", required=True, choices=DATASETS)
    parser.add_argument("--methods", default="mean-field,oracle", help=", ".join(METHODS))
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("rvrs-hierarchical"))
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    for method in methods:
        check_choice("--methods", method, METHODS)
    rest = options.seed, options.steps, options.out
    results = {method: run(options.dataset, method, *rest) for method in methods}
    print(table(results))


if __name__ == "__main__":
    main()
