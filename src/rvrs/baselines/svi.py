"""NumPyro's own guides, trained by its own SVI and judged by the bound that they maximise."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpyro import handlers
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, autoguide

from rvrs.baselines.names import Method
from rvrs.baselines.start import Start, prepared
from rvrs.baselines.task import (
    DivergedError,
    Estimate,
    Fitted,
    Proposal,
    Report,
    Schedule,
    Task,
    Trained,
)
from rvrs.guides import _numpyro

# The first steps of UHA's dynamics. From the paper's, the gradient is so flat that tens of
# thousands of updates leave it where it is, whatever their rate: at the ELBO of its normal.
_UHA_STEPS: dict[Schedule, float] = {"own": 0.05, "paper": 0.005}
_UHA_LARGEST_STEP = 0.25

# Adam's first rates. Those of the paper are small and want hundreds of thousands of steps. In ours,
# hundreds of dimensions, where the noise of all parameters adds up, get a hundredth: on a Gaussian
# process of 256 dimensions that is worth 3.4 nats to MVN and 2.1 to IWAE-8 against a tenth (5,000
# steps, one seed).
_PAPER_RATES = {"mf": 1e-3, "mvn": 1e-3, "flow": 1e-3, "iwae": 1e-3, "uha": 1e-4}
_PAPER_RATES |= {"rvrs": 1e-4, "vrs": 1e-4}
_PAPER_RATES |= {"oracle": 1e-3, "semi-dais": 1e-4}
_OWN_RATES = {"mf": 1e-2, "mvn": 1e-2, "flow": 1e-2, "iwae": 1e-2, "uha": 3e-3}
_OWN_RATES |= {"oracle": 1e-2, "semi-dais": 1e-2}
_MANY_DIMENSIONS = 100

# Training is cut into so many parts, between which progress is shown and times are taken.
_PARTS = 50
# Shares of steps without a finite gradient that a method may have.
_MOST_SKIPPED = 0.01
# Draws of the guide that a bound is estimated from at once.
_DRAWS_AT_ONCE = 2_000

# AutoBNAFNormal initialises every column of its networks by operations of their own, which take
# minutes to compile well and seconds to compile badly.
COMPILE_IN_A_HURRY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class LearningDAIS(autoguide.AutoDAIS):
    """AutoDAIS whose dynamics follow the model's own parameters while they are learned.

    NumPyro's has them at their initial values for ever, as far as the dynamics are concerned.
    """

    def _sample_latent(self, *args: Any, **kwargs: Any) -> Any:
        trace: Any = self.prototype_trace
        theta = _numpyro.model_parameters(trace)
        initial = self._potential_fn
        self._potential_fn = lambda z: -_numpyro.log_joint(self.model, ((), {}), theta, z)
        try:
            return super()._sample_latent(*args, **kwargs)
        finally:
            # It holds tracers.
            self._potential_fn = initial


class Approximation(NamedTuple):
    """A guide and the loss that it is trained and judged by."""

    guide: Any
    loss: Any
    num_draws: int = 1
    """Of the guide, in one estimate of the loss."""


def approximation(method: Method, model: Callable[..., Any], proposal: Proposal) -> Approximation:
    """NumPyro's guide for a method."""
    normals: dict[str, Any] = {
        "diagonal": autoguide.AutoDiagonalNormal,
        "mvn": autoguide.AutoMultivariateNormal,
    }
    match method.kind:
        case "mf":
            return Approximation(normals["diagonal"](model), Trace_ELBO())
        case "mvn":
            return Approximation(normals["mvn"](model), Trace_ELBO())
        case "flow":
            return Approximation(autoguide.AutoBNAFNormal(model), Trace_ELBO())
        case "iwae":
            count: Any = method.number
            loss = RenyiELBO(alpha=0, num_particles=count)
            return Approximation(normals[proposal](model), loss, count)
        case "uha":
            base = "diagonal" if proposal == "diagonal" else "cholesky"
            steps: Any = {"eta_init": _UHA_STEPS[method.schedule], "eta_max": _UHA_LARGEST_STEP}
            count = method.number
            guide = LearningDAIS(model, K=count, base_dist=base, **steps)
            return Approximation(guide, Trace_ELBO())
    raise ValueError(f"NumPyro has no guide for {method.kind!r}.")


def start_params(method: Method, start: Start) -> dict[str, Any]:
    """Parameters of a guide of NumPyro that is, or refines, a normal distribution."""
    prefix = "auto_z_0" if method.kind == "uha" else "auto"
    scale = "scale" if start.scale.ndim == 1 else "scale_tril"
    return {f"{prefix}_loc": start.loc, f"{prefix}_{scale}": start.scale} | start.model


def of_params(params: dict[str, Any], guide: Any) -> Start:
    """The normal distribution that a guide of NumPyro is."""
    scale = params["auto_scale" if "auto_scale" in params else "auto_scale_tril"]
    model = {
        name: params[name]
        for name, site in guide.prototype_trace.items()
        if site["type"] == "param"
    }
    return Start(params["auto_loc"], scale, model)


def optimizer(
    kind: str, schedule: Schedule, num_steps: int, dimension: int
) -> optax.GradientTransformation:
    """Adam, with the rates of a schedule."""
    if schedule == "paper":
        thirds = {num_steps // 3: 0.1, 2 * num_steps // 3: 0.1}
        return optax.adam(optax.piecewise_constant_schedule(_PAPER_RATES[kind], thirds))
    rate = _OWN_RATES[kind] * (0.01 if dimension > _MANY_DIMENSIONS else 1.0)
    return optax.adam(optax.cosine_decay_schedule(rate, num_steps))


def train(
    rng_key: jax.Array,
    task: Task,
    found: Approximation,
    optimizer: optax.GradientTransformation,
    num_steps: int,
    *,
    start: dict[str, Any] | None,
    report: Report,
) -> Trained:
    """Train a guide; steps without a finite gradient are skipped, and too many are an error."""
    svi = SVI(task.model, found.guide, optimizer, found.loss)
    # With the structure at hand the rest of the initialisation can be compiled.
    prepared(found.guide)
    init = jax.jit(partial(svi.init, init_params=start), compiler_options=COMPILE_IN_A_HURRY)
    state = init(rng_key)

    @jax.jit
    def advance(state: Any, length: jax.typing.ArrayLike) -> tuple[Any, jax.Array, jax.Array]:
        def step(_: jax.Array, carry: Any) -> Any:
            state, total, num_finite = carry
            state, loss = svi.stable_update(state)
            finite = jnp.isfinite(loss)
            return state, total + jnp.where(finite, loss, 0.0), num_finite + finite

        zero = jnp.zeros((), jnp.result_type(float))
        return lax.fori_loop(0, length, step, (state, zero, 0))

    advance(state, 0)  # compiles
    losses, times, skipped, done = [], [], 0, 0
    per_part = max(1, num_steps // _PARTS)
    while done < num_steps:
        length = min(per_part, num_steps - done)
        begin = time.perf_counter()
        state, total, num_finite = jax.block_until_ready(advance(state, length))
        times.append((time.perf_counter() - begin) / length)
        losses.append(float(total) / max(1, int(num_finite)))
        skipped += length - int(num_finite)
        done += length
        report(done / num_steps, f"loss {losses[-1]:.3f}")
        if skipped > _MOST_SKIPPED * num_steps:
            raise DivergedError(f"{skipped} of {done} steps had no finite loss or gradient")
    return Trained(svi.get_params(state), np.array(losses), float(np.median(times)))


def bound(
    rng_key: jax.Array, task: Task, found: Approximation, params: Any, num_estimates: int
) -> Estimate:
    """The bound that a guide maximises, from independent estimates."""
    at_once = min(num_estimates, max(1, _DRAWS_AT_ONCE // found.num_draws))

    @jax.jit
    def estimates(keys: jax.Array, params: Any) -> jax.Array:
        return lax.map(
            lambda key: -found.loss.loss(key, params, task.model, found.guide),
            keys,
            batch_size=at_once,
        )

    # Each is of some hundred nats at most, which single precision holds to four decimals; they are
    # averaged in double precision.
    values = np.asarray(estimates(jax.random.split(rng_key, num_estimates), params), np.float64)
    if not np.all(np.isfinite(values)):
        share = np.mean(~np.isfinite(values))
        raise DivergedError(f"{100 * share:.3g} % of the estimates of its bound are not finite")
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def fitted(
    name: str,
    trained: Trained,
    judged: Estimate,
    draw: Callable[[jax.Array, int], dict[str, jax.Array]],
) -> Fitted:
    """A guide that has been trained and judged."""
    return Fitted(
        method=name,
        elbo=judged.value,
        elbo_error=judged.error,
        seconds_per_step=trained.seconds_per_step,
        params=trained.params,
        losses=trained.losses,
        details={},
        draw=draw,
    )


def sampler(
    task: Task, found: Approximation, params: Any
) -> Callable[[jax.Array, int], dict[str, jax.Array]]:
    """A function that draws from a guide, or from what the bound of several draws stands for."""
    guide = found.guide

    def one(key: jax.Array) -> dict[str, jax.Array]:
        if found.num_draws == 1:
            return guide.sample_posterior(key, params)
        draw_key, choice_key = jax.random.split(key)
        theta = of_params(params, guide).model
        normal = _numpyro.stock_posterior(guide, params)
        z = normal.sample(draw_key, (found.num_draws,))
        log_p = jax.vmap(
            lambda z: _numpyro.log_joint(task.model, ((), {}), theta, guide._unpack_latent(z))
        )(z)
        # NumPyro's independent normals are a batch of their own, one for each coordinate.
        log_q = jnp.sum(normal.log_prob(z).reshape(found.num_draws, -1), axis=1)
        chosen = jax.random.categorical(choice_key, log_p - log_q)
        sites = _numpyro.constrain(task.model, ((), {}), theta, guide._unpack_latent(z[chosen]))
        return sites.values | sites.deterministic

    @partial(jax.jit, static_argnames="num_samples")
    def draw(rng_key: jax.Array, num_samples: int) -> dict[str, jax.Array]:
        keys = jax.random.split(rng_key, num_samples)
        at_once = min(num_samples, max(1, _DRAWS_AT_ONCE // found.num_draws))
        with handlers.block():
            return lax.map(one, keys, batch_size=at_once)

    return draw
