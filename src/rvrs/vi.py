"""RVRS for any log density, in BlackJAX's shape: ``init``, ``step``, ``sample``.

>>> import jax, optax, rvrs
>>> algorithm = rvrs.vi.as_top_level_api(
...     lambda z: -0.5 * (z**4).sum(), optax.adam(1e-2), target_acceptance=0.2
... )
>>> state = algorithm.init(jax.numpy.zeros(2))
>>> state, info = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps=500)
>>> algorithm.sample(jax.random.key(1), state, 1000).shape
(1000, 2)
"""

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree

from rvrs import engine, loop
from rvrs.core import arguments, rejection
from rvrs.core.evidence import Evidence
from rvrs.core.objectives import Baseline, Estimator, elbo_surrogate
from rvrs.core.problem import PRNGKey, Problem, PyTree, Targets
from rvrs.core.threshold import Rule, ThresholdState
from rvrs.loop import VIAlgorithm as VIAlgorithm
from rvrs.loop import run as run
from rvrs.proposals import Proposal
from rvrs.proposals.given_flow import FlowjaxDistribution
from rvrs.settings import (
    FamilySettings,
    LogDensity,
    check_density,
    default_max_proposals,
    named_proposal,
)

__all__ = [
    "Evidence",
    "RVRSInfo",
    "RVRSState",
    "VIAlgorithm",
    "as_top_level_api",
    "evaluate",
    "init",
    "run",
    "sample",
    "step",
]


class RVRSState(NamedTuple):
    """Everything that changes while training.

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> state = algorithm.init(jax.numpy.zeros(2))
    >>> state.parameters.loc.shape
    (2,)
    """

    parameters: Any
    """Parameters of the proposal, over the flattened position."""
    opt_state: optax.OptState
    threshold: ThresholdState
    position: PyTree
    """The position that training started from; it tells how to unflatten a draw."""


class RVRSInfo(NamedTuple):
    """What one step tells about itself.

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> state = algorithm.init(jax.numpy.zeros(2))
    >>> _, info = jax.jit(algorithm.step)(jax.random.key(0), state)
    >>> bool(info.capped)
    False
    """

    elbo: jax.Array
    """An unbiased estimate of the ELBO at the parameters before the step; NaN if capped."""
    acceptance: jax.Array
    """Mean acceptance probability of the step's proposals."""
    threshold: jax.Array
    """T that the step used."""
    num_proposals: jax.Array
    capped: jax.Array
    """Whether ``max_proposals`` was hit."""
    skipped: jax.Array
    """Whether the step moved T but not the proposal: it was capped, or the density has no finite
    gradient at its draws."""


def as_top_level_api(
    logdensity_fn: LogDensity,
    optimizer: optax.GradientTransformation,
    *,
    proposal: Proposal | FlowjaxDistribution | str = "diagonal",
    target_acceptance: float = 0.1,
    num_samples: int = 2,
    epsilon: float = 1e-4,
    threshold: float | None = None,
    estimator: Estimator = "reparameterized",
    baseline: Baseline = "running",
    threshold_rule: Rule = "tracking",
    max_proposals: int | None = None,
    init_scale: float = 0.1,
) -> VIAlgorithm:
    """Reparameterized variational rejection sampling of an unnormalised log density.

    >>> import jax, optax, rvrs
    >>> def log_density(z):  # of any pytree
    ...     return -0.5 * z["x"] ** 2 - 2.0 * (z["y"] - z["x"] ** 2) ** 2
    >>> algorithm = rvrs.vi.as_top_level_api(log_density, optax.adam(1e-2), proposal="mvn")
    >>> state = algorithm.init({"x": jax.numpy.array(0.0), "y": jax.numpy.array(0.0)})
    >>> state, info = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps=100)
    >>> info.elbo.shape
    (100,)

    Parameters
    ----------
    logdensity_fn
        Log density of the target at a position (any pytree of floating-point arrays).
    optimizer
        Optax optimizer of the proposal's parameters.
    proposal
        ``"diagonal"``, ``"mvn"``, a family of :mod:`rvrs.proposals`, or a flow of flowjax (see
        :func:`rvrs.proposals.from_flowjax`).
    target_acceptance
        The acceptance probability Z that T is adapted to: 1 is ordinary variational inference;
        the smaller, the closer to the target and the more proposals per draw (1 / Z).
    num_samples
        Accepted draws per step (S), on average and at most.
    epsilon
        Guardrail: the least acceptance probability of any proposal.
    threshold
        None adapts T; a number fixes it, and ``target_acceptance`` then only sizes blocks.
    estimator
        ``"reparameterized"``, or ``"score"`` for the higher-variance estimator of VRS.
    baseline
        ``"running"`` centres the gradient by a running mean over all proposals, so that a step
        does with a single draw where its proposals hold no more; ``"leave_one_out"`` by the other
        draws of the step, all S >= 2 of which it then waits for, for an estimate that is unbiased
        whatever came before, and noisier.
    threshold_rule
        ``"tracking"``, or ``"sgd"`` for the paper's rule.
    max_proposals
        Bound on the proposals of one step, by default 50 times what is needed on average.
    init_scale
        Standard deviation of the initial proposal in every coordinate.

    Returns
    -------
    A :class:`VIAlgorithm`. Its ``step`` is pure and made for ``jit`` and ``scan``.
    """
    arguments.check_callable("logdensity_fn", logdensity_fn, "a function of a position")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"optimizer must be an optax optimizer, got {arguments.shown(optimizer)}; use e.g. "
            "optax.adam(1e-2)."
        )
    try:
        hash(logdensity_fn)
    except TypeError:
        # As of a method of a dataclass. Programs are found again by the functions that they are
        # made of; a partial is told from others by its identity.
        logdensity_fn = partial(logdensity_fn)
    settings = FamilySettings(
        proposal=named_proposal(proposal),
        target_acceptance=target_acceptance,
        num_samples=num_samples,
        epsilon=epsilon,
        threshold=threshold,
        estimator=estimator,
        baseline=baseline,
        threshold_rule=threshold_rule,
        max_proposals=default_max_proposals(max_proposals, num_samples, target_acceptance),
        init_scale=init_scale,
    )
    return VIAlgorithm(
        partial(init, logdensity_fn=logdensity_fn, optimizer=optimizer, settings=settings),
        partial(step, logdensity_fn=logdensity_fn, optimizer=optimizer, settings=settings),
        partial(sample, logdensity_fn=logdensity_fn, settings=settings),
        partial(evaluate, logdensity_fn=logdensity_fn, settings=settings),
    )


def init(
    position: PyTree,
    *,
    logdensity_fn: LogDensity,
    optimizer: optax.GradientTransformation,
    settings: FamilySettings,
) -> RVRSState:
    """The state at a proposal around ``position``, with T calibrated to it.

    As ``algorithm.init(position)``:

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> state = algorithm.init(jax.numpy.zeros(3))
    """
    check_density(logdensity_fn, position)
    position = jax.tree.map(jnp.asarray, position)
    location, _ = ravel_pytree(position)
    parameters = settings.proposal.init(location, settings.init_scale)
    opt_state = optimizer.init(parameters)
    # T is a function of the parameters; any key serves to compute it.
    lw = _calibration_weights(jax.random.key(0), parameters, position, logdensity_fn, settings)
    followed = engine.first_threshold(lw, settings)
    return RVRSState(parameters, opt_state, followed, position)


def step(
    rng_key: PRNGKey,
    state: RVRSState,
    *,
    logdensity_fn: LogDensity,
    optimizer: optax.GradientTransformation,
    settings: FamilySettings,
) -> tuple[RVRSState, RVRSInfo]:
    """One gradient step of the proposal and one of T.

    As ``algorithm.step(rng_key, state)``:

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> state = algorithm.init(jax.numpy.zeros(3))
    >>> state, info = jax.jit(algorithm.step)(jax.random.key(0), state)
    """
    arguments.check_key("rng_key", rng_key)
    _check_state(state, settings, optimizer)
    problem = _problem(logdensity_fn, state.parameters, state.position, settings)
    t = state.threshold.value
    draws = rejection.draw_exact(
        rng_key,
        problem,
        _targets(state.parameters),
        t,
        num_samples=settings.num_samples,
        min_samples=settings.min_samples,
        epsilon=settings.epsilon,
        block_size=settings.block_size,
        max_proposals=settings.max_proposals,
    )

    def loss(parameters: Any) -> tuple[jax.Array, Any]:
        objective = elbo_surrogate(
            problem,
            _targets(parameters),
            draws,
            t,
            epsilon=settings.epsilon,
            estimator=settings.estimator,
            **engine.centring(state.threshold, settings),
        )
        return -objective.surrogate[0], objective

    gradient, objective = jax.grad(loss, has_aux=True)(state.parameters)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)

    complete = draws.complete[0]
    # A step without its draws, or with a density that has no finite gradient there, is skipped.
    useful = complete & loop.all_finite(gradient)
    parameters, opt_state = jax.tree.map(
        lambda new, old: jnp.where(useful, new, old),
        (parameters, opt_state),
        (state.parameters, state.opt_state),
    )
    tally = draws.tally
    info = RVRSInfo(
        elbo=jnp.where(complete, objective.elbo[0], jnp.nan),
        acceptance=tally.acceptance[0] / tally.num_proposals[0].astype(t.dtype),
        threshold=t[0],
        num_proposals=tally.num_proposals[0],
        capped=~complete,
        skipped=~useful,
    )
    followed = engine.follow(state.threshold, tally, settings, settings.block_size)
    return RVRSState(parameters, opt_state, followed, state.position), info


def sample(
    rng_key: PRNGKey,
    state: RVRSState,
    num_samples: int = 1,
    *,
    logdensity_fn: LogDensity,
    settings: FamilySettings,
) -> PyTree:
    """``num_samples`` independent draws from ``r``; T is recalibrated from the parameters.

    Draws are made in chunks, so memory beyond the result does not grow with their number. Where
    ``max_proposals`` was hit the draws are NaN, and a warning says so outside of ``jit``.

    As ``algorithm.sample(rng_key, state, num_samples)``:

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> algorithm.sample(jax.random.key(0), algorithm.init(jax.numpy.zeros(3)), 10).shape
    (10, 3)
    """
    arguments.check_key("rng_key", rng_key)
    _check_state(state, settings)
    arguments.check_count("num_samples", num_samples)
    positions, complete = _sample(rng_key, state, logdensity_fn, settings, num_samples)
    if not isinstance(complete, Tracer) and not bool(jnp.all(complete)):
        warnings.warn(
            f"{int(jnp.sum(~complete))} of {num_samples} draws are NaN: max_proposals was hit. The "
            "density may be non-finite over most of the proposal; check it, or raise "
            "max_proposals.",
            stacklevel=2,
        )
    return positions


def evaluate(
    rng_key: PRNGKey,
    state: RVRSState,
    num_proposals: int = 100_000,
    *,
    logdensity_fn: LogDensity,
    settings: FamilySettings,
) -> Evidence:
    """ELBO, log Z and log evidence with standard errors; T is recalibrated from the parameters.

    As ``algorithm.evaluate(rng_key, state, num_proposals)``:

    >>> import jax, optax, rvrs
    >>> algorithm = rvrs.vi.as_top_level_api(lambda z: -0.5 * (z**2).sum(), optax.adam(1e-2))
    >>> quality = algorithm.evaluate(jax.random.key(0), algorithm.init(jax.numpy.zeros(3)))
    >>> bool(quality.elbo <= quality.log_evidence)
    True
    """
    arguments.check_key("rng_key", rng_key)
    _check_state(state, settings)
    arguments.check_count("num_proposals", num_proposals)
    return _evaluate(rng_key, state, logdensity_fn, settings, num_proposals)


def _check_state(
    state: Any, settings: FamilySettings, optimizer: optax.GradientTransformation | None = None
) -> None:
    """Refuse what ``init`` of these settings, and of this optimizer, does not return."""
    if not isinstance(state, RVRSState):
        raise ValueError(
            f"state must be what init, step or run returned, got a {type(state).__name__}."
        )
    arguments.check_floats("state.position", state.position)
    location = jax.eval_shape(lambda position: ravel_pytree(position)[0], state.position)
    initial = jax.eval_shape(lambda at: settings.proposal.init(at, settings.init_scale), location)
    parts = {"parameters": (state.parameters, initial)}
    if optimizer is not None:
        parts["opt_state"] = (state.opt_state, jax.eval_shape(optimizer.init, initial))
    for name, (given, wanted) in parts.items():
        advice = "It is of another algorithm; pass a state that init of this one returned"
        arguments.check_like(f"state.{name}", given, wanted, advice)


@partial(jax.jit, static_argnames=("logdensity_fn", "settings", "num_samples"))
def _sample(
    rng_key: PRNGKey,
    state: RVRSState,
    logdensity_fn: LogDensity,
    settings: FamilySettings,
    num_samples: int,
) -> tuple[PyTree, jax.Array]:
    calibration_key, draw_key = jax.random.split(rng_key)
    problem = _problem(logdensity_fn, state.parameters, state.position, settings)
    targets = _targets(state.parameters)
    t = engine.calibrate(calibration_key, problem, targets, settings)
    unravel = ravel_pytree(state.position)[1]

    def positions(noise: PyTree, _: jax.Array, complete: jax.Array) -> tuple[PyTree, jax.Array]:
        noise, complete = jax.tree.map(lambda leaf: leaf[:, 0], (noise, complete))
        flat, _ = jax.vmap(problem.propose, in_axes=(None, 0))(state.parameters, noise)
        return jax.vmap(unravel)(jnp.where(complete[:, None], flat, jnp.nan)), complete

    return engine.draw(draw_key, problem, targets, t, settings, num_samples, positions)


@partial(jax.jit, static_argnames=("logdensity_fn", "settings", "num_proposals"))
def _evaluate(
    rng_key: PRNGKey,
    state: RVRSState,
    logdensity_fn: LogDensity,
    settings: FamilySettings,
    num_proposals: int,
) -> Evidence:
    calibration_key, proposal_key = jax.random.split(rng_key)
    problem = _problem(logdensity_fn, state.parameters, state.position, settings)
    targets = _targets(state.parameters)
    t = engine.calibrate(calibration_key, problem, targets, settings)
    estimates = engine.evaluate(proposal_key, problem, targets, t, settings, num_proposals)
    return jax.tree.map(lambda leaf: leaf[0], estimates)


@partial(jax.jit, static_argnames=("logdensity_fn", "settings"))
def _calibration_weights(
    rng_key: PRNGKey,
    parameters: Any,
    position: PyTree,
    logdensity_fn: LogDensity,
    settings: FamilySettings,
) -> jax.Array:
    problem = _problem(logdensity_fn, parameters, position, settings)
    return engine.calibration_weights(rng_key, problem, _targets(parameters), settings)


def _problem(
    logdensity_fn: LogDensity, parameters: Any, position: PyTree, settings: FamilySettings
) -> Problem:
    _, unravel = ravel_pytree(position)
    proposal = settings.proposal
    return Problem(
        sample_noise=lambda key, shape: proposal.sample_noise(key, shape, parameters),
        propose=proposal.propose,
        log_proposal=proposal.log_density,
        log_joint=lambda model, data, z: logdensity_fn(unravel(z)),
    )


def _targets(parameters: Any) -> Targets:
    """One target: B = 1."""
    return Targets(jax.tree.map(lambda leaf: leaf[None], parameters))
