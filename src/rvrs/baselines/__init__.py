"""Methods of variational inference behind one interface, to compare them on the same task.

>>> import jax, numpyro
>>> import numpyro.distributions as dist
>>> from rvrs import baselines
>>> def model():
...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
...     numpyro.sample("y", dist.Normal(x, 1.0), obs=2.0)
>>> task = baselines.Task("conjugate", model)
>>> fitted = baselines.fit(jax.random.key(0), "iwae-4", task, num_steps=500)
>>> fitted.sample(jax.random.key(1), 100)["x"].shape
(100,)
"""

from typing import get_args

import jax

from rvrs.baselines import local, nuts, rejecting, svi
from rvrs.baselines import start as starts
from rvrs.baselines.names import KINDS as KINDS
from rvrs.baselines.names import LOCAL_KINDS as LOCAL_KINDS
from rvrs.baselines.names import Method as Method
from rvrs.baselines.names import parse as parse
from rvrs.baselines.task import DivergedError as DivergedError
from rvrs.baselines.task import Estimate as Estimate
from rvrs.baselines.task import Fitted as Fitted
from rvrs.baselines.task import LocalParts as LocalParts
from rvrs.baselines.task import Proposal, Report, silent
from rvrs.baselines.task import Task as Task
from rvrs.core.arguments import (
    check_callable,
    check_choice,
    check_count,
    check_epsilon,
    check_key,
    shown,
)

__all__ = [
    "KINDS",
    "LOCAL_KINDS",
    "DivergedError",
    "Estimate",
    "Fitted",
    "LocalParts",
    "Method",
    "Task",
    "fit",
    "parse",
]


def fit(
    rng_key: jax.Array,
    method: str,
    task: Task,
    *,
    num_steps: int,
    proposal: Proposal = "diagonal",
    num_evaluation_draws: int = 100_000,
    epsilon: float | None = None,
    num_warmup: int = 1_000,
    thinning: int = 1,
    report: Report = silent,
) -> Fitted:
    """Train a method on a task, and judge it by its own bound.

    >>> import jax, numpyro
    >>> import numpyro.distributions as dist
    >>> from rvrs import baselines
    >>> def model():
    ...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(x, 1.0), obs=2.0)
    >>> fitted = baselines.fit(
    ...     jax.random.key(0), "mvn", baselines.Task("conjugate", model), num_steps=500
    ... )
    >>> exact = -0.5 * 2.0**2 / 2 - 0.5 * jax.numpy.log(2 * jax.numpy.pi * 2)  # N(2; 0, 2)
    >>> bool(abs(fitted.elbo - exact) < 0.05)
    True

    Parameters
    ----------
    method
        One of :data:`KINDS`, as ``"mf"``, ``"iwae-24"`` or ``"rvrs-0.1@paper"``; for a task with
        local latents, one of :data:`LOCAL_KINDS` as well.
    num_steps
        Training steps; of NUTS, draws over all chains after the warm-up.
    proposal
        The normal distribution that IWAE, UHA, VRS and RVRS refine.
    num_evaluation_draws
        Draws that the bound is estimated from.
    epsilon
        Guardrail of RVRS and VRS with ``@paper``, by default 1e-4.
    num_warmup, thinning
        Of NUTS: steps of adaptation of each chain, and how many draws one is kept of.
    report
        Called now and then with the share of the work that is done and a few words.

    Raises
    ------
    DivergedError
        If more than one percent of the steps had no finite gradient, or the bound is not finite.
    """
    check_key("rng_key", rng_key)
    parsed = parse(method)
    if not isinstance(task, Task) or not callable(task.model):
        raise ValueError(f"task must be a Task with a model without arguments, got {shown(task)}.")
    check_count("num_steps", num_steps)
    check_count("num_evaluation_draws", num_evaluation_draws)
    check_count("num_warmup", num_warmup)
    check_count("thinning", thinning)
    if epsilon is not None:
        check_epsilon(epsilon)
    check_callable("report", report)
    check_choice("proposal", proposal, get_args(Proposal))
    if parsed.kind == "nuts":
        return nuts.fit(
            rng_key,
            method,
            task,
            num_steps=num_steps,
            num_warmup=num_warmup,
            thinning=thinning,
            report=report,
        )
    if local.handles(parsed, task):
        return local.fit(
            rng_key,
            method,
            parsed,
            task,
            num_steps=num_steps,
            num_evaluation_draws=num_evaluation_draws,
            report=report,
        )
    size = {"num_steps": num_steps, "num_evaluation_draws": num_evaluation_draws}
    start_key, train_key, judge_key = jax.random.split(rng_key, 3)
    if parsed.kind in ("rvrs", "vrs"):
        if parsed.schedule == "own":
            return rejecting.own(
                train_key, method, parsed, task, proposal=proposal, report=report, **size
            )
        start = _trained_normal(start_key, task, proposal, num_steps, report)
        return rejecting.as_in_the_paper(
            train_key,
            method,
            parsed,
            task,
            start,
            proposal=proposal,
            epsilon=epsilon,
            report=_second_half(report),
            **size,
        )
    # The method's own normal, or the one that it refines.
    fixed: dict[str, Proposal] = {"mf": "diagonal", "mvn": "mvn"}
    normal = fixed.get(parsed.kind, proposal)
    start = None
    if parsed.kind != "flow" and parsed.schedule == "own":
        report(0.0, "mode and curvature")
        start = starts.find(start_key, task, normal)
    elif parsed.kind == "uha":
        start = _trained_normal(start_key, task, proposal, num_steps, report)
        report = _second_half(report)
    found = svi.approximation(parsed, task.model, proposal)
    starts.prepared(found.guide)
    dimension = found.guide.latent_dim
    trained = svi.train(
        train_key,
        task,
        found,
        svi.optimizer(parsed.kind, parsed.schedule, num_steps, dimension),
        num_steps,
        start=None if start is None else svi.start_params(parsed, start),
        report=report,
    )
    report(1.0, "evaluating")
    judged = svi.bound(judge_key, task, found, trained.params, num_evaluation_draws)
    return svi.fitted(method, trained, judged, svi.sampler(task, found, trained.params))


def _trained_normal(
    rng_key: jax.Array, task: Task, proposal: Proposal, num_steps: int, report: Report
) -> starts.Start:
    """The paper's start: a normal trained by the ordinary ELBO, for as long as what follows."""
    method = parse("mf@paper" if proposal == "diagonal" else "mvn@paper")
    found = svi.approximation(method, task.model, proposal)
    starts.prepared(found.guide)
    optimizer = svi.optimizer(method.kind, "paper", num_steps, found.guide.latent_dim)
    trained = svi.train(
        rng_key,
        task,
        found,
        optimizer,
        num_steps,
        start=None,
        report=lambda share, words: report(share / 2, f"{method.kind}, {words}"),
    )
    return svi.of_params(trained.params, found.guide)


def _second_half(report: Report) -> Report:
    return lambda share, words: report(0.5 + share / 2, words)
