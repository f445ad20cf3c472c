r"""Using a trained guide with local latents: calibrate T, sample, and estimate the ELBO.

The distribution that is sampled is :math:`q(z_G) \prod_n r_n(z_n | z_G)`, so its ELBO is

.. math::

    E_{q(z_G)}\Big[\log \frac{p(z_G)}{q(z_G)}
        + \sum_n \big(E_{r_n}[A_n] + \log Z_n(z_G)\big)\Big],

whose normalisers are inside the expectation over :math:`z_G`: this is exact, not a bound. The
inner terms are estimated from proposals, which biases each of them by order one over their
number. Small as it is, over all data points it adds up, so it is estimated and taken away.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rvrs.core import evidence
from rvrs.core.problem import PRNGKey
from rvrs.engine import fresh_weights, solve_threshold
from rvrs.guides import _plate
from rvrs.guides._numpyro import Arguments
from rvrs.guides._plate import Plate
from rvrs.guides._semi_target import Parameters, SemiTarget

# Data points that are worked on at once, and proposals over all of these.
_POINTS = 256
_PROPOSALS = 20_000
# T of a point comes from as many proposals as give this many draws (Z within about 5 %), half of
# them where that takes too many, at so many draws of the global latents.
_CALIBRATION_DRAWS = 400
_MOST_CALIBRATION_PROPOSALS = 20_000
_CALIBRATION_GLOBALS = 20


class SemiEvidence(NamedTuple):
    """The ELBO of a guide with local latents, and what belongs to it."""

    elbo: jax.Array
    elbo_error: jax.Array
    """Monte Carlo standard error of ``elbo``."""
    elbo_bias: jax.Array
    """The estimated bias of the plain nested estimate, from the finite number of proposals per
    data point; it has been subtracted from ``elbo``. What is left shrinks with the square of their
    number, so a bias of many nats asks for more proposals."""
    marginal_elbo: jax.Array
    """What ``elbo`` would be if the local posteriors were exact: the ELBO of the global guide with
    the local latents integrated out, by importance sampling. Without global latents it is the log
    evidence."""
    marginal_elbo_error: jax.Array
    log_normalizer: jax.Array
    """``(n,)``: log Z of every data point, averaged over global draws."""
    threshold: jax.Array
    """``(n,)``: T of every data point."""


def in_chunks(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """``function`` of a few rows of the arrays at a time; its results are put together.

    The last rows are repeated to fill the last chunk; what they give is cut off.
    """
    count = len(arrays[0])
    size = min(count, _POINTS)
    padding = -count % size

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.concatenate([array, jnp.repeat(array[-1:], padding, axis=0)])
        return padded.reshape(-1, size, *array.shape[1:])

    result = lax.map(lambda chunk: function(*chunk), tuple(split(array) for array in arrays))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], result)


def calibrate(
    target: SemiTarget,
    plate: Plate,
    rng_key: PRNGKey,
    parameters: Parameters,
    index: jax.Array,
    arguments: Arguments,
) -> jax.Array:
    """T of every point, such that its acceptance averages to the target over global draws."""
    settings = target.settings
    if settings.threshold is not None or settings.target_acceptance == 1:
        return solve_threshold(jnp.zeros((1, len(index))), settings)
    wanted = min(_CALIBRATION_DRAWS / settings.target_acceptance, _MOST_CALIBRATION_PROPOSALS)
    num_globals = 1 if target.global_guide is None else _CALIBRATION_GLOBALS
    per_global = math.ceil(wanted / num_globals)

    def solve(index: jax.Array, position: jax.Array) -> jax.Array:
        def weights(number: jax.Array) -> jax.Array:
            # The same global draws for all points.
            global_key = jax.random.fold_in(rng_key, number)
            local_key = jax.random.fold_in(global_key, 1 + position[0])
            latents, _ = target.draw_global(plate, global_key, parameters, arguments)
            program = target.local_program(plate, parameters, latents, arguments)
            problem, targets = target.problem(program, parameters, program.rows(index, position))
            return fresh_weights(local_key, problem, targets, per_global, at_once=_PROPOSALS)

        lw = lax.map(weights, jnp.arange(num_globals))
        return solve_threshold(lw.reshape(-1, lw.shape[-1]), settings)

    return in_chunks(solve, index, jnp.arange(len(index)))


def sample(
    target: SemiTarget,
    plate: Plate,
    num_samples: int,
    rng_key: PRNGKey,
    parameters: Parameters,
    index: jax.Array,
    arguments: Arguments,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Draws of all sites with a leading axis, and whether each point got each of them."""
    calibration_key, draw_key = jax.random.split(rng_key)
    t = calibrate(target, plate, calibration_key, parameters, index, arguments)

    def one(key: PRNGKey) -> tuple[dict[str, jax.Array], jax.Array]:
        global_key, local_key = jax.random.split(key)
        latents, _ = target.draw_global(plate, global_key, parameters, arguments)
        program = target.local_program(plate, parameters, latents, arguments)
        problem, targets = target.problem(program, parameters, program.rows(index))
        draws = target.draw_exact(local_key, problem, targets, t, num_samples=1)
        noise = jax.tree.map(lambda leaf: leaf[0], draws.noise)
        z, _ = jax.vmap(problem.propose)(targets.proposal, noise)
        local = {site.name: _plate.to_batch(site, z[site.name]) for site in plate.local}
        values = {**parameters, **latents, **local, plate.name: index}
        trace = _plate.run(target.model, arguments, values)
        deterministic = {
            site["name"]: site["value"]
            for site in trace.values()
            if site["type"] == "deterministic"
        }
        return latents | local | deterministic, draws.complete

    keys = jax.random.split(draw_key, num_samples)
    at_once = max(1, int(_PROPOSALS * target.settings.target_acceptance) // len(index))
    return lax.map(one, keys, batch_size=min(at_once, num_samples))


class EvaluatedPoints(NamedTuple):
    """Sums over some data points at each of M global draws, for :func:`summarize`."""

    outside: jax.Array
    """``(M,)``: ``log p(z_G) - log q(z_G)``."""
    sums: evidence.Evidence
    """Leaves ``(M,)``: sums over the points."""
    variance: jax.Array
    """``(M, 2)``: sums over the points of the squared errors of ELBO and log evidence."""
    elbo: jax.Array
    """``(n,)``: the ELBO of every point, averaged over global draws."""
    log_normalizer: jax.Array
    """``(n,)``"""
    threshold: jax.Array
    """``(n,)``"""


def evaluate(
    target: SemiTarget,
    plate: Plate,
    num_global: int,
    num_local: int,
    rng_key: PRNGKey,
    parameters: Parameters,
    index: jax.Array,
    arguments: Arguments,
) -> EvaluatedPoints:
    """The terms of the ELBO for the points in ``index``, by nested Monte Carlo.

    The global draws depend on the key alone, so that parts of the data can be evaluated one after
    the other. Neither the number of global draws nor that of proposals costs memory.
    """
    calibration_key, nested_key = jax.random.split(rng_key)
    t = calibrate(target, plate, calibration_key, parameters, index, arguments)

    def at_global(
        total: tuple[jax.Array, jax.Array], key: PRNGKey
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, evidence.Evidence, jax.Array]]:
        global_key, local_key = jax.random.split(key)
        latents, log_q = target.draw_global(plate, global_key, parameters, arguments)
        log_p = target.log_global(plate, parameters, latents, arguments)
        program = target.local_program(plate, parameters, latents, arguments)

        def at_points(index: jax.Array, position: jax.Array, t: jax.Array) -> evidence.Evidence:
            problem, targets = target.problem(program, parameters, program.rows(index, position))
            return evidence.estimate(
                jax.random.fold_in(local_key, index[0]),
                problem,
                targets,
                t,
                num_proposals=num_local,
                epsilon=target.settings.epsilon,
                chunk_size=_PROPOSALS,
            )

        found = in_chunks(at_points, index, jnp.arange(len(index)), t)
        squares = [jnp.sum(found.elbo_error**2), jnp.sum(found.log_evidence_error**2)]
        total = (total[0] + found.elbo, total[1] + found.log_normalizer)
        return total, (log_p - log_q, jax.tree.map(jnp.sum, found), jnp.stack(squares))

    nothing = (jnp.zeros_like(t), jnp.zeros_like(t))
    keys = jax.random.split(nested_key, num_global)
    (elbo, log_normalizer), (outside, sums, variance) = lax.scan(at_global, nothing, keys)
    return EvaluatedPoints(
        outside, sums, variance, elbo / num_global, log_normalizer / num_global, t
    )


def together(parts: list[EvaluatedPoints]) -> EvaluatedPoints:
    """The points of several parts, evaluated at the same global draws."""
    sums, variance = (
        jax.tree.map(lambda *leaves: sum(leaves), *[getattr(part, name) for part in parts])
        for name in ("sums", "variance")
    )
    points = (
        jnp.concatenate([getattr(part, name) for part in parts])
        for name in ("elbo", "log_normalizer", "threshold")
    )
    return EvaluatedPoints(parts[0].outside, sums, variance, *points)


def summarize(parts: list[EvaluatedPoints], num_points: int) -> SemiEvidence:
    """The ELBO of ``num_points`` data points from those that were evaluated."""
    outside, sums, variance, elbos, log_normalizer, t = together(parts)
    count, num_global = len(elbos), len(outside)
    scale = num_points / count
    # Points that were left out might differ from the others.
    left_out = scale**2 * count * jnp.var(elbos) * (1 - count / num_points)

    def summary(inside: jax.Array, inner: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = outside + scale * inside
        # The spread over global draws has the errors of the points in it.
        outer = jnp.var(values, ddof=1) / num_global if num_global > 1 else scale**2 * inner[0]
        return jnp.mean(values), jnp.sqrt(outer + left_out)

    elbo, elbo_error = summary(sums.elbo - sums.elbo_bias, variance[:, 0])
    # The bias of the log of a mean is minus half of its relative variance.
    log_evidence = sums.log_evidence + variance[:, 1] / 2
    marginal, marginal_error = summary(log_evidence, variance[:, 1])
    return SemiEvidence(
        elbo=elbo,
        elbo_error=elbo_error,
        elbo_bias=scale * jnp.mean(sums.elbo_bias),
        marginal_elbo=marginal,
        marginal_elbo_error=marginal_error,
        log_normalizer=log_normalizer,
        threshold=t,
    )
