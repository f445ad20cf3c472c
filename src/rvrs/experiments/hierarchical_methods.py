"""Methods of Table 2 of the paper: what fits the regression in a number of steps.

All have independent normals for ``beta``, ``log sigma`` and ``log nu``. ``mean-field`` also gives
each ``log tau_n`` one, ``semi-dais-K`` improves on those by K steps of annealed Hamiltonian
dynamics and ``semi-rvrs-Z`` by rejection at the acceptance Z (``-gamma``: with Gamma proposals;
``-budget-S'``: by Algorithm 3 with S' proposals per data point). ``oracle`` integrates ``tau`` out,
which bounds all others from above, and ``optimum-Z`` is what normal proposals of ``log tau_n`` with
rejection could reach at best.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from rvrs import semi_fitting
from rvrs.baselines import LocalParts, local
from rvrs.core.arguments import check_count
from rvrs.datasets import Dataset
from rvrs.experiments import lognormal_family
from rvrs.experiments.experiment import DivergedError, Report
from rvrs.experiments.hierarchical_model import PLATE, Models, build
from rvrs.guides import AutoSemiRVRS
from rvrs.semi_training import SemiTrainInfo, SemiTrainState, Stage, Trainer

_LEARNING_RATE = 0.01
# A local parameter has a gradient in one step of 20, so that Adam's usual memory of 1000 steps has
# only 50. For skewed gradients that moves the optimum: mean-field would lose 30 nats on pol.
_SECOND_MOMENT_DECAY = 0.99999
# Training is cut into so many parts, of at least so many steps, between which progress is reported
# and times are taken.
_NUM_PARTS, _SHORTEST_PART = 50, 100
# Share of all steps that may be without a finite gradient.
_MOST_SKIPPED = 0.01
_DRAWS_PER_ROUND = 500


class Effort(NamedTuple):
    """What a fit may cost."""

    num_steps: int
    batch_size: int
    mean_field_draws: int
    """Per step of mean-field: with one, it would still gain 3 nats from twice 100,000 steps."""
    elbo_error: float
    """Nats: the evaluation of what is trained by SVI ends when its standard error is less, ..."""
    evaluation_draws: int
    """... or after so many draws."""
    global_draws: int
    """The evaluation of rejection: draws of the global variables, ..."""
    local_proposals: int
    """... and proposals per data point at each of them."""


class Measured(NamedTuple):
    """What a method has reached."""

    elbo: float
    elbo_error: float
    """Monte Carlo standard error of ``elbo``."""
    degrees_of_freedom: float
    """Posterior mean of ``nu``."""
    seconds_per_step: float
    """Of training, by the median of its parts, without compilation and without any warm-up."""
    training_seconds: float
    """Of all of the training, without compilation."""
    dropped: float = 0.0
    """Share of the data points of a batch that were left out at the end of training."""
    shortfall: float | None = None
    """Nats that the best proposals of ``semi-rvrs`` would add, with the same global guide; None
    where the proposals are not normal."""


class Trained(NamedTuple):
    """Parameters, and the time that it took to find them."""

    params: dict[str, Any]
    seconds_per_step: float
    training_seconds: float


def train(
    rng_key: jax.Array,
    model: Any,
    guide: Any,
    num_rows: int,
    *,
    num_steps: int,
    batch_size: int,
    num_draws: int = 1,
    report: Report,
) -> Trained:
    """Train a guide by NumPyro's SVI.

    The learning rate falls to 0, as the noise of thousands of local parameters adds up in the ELBO;
    more draws per step make less of it. Batches are cut from shuffled rows: to let the plate draw
    them would take more time than all else in a step of mean-field.

    Raises
    ------
    DivergedError
        As soon as more than one step in a hundred of all was without a finite gradient.
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
        batch = index % (num_rows // batch_size)
        shuffle = partial(jax.random.permutation, jax.random.fold_in(shuffle_key, index))
        rows = jax.lax.cond(batch == 0, shuffle, lambda rows: rows, rows)
        chosen = jax.lax.dynamic_slice_in_dim(rows, batch * batch_size, batch_size)
        state, loss = svi.stable_update(state, chosen)
        return state, rows, num_skipped + jnp.isnan(loss)

    carry = svi.init(init_key, jnp.arange(batch_size)), jnp.arange(num_rows), jnp.array(0)
    steps = jax.jit(lambda start, end, carry: jax.lax.fori_loop(start, end, step, carry))
    compiled = steps.lower(0, num_steps, carry).compile()
    part = max(_SHORTEST_PART, math.ceil(num_steps / _NUM_PARTS))
    seconds, lengths = [], []
    for start in range(0, num_steps, part):
        end = min(start + part, num_steps)
        begin = time.perf_counter()
        carry = jax.block_until_ready(compiled(start, end, carry))
        seconds.append(time.perf_counter() - begin)
        lengths.append(end - start)
        _check_skipped(int(carry[2]), end, num_steps)
        report(end / num_steps, f"step {end}")
    per_step = float(np.median(np.divide(seconds, lengths)))
    return Trained(svi.get_params(carry[0]), per_step, sum(seconds))


def _check_skipped(num_skipped: int, num_done: int, num_steps: int) -> None:
    if num_skipped > _MOST_SKIPPED * num_steps:
        raise DivergedError(f"{num_skipped} of {num_done} steps had no finite loss or gradient")


def evaluate(
    rng_key: jax.Array, model: Any, guide: Any, params: Any, *, max_error: float, max_draws: int
) -> tuple[float, float]:
    """The ELBO and its standard error by NumPyro's own loss; on batches, it would be very noisy.

    Draws are made until the error is below ``max_error``, or ``max_draws`` are reached.
    """
    handlers.seed(guide, rng_key)()  # a guide has to see its model before anything is compiled

    @jax.jit
    def losses(rng_key: jax.Array, params: Any) -> jax.Array:
        keys = jax.random.split(rng_key, _DRAWS_PER_ROUND)
        return jax.lax.map(lambda key: Trace_ELBO().loss(key, params, model, guide), keys)

    elbos, error = np.array([]), math.inf
    for key in jax.random.split(rng_key, max(1, max_draws // _DRAWS_PER_ROUND)):
        elbos = np.append(elbos, -losses(key, params))
        error = float(elbos.std(ddof=1) / math.sqrt(len(elbos)))
        if not error > max_error:
            break
    return float(elbos.mean()), error


def mean_degrees_of_freedom(params: Mapping[str, Any]) -> float:
    """Posterior mean of ``nu`` from the parameters of :func:`rvrs.baselines.local.normals`."""
    loc, scale = (params[f"degrees_of_freedom_auto_{key}"] for key in ("loc", "scale"))
    return float(jnp.exp(loc + scale**2 / 2))


def _by_svi(
    choose: Callable[[Models], tuple[Any, Any]],
    rng_key: jax.Array,
    dataset: Dataset,
    effort: Effort,
    report: Report,
    *,
    several_draws: bool = False,
) -> Measured:
    """Train on batches, and evaluate on all rows, what ``choose(models)`` returns: model, guide."""
    train_key, evaluate_key = jax.random.split(rng_key)
    size = len(dataset.responses)
    model, guide = choose(build(dataset, effort.batch_size))
    trained = train(
        train_key,
        model,
        guide,
        size,
        num_steps=effort.num_steps,
        batch_size=effort.batch_size,
        num_draws=effort.mean_field_draws if several_draws else 1,
        report=report,
    )
    report(1.0, "evaluating")
    model, guide = choose(build(dataset, size))
    limits = {"max_error": effort.elbo_error, "max_draws": effort.evaluation_draws}
    elbo, error = evaluate(evaluate_key, model, guide, trained.params, **limits)
    nu = mean_degrees_of_freedom(trained.params)
    return Measured(elbo, error, nu, trained.seconds_per_step, trained.training_seconds)


def _mean_field(models: Models) -> tuple[Any, Any]:
    return models.model, local.normals(models.model)


def _oracle(models: Models) -> tuple[Any, Any]:
    return models.oracle_model, local.normals(models.oracle_model)


def _semi_dais(models: Models, num_leapfrog: int) -> tuple[Any, Any]:
    # In log tau, the local posteriors differ by a shift alone (see optimal_fraction), so that one
    # dynamics is best for all.
    parts = LocalParts(models.global_model, models.local_model)
    guide = local.semi_dais(models.model, parts, num_leapfrog, subsample_plate=PLATE)
    return models.model, guide


def _optimum(models: Models, target_acceptance: float) -> tuple[Any, Any]:
    """What normal proposals could reach if they also followed the global variables: a bound."""
    gap = lognormal_family.interpolated_gap(target_acceptance)
    model = partial(models.oracle_model, local_gap=gap)
    return model, local.normals(model)


class _Watched(Trainer):
    """A trainer that reports how far it is, takes times, and ends a training without gradients."""

    # Shares of the work at which the stages end. The steps of the first are half as many as those
    # of the second, and do not propose again.
    _ENDS: Mapping[Stage, tuple[float, float]] = {"warm-up": (0.0, 0.2), "training": (0.2, 1.0)}

    def watch(self, report: Report) -> "_Watched":
        """Start the watch."""
        self.report = report
        self.seconds_per_step: list[float] = []
        self.num_skipped = 0
        return self

    def run_chunk(
        self,
        stage: Stage,
        rng_key: jax.Array,
        state: SemiTrainState,
        start: int,
        length: int,
        num_steps: int,
    ) -> tuple[SemiTrainState, SemiTrainInfo]:
        """As that of the trainer."""
        before = _num_updates(state)
        begin = time.perf_counter()
        chunk = super().run_chunk(stage, rng_key, state, start, length, num_steps)
        state, info = jax.block_until_ready(chunk)
        if stage == "training":
            self.seconds_per_step.append((time.perf_counter() - begin) / length)
            self.num_skipped += length - (_num_updates(state) - before)
            _check_skipped(self.num_skipped, start + length, num_steps)
        low, high = self._ENDS[stage]
        share = low + (high - low) * (start + length) / num_steps
        self.report(share, f"{stage}, step {start + length}")
        return state, info


def _num_updates(state: SemiTrainState) -> int:
    """Steps that were not skipped: only these are counted by the optimizer."""
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    return max(int(cast(Any, count)) for _, count in counts)


def _semi_rvrs(
    rng_key: jax.Array,
    dataset: Dataset,
    effort: Effort,
    report: Report,
    *,
    target_acceptance: float,
    num_proposals: int | None = None,
    gamma: bool = False,
) -> Measured:
    """Train as ``rvrs.fit`` does; the seconds of the training count its warm-up.

    With ``num_proposals`` per data point by Algorithm 3, else by Algorithm 2.
    """
    models = build(dataset, effort.batch_size)
    guide = AutoSemiRVRS(
        models.model,
        models.local_model,
        local.normals(models.global_model),
        models.gamma_guide if gamma else None,
        target_acceptance=target_acceptance,
        sampler="exact" if num_proposals is None else "budget",
        num_proposals=num_proposals,
        epsilon=1e-6,
        init_scale=0.5,
    )
    fit_key, evaluate_key = jax.random.split(rng_key)
    plain, params = semi_fitting.prepare(fit_key, guide, ((), {}), effort.batch_size, None)

    def train_for(num_steps: int, trainer: Trainer) -> semi_fitting.SemiRun:
        run = semi_fitting.first_run(fit_key, trainer.first_state(params))
        run = semi_fitting.warm_up(run, trainer, num_steps, progress=False)
        return semi_fitting.train(run, trainer, num_steps, False, None, None, {})

    report(0.0, "compiling")
    train_for(2, plain)  # compiles
    trainer = _Watched(*plain).watch(report)
    begin = time.perf_counter()
    run = jax.block_until_ready(train_for(effort.num_steps, trainer))
    seconds = time.perf_counter() - begin
    report(1.0, "evaluating")
    found = trainer.constrain(run.state.trainable)
    dropped = run.history.num_dropped[-trainer.data.per_epoch :].mean() / effort.batch_size
    evidence = guide.evaluate(
        evaluate_key, found, num_global=effort.global_draws, num_local=effort.local_proposals
    )
    return Measured(
        float(evidence.elbo),
        float(evidence.elbo_error),
        mean_degrees_of_freedom(found),
        float(np.median(trainer.seconds_per_step)),
        seconds,
        float(dropped),
        None if gamma else _shortfall(evaluate_key, dataset, guide, found),
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


LEAPFROGS = (8, 16, 32)
"""Steps of the dynamics of ``semi-dais-K``."""
BUDGETS = {0.5: (4, 6, 8, 12), 0.1: (20, 30, 40, 60)}
"""Proposals S' of Algorithm 3 by acceptance Z: from S / Z, with S = 2, to 3 S / Z. The paper's rule
of thumb is S / Z or 2 S / Z."""

METHODS: dict[str, Callable[[jax.Array, Dataset, Effort, Report], Measured]] = {
    "mean-field": partial(_by_svi, _mean_field, several_draws=True),
    **{
        f"semi-dais-{number}": partial(_by_svi, partial(_semi_dais, num_leapfrog=number))
        for number in LEAPFROGS
    },
    **{f"semi-rvrs-{z}": partial(_semi_rvrs, target_acceptance=z) for z in BUDGETS},
    **{
        f"semi-rvrs-{z}-gamma": partial(_semi_rvrs, target_acceptance=z, gamma=True)
        for z in BUDGETS
    },
    "oracle": partial(_by_svi, _oracle),
    **{
        f"optimum-{z}": partial(_by_svi, partial(_optimum, target_acceptance=z))
        for z in (1, *BUDGETS)
    },
    **{
        f"semi-rvrs-{z}-budget-{number}": partial(
            _semi_rvrs, target_acceptance=z, num_proposals=number
        )
        for z, budgets in BUDGETS.items()
        for number in budgets
    },
}
"""By name, functions that fit a data set; all are meant for double precision."""

KINDS = ("mean-field", "oracle", "semi-dais", "semi-rvrs", "optimum")
"""Kinds of methods, each with a number of steps of its own."""


def kind(method: str) -> str:
    """The kind of a method of :data:`METHODS`."""
    return next(name for name in KINDS if method.startswith(name))
