"""Methods for models with a latent variable for every data point.

Global latents get independent normals in all of them. ``mf`` gives such normals to the local ones
too, ``iwae-K`` weighs draws of them (one by one, if there are no global latents), ``semi-dais-K``
improves on them by annealed dynamics and ``semi-rvrs-Z`` by rejection. ``oracle`` has no local
latents: they are integrated out, which no other method can exceed.
"""

import warnings
from typing import Any

import jax
from numpyro.infer import RenyiELBO, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoNormal, AutoSemiDAIS

from rvrs import fitting
from rvrs.baselines import rejecting, svi
from rvrs.baselines import start as starts
from rvrs.baselines.names import LOCAL_KINDS, Method
from rvrs.baselines.task import Fitted, LocalParts, Report, Task
from rvrs.guides import AutoSemiRVRS

# The standard deviation that local proposals start with.
_LOCAL_SCALE = 0.5
# One dynamics for all data points: if each has its own, which is NumPyro's default, some diverge.
_DYNAMICS: dict[str, Any] = {"eta_init": 0.05, "eta_max": 0.25, "use_global_dais_params": True}


def handles(method: Method, task: Task) -> bool:
    """Whether a method is one of this module's; ValueError if the task lacks what it needs."""
    parts = task.local
    if method.kind in ("mf", "iwae"):
        return parts is not None
    if method.kind not in _KINDS:
        return False
    if parts is None:
        raise ValueError(
            f"{', '.join(LOCAL_KINDS)} need a task with local=LocalParts(...), as a model does not "
            "tell where its local latents begin."
        )
    if method.kind == "semi-rvrs" and (method.truncated or method.schedule == "paper"):
        raise ValueError(
            "semi-rvrs-Z is trained as rvrs.fit does, with the unbiased gradient; leave out "
            "-truncated and @paper."
        )
    if method.kind == "oracle" and parts.marginal is None:
        raise ValueError(
            "oracle needs a task whose LocalParts have marginal=, the model with its local latents "
            "integrated out."
        )
    return True


_KINDS = ("oracle", "semi-dais", "semi-rvrs")


def normals(model: Any) -> AutoNormal:
    """Independent normals for all latents of a model, in their plates."""
    return AutoNormal(model, init_loc_fn=init_to_median)


def semi_dais(model: Any, parts: LocalParts, num_leapfrog: int, **options: Any) -> AutoSemiDAIS:
    """NumPyro's guide; ``options`` are its own, beyond the dynamics."""
    return AutoSemiDAIS(
        model,
        parts.local_model,
        normals(parts.global_model),
        K=num_leapfrog,
        init_scale=_LOCAL_SCALE,
        **(_DYNAMICS | options),
    )


def _approximation(method: Method, task: Task, parts: LocalParts) -> svi.Approximation:
    count: Any = method.number
    match method.kind:
        case "iwae":
            loss = RenyiELBO(alpha=0, num_particles=count)
            return svi.Approximation(normals(task.model), loss, count)
        case "semi-dais":
            return svi.Approximation(semi_dais(task.model, parts, count), Trace_ELBO())
        case "oracle":
            return svi.Approximation(normals(parts.marginal), Trace_ELBO())
    return svi.Approximation(normals(task.model), Trace_ELBO())


def fit(
    rng_key: jax.Array,
    name: str,
    method: Method,
    task: Task,
    *,
    num_steps: int,
    num_evaluation_draws: int,
    report: Report,
) -> Fitted:
    """Train and judge a method; semi-RVRS by :func:`rvrs.fit`, all others by stock SVI."""
    parts: Any = task.local
    if method.kind == "semi-rvrs":
        return _semi_rvrs(rng_key, name, method, task, parts, num_steps=num_steps, report=report)
    if method.kind == "oracle":
        task = Task(task.name, parts.marginal)
    found = _approximation(method, task, parts)
    train_key, judge_key = jax.random.split(rng_key)
    starts.prepared(found.guide)
    trained = svi.train(
        train_key,
        task,
        found,
        svi.optimizer(method.kind, method.schedule, num_steps, dimension=1),
        num_steps,
        start=None,
        report=report,
    )
    report(1.0, "evaluating")
    judged = svi.bound(judge_key, task, found, trained.params, num_evaluation_draws)

    def draw(rng_key: jax.Array, num_samples: int) -> dict[str, jax.Array]:
        shape = {"sample_shape": (num_samples,)}
        return found.guide.sample_posterior(rng_key, trained.params, **shape)

    return svi.fitted(name, trained, judged, draw)


def _semi_rvrs(
    rng_key: jax.Array,
    name: str,
    method: Method,
    task: Task,
    parts: LocalParts,
    *,
    num_steps: int,
    report: Report,
) -> Fitted:
    acceptance: Any = method.target_acceptance
    guide = AutoSemiRVRS(
        task.model,
        parts.local_model,
        normals(parts.global_model),
        target_acceptance=acceptance,
        epsilon=fitting.epsilon(acceptance),
        init_scale=_LOCAL_SCALE,
    )
    clock = rejecting.Clock(num_steps, report)
    with warnings.catch_warnings():
        # They are kept in the fit.
        warnings.simplefilter("ignore", UserWarning)
        found: Any = fitting.fit(
            rng_key,
            task.model,
            guide=guide,
            num_steps=num_steps,
            progress=False,
            callback=clock.callback,
        )
    return Fitted(
        method=name,
        elbo=found.elbo,
        elbo_error=found.elbo_error,
        seconds_per_step=clock.seconds_per_step(),
        params=found.params,
        losses=found.losses,
        details={
            "acceptance": found.acceptance,
            "elbo_bias": found.elbo_bias,
            "marginal_elbo": found.marginal_elbo,
            "marginal_elbo_error": found.marginal_elbo_error,
            "warnings": list(found.warnings),
        },
        draw=found.sample,
    )
