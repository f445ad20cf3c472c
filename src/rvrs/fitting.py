"""One call from a model to a fit: start well, warm up, train, evaluate."""

import math
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpyro import handlers

from rvrs import diagnostics, processes, proposals, semi_fitting, spread, storage
from rvrs import run as running
from rvrs.core import arguments as checks
from rvrs.core.problem import PRNGKey
from rvrs.guides import AutoRVRS, AutoSemiRVRS, _numpyro
from rvrs.guides._numpyro import Arguments
from rvrs.proposals import Proposal
from rvrs.proposals.given_flow import FlowjaxDistribution, is_flow
from rvrs.result import Fit
from rvrs.run import Run
from rvrs.semi_result import SemiFit

FULL_RANK_LIMIT = 100
"""``proposal="auto"`` is a full-rank normal up to this dimension."""
LOW_RANK_LIMIT = 2000
"""``proposal="auto"`` is a low-rank normal up to this dimension, diagonal beyond."""

NUM_STEPS = 10_000
"""Training steps by default."""
_TARGET_ACCEPTANCE = 0.1
_EVALUATION_DRAWS = 100_000
# Proposals of negligible acceptance are not worth keeping alive where T is well adapted.
_EPSILON = 1e-6


@overload
def fit(
    rng_key: PRNGKey, model: Callable, *model_args: Any, guide: AutoSemiRVRS, **options: Any
) -> SemiFit: ...
@overload
def fit(
    rng_key: PRNGKey,
    model: Callable,
    *model_args: Any,
    guide: AutoRVRS | None = None,
    **options: Any,
) -> Fit: ...
def fit(
    rng_key: PRNGKey,
    model: Callable,
    *model_args: Any,
    model_kwargs: dict[str, Any] | None = None,
    guide: AutoRVRS | AutoSemiRVRS | None = None,
    proposal: Proposal | FlowjaxDistribution | str = "auto",
    target_acceptance: float = _TARGET_ACCEPTANCE,
    num_steps: int = NUM_STEPS,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    num_evaluation_draws: int = _EVALUATION_DRAWS,
    progress: bool = True,
    callback: Callable[[int, Any], None] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    mesh: Mesh | None = None,
) -> Fit | SemiFit:
    """Fit a NumPyro model by reparameterized variational rejection sampling.

    Finds a start by mode and curvature, warms up by ordinary variational inference, calibrates T,
    trains with rejection and evaluates the result.

    >>> import jax, numpyro, rvrs
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     numpyro.sample("y", dist.Poisson(rate), obs=y)
    >>> y = jax.numpy.array([3, 1, 4, 1, 5])
    >>> fit = rvrs.fit(jax.random.key(0), model, y, num_steps=500, progress=False)
    >>> fit.sample(jax.random.key(1), 100)["rate"].shape
    (100,)

    Parameters
    ----------
    model, *model_args, model_kwargs
        The model and its arguments, data included.
    guide
        A ready :class:`rvrs.AutoRVRS` or, for local latents and minibatches,
        :class:`rvrs.AutoSemiRVRS` of the same model, which then decides on everything that it has
        settings for.
    proposal
        ``"auto"`` (a full-rank normal up to 100 dimensions, low-rank up to 2000, diagonal
        beyond), ``"diagonal"``, ``"mvn"``, ``"low_rank"``, a family of :mod:`rvrs.proposals`, or a
        flow of flowjax (see :func:`rvrs.proposals.from_flowjax`).
    target_acceptance
        The one knob: 1 is ordinary variational inference; the smaller, the closer to the
        posterior and the more proposals per draw (1 / Z).
    num_steps
        Training steps.
    batch_size
        With ``AutoSemiRVRS``: data points per step, by default as many as the model's plate has
        in one run. Pass all of the data: batches are drawn from it without replacement in every
        epoch. Where the model takes its rows as arguments these may be NumPy memory maps, of which
        only the rows of a batch are read.
    learning_rate
        With ``AutoSemiRVRS``: Adam's first rate, which falls along a cosine; by default 0.02 and
        for networks 0.001.
    num_evaluation_draws
        Draws that the ELBO is estimated from, each of which costs 1 / Z proposals. With
        ``AutoSemiRVRS`` use :meth:`rvrs.AutoSemiRVRS.evaluate` for another effort.
    progress
        Whether to show a progress bar with ELBO, acceptance and proposals per draw.
    callback
        Called as ``callback(steps_done, infos_of_latest_steps)`` every 500 steps (or fewer, if
        that many batches would take much memory).
    checkpoint
        A file that training is stored in as often, for ``resume``.
    resume
        A file that ``checkpoint`` or ``Fit.save`` wrote: training goes on from there, with the
        keys stored in it (``rng_key`` is not used), to the same result bit for bit as if it had
        never stopped.
    mesh
        A :class:`jax.sharding.Mesh` of one axis whose devices share the work, those of other
        processes (``jax.distributed``) among them: with ``AutoSemiRVRS`` the data points, of which
        every process passes its own; otherwise the proposals.

    Returns
    -------
    A :class:`rvrs.Fit`, or a :class:`rvrs.SemiFit`. Look at its ``warnings`` first.
    """
    began = time.perf_counter()
    arguments = (model_args, _checked_kwargs(model_kwargs))
    checks.check_key("rng_key", rng_key)
    checks.check_callable("model", model, _A_MODEL)
    _numpyro.check_signature(model, arguments, _THE_CALL)
    checks.check_target_acceptance(target_acceptance, epsilon=0)
    checks.check_count("num_steps", num_steps)
    checks.check_count("num_evaluation_draws", num_evaluation_draws)
    checks.check_reporting(progress, callback, checkpoint, resume)
    if proposal is None:
        raise ValueError('proposal must not be None; leave it out, or name one such as "mvn".')
    if guide is not None:
        _check_guide(guide, model, proposal, target_acceptance)
        target_acceptance = guide.settings.target_acceptance
    checks.check_block(num_evaluation_draws, target_acceptance, "num_evaluation_draws")
    mesh = None if mesh is None else spread.check(mesh)
    if isinstance(guide, AutoSemiRVRS):
        if num_evaluation_draws != _EVALUATION_DRAWS:
            raise ValueError(
                "num_evaluation_draws is not for AutoSemiRVRS; call fit.guide.evaluate(..., "
                "num_global=..., num_local=...)."
            )
        return semi_fitting.fit(
            rng_key,
            guide,
            arguments,
            batch_size=batch_size,
            num_steps=num_steps,
            learning_rate=learning_rate,
            progress=progress,
            callback=callback,
            checkpoint=checkpoint,
            resume=resume,
            mesh=mesh,
        )
    for option, value in {"batch_size": batch_size, "learning_rate": learning_rate}.items():
        if value is not None:
            raise ValueError(
                f"{option} is for models with local latents; pass guide=rvrs.AutoSemiRVRS(...), or "
                "leave it out."
            )
    # What the end needs is asked for at the beginning.
    diagnostics.arviz()
    if checkpoint is not None:
        storage.check_writable(checkpoint)
    guide, name = _guide(model, guide, proposal, target_acceptance, arguments)
    plan = {
        "proposal": name,
        "num_steps": num_steps,
        "num_evaluation_draws": num_evaluation_draws,
        "devices": 1 if mesh is None else mesh.devices.size,
        "settings": _settings(guide),
        "model": _describe_model(guide),
        "arguments": storage.describe_arguments(arguments),
    }
    if resume is None:
        given = name not in _WORDS
        run = running.start(rng_key, guide, arguments, given=given, progress=progress)
    else:
        stored = processes.read(Path(resume))
        storage.refuse_differences(resume, stored.header, plan)
        run = Run.from_checkpoint(stored, guide, arguments)
        checkpoint = resume if checkpoint is None else checkpoint
    several = mesh is not None and mesh.devices.size > 1
    steps = (num_steps, progress, callback, checkpoint, plan, mesh if several else None)
    run = running.train(run, guide, arguments, *steps)
    return _evaluate(run, guide, arguments, plan, name, began)


def load(
    path: str | PathLike[str],
    model: Callable,
    *model_args: Any,
    model_kwargs: dict[str, Any] | None = None,
    guide: AutoRVRS | AutoSemiRVRS | None = None,
    proposal: Proposal | FlowjaxDistribution | None = None,
) -> Fit | SemiFit:
    """Load what ``Fit.save`` stored; model and data must be those of the fit.

    >>> import os, tempfile
    >>> import jax, numpyro, rvrs
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     numpyro.sample("y", dist.Poisson(rate), obs=y)
    >>> y = jax.numpy.array([3, 1, 4, 1, 5])
    >>> fit = rvrs.fit(jax.random.key(0), model, y, num_steps=500, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "fit.npz")
    ...     fit.save(path)
    ...     rvrs.load(path, model, y).elbo == fit.elbo
    True

    Parameters
    ----------
    guide
        Needed where the fit was made with a guide of your own: one built alike.
    proposal
        Needed where the fit was made with a proposal of your own, such as a flow: one built alike.
    """
    arguments = (model_args, _checked_kwargs(model_kwargs))
    checks.check_file("path", path)
    checks.check_callable("model", model, _A_MODEL)
    _numpyro.check_signature(model, arguments, _THE_CALL)
    if guide is not None:
        _check_guide(guide, model, "auto", _TARGET_ACCEPTANCE)
    stored = storage.read(path)
    header = stored.header
    if "figures" not in header:
        raise ValueError(
            f"{path} holds a fit that is not finished; go on with "
            f"rvrs.fit(..., resume={str(path)!r})."
        )
    if (header.get("guide") == "AutoSemiRVRS") != isinstance(guide, AutoSemiRVRS):
        kind = header.get("guide", "AutoRVRS")
        raise ValueError(f"{path} holds a fit of rvrs.{kind}; pass a guide built alike.")
    if isinstance(guide, AutoSemiRVRS):
        return semi_fitting.load(path, stored, guide, arguments)
    name = header["proposal"]
    if guide is None and proposal is None and name not in _WORDS:
        wanted = "proposal" if name == _OWN else "guide"
        raise ValueError(
            f"{path} holds a fit with a {wanted} of your own; pass one built alike: "
            f"rvrs.load(..., {wanted}=...)."
        )
    if proposal is not None and (guide is not None or name != _OWN):
        raise ValueError(
            f"{path} holds a fit with the proposal {name!r}; leave proposal out."
            if guide is None
            else "proposal: the guide has one already; leave proposal out, or the guide."
        )
    settings = header["settings"]
    given = name if proposal is None else proposal
    guide, _ = _guide(model, guide, given, settings["target_acceptance"], arguments)
    present = {
        "settings": _settings(guide),
        "model": _describe_model(guide),
        "arguments": storage.describe_arguments(arguments),
    }
    storage.refuse_differences(path, header, present)
    run = Run.from_checkpoint(stored, guide, arguments)
    return _result(run, guide, arguments, name, header)


_WORDS = ("diagonal", "mvn", "low_rank")
# What the proposal of a fit is called if it was given as an object.
_OWN = "a proposal of your own"
_A_MODEL = "a NumPyro model (a function; for PyMC models there is rvrs.pymc.fit)"
_THE_CALL = (
    "model cannot be called with model_args and model_kwargs, the data that follow it as in "
    "rvrs.fit(rng_key, model, x, y)"
)


def _checked_kwargs(model_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    if model_kwargs is None:
        return {}
    if not isinstance(model_kwargs, dict) or not all(isinstance(n, str) for n in model_kwargs):
        raise ValueError(
            "model_kwargs must be a dict of the model's keyword arguments, got "
            f"{checks.shown(model_kwargs)}."
        )
    return model_kwargs


def _check_guide(guide: Any, model: Any, proposal: Any, target_acceptance: Any) -> None:
    if not isinstance(guide, AutoRVRS | AutoSemiRVRS):
        raise ValueError(
            f"guide must be a rvrs.AutoRVRS or AutoSemiRVRS, got {type(guide).__name__}; other "
            "autoguides can be proposals: rvrs.AutoRVRS(model, proposal=guide)."
        )
    if guide.model is not model:
        raise ValueError(
            "guide was built for another model; build it from the model that is passed here."
        )
    if not isinstance(proposal, str) or proposal != "auto":
        raise ValueError("proposal: the guide has one already; leave proposal out, or the guide.")
    if target_acceptance not in (_TARGET_ACCEPTANCE, guide.settings.target_acceptance):
        raise ValueError(
            f"target_acceptance={target_acceptance!r} is not that of the guide "
            f"({guide.settings.target_acceptance}); set it there."
        )


def _guide(
    model: Callable,
    guide: AutoRVRS | None,
    proposal: Proposal | FlowjaxDistribution | str,
    target_acceptance: float,
    arguments: Arguments,
) -> tuple[AutoRVRS, str]:
    """The guide to train, its prototype set up, and what its proposal is called."""
    if guide is not None:
        _setup(guide, arguments)
        return guide, f"that of {type(guide).__name__}"
    if is_flow(proposal):
        # It has no hash to be known again by; its family has.
        proposal = proposals.from_flowjax(proposal)
    leaves, structure = jax.tree.flatten(arguments)
    like = tuple(
        (leaf.shape, str(leaf.dtype)) if isinstance(leaf, jax.Array | np.ndarray) else leaf
        for leaf in leaves
    )
    first = "mvn" if isinstance(proposal, str) and proposal == "auto" else proposal
    guide = _known_guide(model, first, target_acceptance, structure, like)
    _setup(guide, arguments)
    if isinstance(proposal, str) and proposal == "auto" and guide.latent_dim > FULL_RANK_LIMIT:
        first = "low_rank" if guide.latent_dim <= LOW_RANK_LIMIT else "diagonal"
        guide = _known_guide(model, first, target_acceptance, structure, like)
        _setup(guide, arguments)
    return guide, first if isinstance(first, str) else _OWN


def _known_guide(
    model: Callable,
    proposal: Proposal | FlowjaxDistribution | str,
    target_acceptance: float,
    structure: Any,
    like: Any,
) -> AutoRVRS:
    """The same guide for fits that differ in the values of arrays only: its programs are kept."""
    try:
        return _cached_guide(
            model,
            proposal,
            target_acceptance,
            structure,
            like,
            jax.dtypes.canonicalize_dtype(float),
        )
    except TypeError:  # an argument without a hash
        return _cached_guide.__wrapped__(model, proposal, target_acceptance)


@lru_cache(maxsize=16)
def _cached_guide(
    model: Callable,
    proposal: Proposal | FlowjaxDistribution | str,
    target_acceptance: float,
    *_: Any,
) -> AutoRVRS:
    return AutoRVRS(
        model,
        proposal=proposal,
        target_acceptance=target_acceptance,
        epsilon=epsilon(target_acceptance),
    )


def epsilon(target_acceptance: float) -> float:
    """The guardrail of fits to an acceptance."""
    checks.check_target_acceptance(target_acceptance, epsilon=0)
    # Where everything is accepted there is nothing to guard, and a tiny acceptance has to remain
    # far above the guardrail.
    return 0.0 if target_acceptance == 1 else min(_EPSILON, target_acceptance / 1000)


def _setup(guide: AutoRVRS, arguments: Arguments) -> None:
    if guide.prototype_trace is None:
        with handlers.block(), handlers.seed(rng_seed=0):
            guide._setup_prototype(*arguments[0], **arguments[1])


def _settings(guide: AutoRVRS) -> dict[str, Any]:
    names = ("target_acceptance", "num_samples", "epsilon", "threshold", "estimator")
    names += ("model_gradient", "max_proposals")
    return {name: getattr(guide.settings, name) for name in names} | {"prefix": guide.prefix}


def _describe_model(guide: AutoRVRS) -> dict[str, Any]:
    sites = guide._unpack_latent(guide._init_latent)
    described = {f"latent site {n}": str(jnp.shape(value)) for n, value in sites.items()}
    return described | {
        f"parameter {name}": str(jax.tree.map(jnp.shape, site["value"]))
        for name, site in guide.prototype_trace.items()
        if site["type"] == "param"
    }


def _evaluate(
    run: Run,
    guide: AutoRVRS,
    arguments: Arguments,
    plan: dict[str, Any],
    name: str,
    began: float,
) -> Fit:
    settings, (args, kwargs) = guide.settings, arguments
    params = running.params(run, guide)
    evidence, log_ratio = guide.assess(
        run.rng_key, params, *args, num_draws=plan["num_evaluation_draws"], **kwargs
    )
    smoothed = diagnostics.smooth(log_ratio)
    acceptance = math.exp(float(evidence.log_normalizer))
    figures = {
        "elbo": float(evidence.elbo),
        "elbo_error": float(evidence.elbo_error),
        "log_evidence": float(evidence.log_evidence),
        "log_evidence_error": float(evidence.log_evidence_error),
        "acceptance": acceptance,
        "threshold": float(evidence.threshold),
        "khat": smoothed.khat,
        "ess": smoothed.ess,
        "num_draws": len(log_ratio),
        "warnings": diagnostics.concerns(
            khat=smoothed.khat,
            acceptance=acceptance,
            target_acceptance=settings.target_acceptance if settings.threshold is None else None,
            num_capped=int(run.history.capped.sum()),
            num_without_gradient=int((run.history.skipped & ~run.history.capped).sum()),
            num_steps=run.steps_done,
            missing_evidence=float(evidence.log_evidence - evidence.elbo),
        ),
        "seconds": time.perf_counter() - began,
    }
    for concern in figures["warnings"]:
        warnings.warn(concern, stacklevel=3)
    header = plan | {"figures": figures}
    return _result(run, guide, arguments, name, header)


def _result(
    run: Run, guide: AutoRVRS, arguments: Arguments, name: str, header: dict[str, Any]
) -> Fit:
    history = run.history
    return Fit(
        guide=guide,
        params=running.params(run, guide),
        losses=np.asarray(-history.elbo),
        acceptances=np.asarray(history.acceptance),
        thresholds=np.asarray(history.threshold),
        proposals_per_draw=np.asarray(history.num_proposals) / guide.settings.num_samples,
        proposal_name=name,
        arguments=arguments,
        checkpoint=run.to_checkpoint(header),
        **header["figures"] | {"warnings": tuple(header["figures"]["warnings"])},
    )
