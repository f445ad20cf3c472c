"""The normal distribution that a method starts from, whoever found it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import handlers

from rvrs import run as running
from rvrs.baselines.task import Proposal, Task
from rvrs.guides import AutoRVRS


class Start(NamedTuple):
    """A normal distribution over the flat unconstrained latents, and the model's parameters."""

    loc: jax.Array
    scale: jax.Array
    """``(d,)`` standard deviations, or a ``(d, d)`` Cholesky factor."""
    model: dict[str, Any]
    """Values of the model's ``numpyro.param`` sites."""


def find(rng_key: jax.Array, task: Task, proposal: Proposal) -> Start:
    """What :func:`rvrs.fit` starts from: mode and curvature, and a warm-up without rejection."""
    guide = prepared(AutoRVRS(task.model, proposal=proposal, target_acceptance=1.0, epsilon=0.0))
    run = running.start(rng_key, guide, ((), {}), given=False, progress=False)
    return of_guide(guide, running.params(run, guide))


def prepared(guide: Any) -> Any:
    """The guide, knowing its model's structure."""
    with handlers.block(), handlers.seed(rng_seed=0):
        guide._setup_prototype()
    return guide


def of_guide(guide: AutoRVRS, params: dict[str, Any]) -> Start:
    """The proposal of a guide."""
    parameters, theta = guide.split(params)
    _, loc, scale = guide.proposal.family.standardize(parameters)
    return Start(loc, scale, theta)


def for_guide(guide: AutoRVRS, start: Start) -> dict[str, Any]:
    """The parameters of a guide whose proposal is that normal."""
    family = guide.proposal.family
    standard = family.init(jnp.zeros_like(start.loc), 1.0)
    found = family.push_forward(standard, start.loc, start.scale)
    return guide.proposal.sites(found) | start.model
