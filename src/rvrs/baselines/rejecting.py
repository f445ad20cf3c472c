"""RVRS, and VRS with its score-function gradient, as one of the methods."""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from numpyro.infer import Trace_ELBO

from rvrs import diagnostics, fitting
from rvrs.baselines import start as starts
from rvrs.baselines import svi
from rvrs.baselines.names import Method
from rvrs.baselines.start import Start
from rvrs.baselines.task import DivergedError, Fitted, Proposal, Report, Task
from rvrs.guides import AutoRVRS
from rvrs.result import Fit

# The paper's S and guardrail.
_NUM_SAMPLES, _EPSILON = 2, 1e-4


class Clock:
    """Reports how far :func:`rvrs.fit` is, and takes the time of its steps."""

    def __init__(self, num_steps: int, report: Report) -> None:
        self.num_steps, self.report = num_steps, report
        self.marks: list[tuple[int, float]] = []

    def callback(self, steps_done: int, info: Any) -> None:
        """That of a fit."""
        self.marks.append((steps_done, time.perf_counter()))
        self.report(steps_done / self.num_steps, f"ELBO {np.nanmean(info.elbo):.3f}")

    def seconds_per_step(self) -> float:
        """Compilation apart, as the first mark comes after it; NaN if there is no other."""
        if len(self.marks) < 2:
            return math.nan
        steps, seconds = np.diff(np.array(self.marks), axis=0).T
        return float(np.median(seconds / steps))


def fit_own(
    rng_key: jax.Array,
    method: Method,
    task: Task,
    *,
    num_steps: int,
    proposal: Proposal,
    num_evaluation_draws: int,
    callback: Callable[[int, Any], None],
) -> Fit:
    """Train by :func:`rvrs.fit`, all of whose choices are its own."""
    acceptance = cast(float, method.target_acceptance)
    options: dict[str, Any] = {"proposal": proposal, "target_acceptance": acceptance}
    if method.truncated or method.kind == "vrs":
        options = {
            "guide": AutoRVRS(
                task.model,
                proposal=proposal,
                target_acceptance=acceptance,
                epsilon=fitting.epsilon(acceptance),
                estimator="score" if method.kind == "vrs" else "reparameterized",
                model_gradient="truncated" if method.truncated else "unbiased",
            )
        }

    with warnings.catch_warnings():
        # They are kept in the fit.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        return fitting.fit(
            rng_key,
            task.model,
            num_steps=num_steps,
            num_evaluation_draws=num_evaluation_draws,
            progress=False,
            callback=callback,
            **options,
        )


def own(
    rng_key: jax.Array,
    name: str,
    method: Method,
    task: Task,
    *,
    num_steps: int,
    proposal: Proposal,
    num_evaluation_draws: int,
    report: Report,
) -> Fitted:
    """RVRS as :func:`rvrs.fit` trains it."""
    clock = Clock(num_steps, report)
    fit = fit_own(
        rng_key,
        method,
        task,
        num_steps=num_steps,
        proposal=proposal,
        num_evaluation_draws=num_evaluation_draws,
        callback=clock.callback,
    )
    details = {
        name: getattr(fit, name)
        for name in ("acceptance", "threshold", "khat", "ess", "num_draws", "log_evidence")
    }
    details |= {"log_evidence_error": fit.log_evidence_error, "warnings": list(fit.warnings)}
    return Fitted(
        method=name,
        elbo=fit.elbo,
        elbo_error=fit.elbo_error,
        seconds_per_step=clock.seconds_per_step(),
        params=fit.params,
        losses=fit.losses,
        details=details,
        draw=fit.sample,
    )


def as_in_the_paper(
    rng_key: jax.Array,
    name: str,
    method: Method,
    task: Task,
    start: Start,
    *,
    num_steps: int,
    proposal: Proposal,
    num_evaluation_draws: int,
    epsilon: float | None,
    report: Report,
) -> Fitted:
    """RVRS by stock SVI with the paper's rates, from a fit of its proposal."""
    acceptance = cast(float, method.target_acceptance)
    guide = AutoRVRS(
        task.model,
        proposal=proposal,
        target_acceptance=acceptance,
        num_samples=_NUM_SAMPLES,
        epsilon=0.0 if acceptance == 1 else _EPSILON if epsilon is None else epsilon,
        estimator="score" if method.kind == "vrs" else "reparameterized",
        baseline="leave_one_out",
        model_gradient="truncated" if method.truncated else "unbiased",
    )
    starts.prepared(guide)
    train_key, evaluate_key = jax.random.split(rng_key)
    trained = svi.train(
        train_key,
        task,
        svi.Approximation(guide, Trace_ELBO()),
        svi.optimizer(method.kind, "paper", num_steps, len(start.loc)),
        num_steps,
        start=starts.for_guide(guide, start),
        report=report,
    )
    evidence, log_ratio = guide.assess(evaluate_key, trained.params, num_draws=num_evaluation_draws)
    if not math.isfinite(float(evidence.elbo)):
        raise DivergedError(f"its ELBO is {float(evidence.elbo)}")
    smoothed = diagnostics.smooth(log_ratio)
    return Fitted(
        method=name,
        elbo=float(evidence.elbo),
        elbo_error=float(evidence.elbo_error),
        seconds_per_step=trained.seconds_per_step,
        params=trained.params,
        losses=trained.losses,
        details={
            "acceptance": math.exp(float(evidence.log_normalizer)),
            "threshold": float(evidence.threshold),
            "khat": smoothed.khat,
            "ess": smoothed.ess,
            "num_draws": len(log_ratio),
            "log_evidence": float(evidence.log_evidence),
            "log_evidence_error": float(evidence.log_evidence_error),
        },
        draw=lambda rng_key, num_samples: guide.sample_posterior(
            rng_key, trained.params, sample_shape=(num_samples,)
        ),
    )
