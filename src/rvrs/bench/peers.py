"""Variational inference of other libraries behind one shape: NumPyro's SVI, and BlackJAX.

A method is trained by steps of Adam and judged by the bound that it
maximises itself: the ELBO of a guide, that of annealed importance sampling (AutoDAIS), or the
K-sample bound (IWAE).
"""

import math
import re
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, autoguide

from rvrs.bench.timing import Contestant
from rvrs.bench.works import Work
from rvrs.core.arguments import check_choice, check_count

SVI_NAMES = (
    *("AutoDiagonalNormal", "AutoMultivariateNormal", "AutoBNAFNormal"),
    *("AutoDAIS-K", "IWAE-K"),
)
"""Methods of NumPyro's SVI; K is a whole number, as in ``"AutoDAIS-24"``."""
BLACKJAX_NAMES = ("meanfield_vi", "fullrank_vi")
"""Methods of BlackJAX."""

# BlackJAX has no state to start from but the one that it makes itself, and 5 draws per step by
# default; NumPyro has one draw per step (IWAE: K).
_BLACKJAX_DRAWS = 5
_STEP_RATE = 1e-3
# Estimates of a bound that are computed at once, and in one call.
_ESTIMATES_AT_ONCE = 250
_ESTIMATES_PER_CALL = 2_000

_COMPILE_IN_A_HURRY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

State = Any
Parameters = Any


def svi_steps(guide_name: str, work: Work, num_steps: int) -> Contestant:
    """``num_steps`` updates of NumPyro's SVI, one of :data:`SVI_NAMES`, from one initial state."""
    return _steps(_svi(guide_name, work, optax.adam(_STEP_RATE)), num_steps)


def blackjax_steps(
    name: Literal["meanfield_vi", "fullrank_vi"], work: Work, num_steps: int
) -> Contestant:
    """``num_steps`` steps of one of :data:`BLACKJAX_NAMES` from one initial state."""
    return _steps(_blackjax(name, work, optax.adam(_STEP_RATE)), num_steps)


class Estimate(NamedTuple):
    """An average and its Monte Carlo standard error."""

    value: float
    error: float


class Trainer:
    """A method in training; one program serves all lengths and rates.

    >>> from rvrs.bench import works
    >>> peer = trainer("AutoDiagonalNormal", works.made_up_logistic(20, 3))
    >>> state = peer.start(jax.random.key(0), learning_rate=1e-2, horizon=100)
    >>> state = peer.advance(state, 60)
    >>> state = peer.advance(state, 40)
    >>> bound, error = peer.bound(jax.random.key(1), peer.parameters(state))
    """

    def __init__(self, name: str, method: "_Method") -> None:
        self.name = name
        self._method = method
        self._advance = jax.jit(partial(_run, method.step))
        self._parameters = jax.jit(method.parameters)
        self._estimates = jax.jit(self._fresh_estimates)

    def start(
        self, rng_key: jax.Array, *, learning_rate: float, horizon: float = math.inf
    ) -> State:
        """The initial state.

        The learning rate falls to zero along a cosine within ``horizon`` steps, if that is finite.
        """
        pace = {"rate": jnp.float32(learning_rate), "horizon": jnp.float32(horizon)}
        state = jax.tree.map(
            lambda leaf: leaf._replace(**pace) if isinstance(leaf, _Pace) else leaf,
            self._method.start,
            is_leaf=lambda leaf: isinstance(leaf, _Pace),
        )
        return state._replace(rng_key=rng_key)

    def advance(self, state: State, num_steps: int) -> State:
        """The state after so many more steps."""
        return self._advance(state, num_steps)

    def parameters(self, state: State) -> Parameters:
        """What has been learned, constrained."""
        return self._parameters(state)

    def bound(self, rng_key: jax.Array, parameters: Parameters) -> Estimate:
        """The method's own bound on the log evidence, from 2000 independent estimates."""
        # Each is of a few hundred nats at most, which single precision holds to four decimals;
        # they are averaged in double precision.
        found = np.asarray(self._estimates(rng_key, parameters), np.float64)
        return Estimate(float(found.mean()), float(found.std(ddof=1) / math.sqrt(found.size)))

    def _fresh_estimates(self, rng_key: jax.Array, parameters: Parameters) -> jax.Array:
        return lax.map(
            lambda key: self._method.bound(key, parameters),
            jax.random.split(rng_key, _ESTIMATES_PER_CALL),
            batch_size=_ESTIMATES_AT_ONCE,
        )


def trainer(name: str, work: Work) -> Trainer:
    """A method by its name, of :data:`SVI_NAMES` or :data:`BLACKJAX_NAMES`."""
    optimizer = optax.chain(optax.scale_by_adam(), _paced())
    if name in BLACKJAX_NAMES:
        return Trainer(name, _blackjax(name, work, optimizer))
    return Trainer(name, _svi(name, work, optimizer, also=BLACKJAX_NAMES))


class _Pace(NamedTuple):
    """The learning rate, as part of a state, so that another one is no new program."""

    steps_done: jax.Array
    rate: jax.Array
    horizon: jax.Array


def _paced() -> optax.GradientTransformation:
    def init(params: Any) -> _Pace:
        return _Pace(jnp.float32(0), jnp.float32(_STEP_RATE), jnp.float32(math.inf))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        progress = jnp.minimum(state.steps_done / state.horizon, 1.0)
        rate = state.rate * (0.5 + 0.5 * jnp.cos(jnp.pi * progress))
        updates = jax.tree.map(lambda leaf: -rate * leaf, updates)
        return updates, state._replace(steps_done=state.steps_done + 1)

    return optax.GradientTransformation(init, update)


class _Method(NamedTuple):
    """A method of variational inference, with an optimizer, at a work."""

    start: State
    """A named tuple with a field ``rng_key``."""
    step: Callable[[State], State]
    parameters: Callable[[State], Parameters]
    bound: Callable[[jax.Array, Parameters], jax.Array]
    """An unbiased estimate of the bound, with fresh random numbers."""


def _run(step: Callable[[State], State], state: State, length: jax.Array | int) -> State:
    return lax.fori_loop(0, length, lambda _, state: step(state), state)


def _steps(method: _Method, num_steps: int) -> Contestant:
    check_count("num_steps", num_steps)
    run = jax.jit(partial(_run, method.step, length=num_steps))
    return lambda rng_key: run(method.start._replace(rng_key=rng_key))


def _svi(
    name: str, work: Work, optimizer: optax.GradientTransformation, also: tuple[str, ...] = ()
) -> _Method:
    kind, _, size = name.partition("-")
    if re.fullmatch(r"[1-9]\d*", size):
        kind = f"{kind}-K"
    elif name in SVI_NAMES and size:
        raise ValueError(f"K in {name!r} stands for a whole number; use e.g. '{kind}-24'.")
    check_choice("name", kind if kind in SVI_NAMES else name, (*SVI_NAMES, *also))
    loss: Any = Trace_ELBO()
    match kind:
        case "AutoDAIS-K":
            guide = autoguide.AutoDAIS(work.model, K=int(size))
        case "IWAE-K":
            guide = autoguide.AutoDiagonalNormal(work.model)
            loss = RenyiELBO(alpha=0, num_particles=int(size))
        case _:
            guide = getattr(autoguide, kind)(work.model)
    svi = SVI(work.model, guide, optimizer, loss)
    # With the structure at hand the rest can be compiled, in a hurry: AutoBNAFNormal initialises
    # every column of its networks by operations of their own, which take minutes otherwise.
    with handlers.block(), handlers.seed(rng_seed=0):
        guide._setup_prototype(*work.args)
    init = jax.jit(svi.init, compiler_options=_COMPILE_IN_A_HURRY)
    return _Method(
        start=init(jax.random.key(0), *work.args),
        step=lambda state: svi.update(state, *work.args)[0],
        parameters=svi.get_params,
        bound=lambda key, params: -loss.loss(key, params, work.model, guide, *work.args),
    )


class _BlackjaxState(NamedTuple):
    rng_key: jax.Array
    state: Any


def _blackjax(name: str, work: Work, optimizer: optax.GradientTransformation) -> _Method:
    check_choice("name", name, BLACKJAX_NAMES)
    library = getattr(blackjax().vi, name)
    algorithm = library.as_top_level_api(work.log_density, optimizer, _BLACKJAX_DRAWS)
    log_proposal = {
        "meanfield_vi": "generate_meanfield_logdensity",
        "fullrank_vi": "generate_fullrank_logdensity",
    }[name]

    def step(state: _BlackjaxState) -> _BlackjaxState:
        rng_key, step_key = jax.random.split(state.rng_key)
        return _BlackjaxState(rng_key, algorithm.step(step_key, state.state)[0])

    def bound(rng_key: jax.Array, parameters: Any) -> jax.Array:
        z = algorithm.sample(rng_key, parameters, 1)[0]
        log_q = getattr(library, log_proposal)(*parameters[:2])(z)
        return work.log_density(z) - log_q

    return _Method(
        start=_BlackjaxState(jax.random.key(0), algorithm.init(jnp.zeros(work.dimension))),
        step=step,
        # Without the optimizer's state: location and scale are the first two fields.
        parameters=lambda state: state.state._replace(opt_state=None),
        bound=bound,
    )


def blackjax() -> ModuleType:
    """The BlackJAX library, or advice on how to get it."""
    try:
        import blackjax
    except ImportError as error:
        raise ImportError(
            "a comparison with BlackJAX needs it, and it is not installed; run: "
            "pip install 'rvrs[bench]'"
        ) from error
    return blackjax
