"""Drawing from ``r``: S accepted draws for each of B targets.

:func:`draw_exact` goes on until every target has its S draws (Algorithm 1 and 2 of the paper),
:func:`draw_budget` makes a fixed number of proposals and says which targets got there
(Algorithm 3). Both are made of the same step: propose a block, flag what is accepted, keep the
first accepted ones in the order in which they were proposed. Which draws are kept depends on
flags and order only, never on values, so the kept draws are i.i.d. from ``r``.

Proposals come in blocks because on vector hardware twenty evaluations cost little more than one.
The first block is sized so that it often suffices; the loop that serves the other cases sits
behind a ``cond``, so that most calls are straight-line code.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import digamma
from jaxtyping import Array, Bool, Float, Int

from rvrs.core import mesh
from rvrs.core.acceptance import evaluate
from rvrs.core.problem import PRNGKey, Problem, PyTree, Targets, log_weights
from rvrs.core.randomness import unrolled


class Tally(NamedTuple):
    """Sums over every proposal that was evaluated, accepted or not, one entry per target.

    The number of proposals is a stopping time, so by Wald's identity
    ``E[acceptance] = Z E[num_proposals]`` exactly, which :mod:`rvrs.core.threshold` relies on.
    """

    num_proposals: Int[Array, " b"]
    acceptance: Float[Array, " b"]
    """Sum of ``a_e``."""
    slope: Float[Array, " b"]
    """Sum of ``d a_e / dT = a_e c``."""
    cross: Float[Array, " b"]
    """Sum of ``a_e d a_e / dT``."""
    ratio: Float[Array, " b"]
    """Sum of ``a_e (A + T)``; T is a natural origin, since ``A + T > 0``."""
    ratio_slope: Float[Array, " b"]
    """Sum of ``d a_e / dT (A + T)``."""


class Draws(NamedTuple):
    """S accepted draws for each of B targets, as the noise that reproduces them."""

    noise: PyTree
    """Leaves ``(S, B, ...)``: what :attr:`Problem.propose` turns into the accepted draws."""
    log_weight: Float[Array, "s b"]
    """``lw`` of the accepted draws."""
    num_draws: Int[Array, " b"]
    """How many draws the target got, S at most; what is above in ``noise`` is filled up with
    proposals that were rejected and must not be used as draws."""
    complete: Bool[Array, " b"]
    """Whether the target got as many draws as were asked for."""
    log_normalizer: Float[Array, " b"]
    """An estimate of ``log Z`` from these proposals."""
    tally: Tally


class _Progress(NamedTuple):
    """What has been found so far."""

    noise: PyTree
    log_weight: Float[Array, "s b"]
    accepted: Int[Array, " b"]  # at most S
    successes: Int[Array, " b"]  # the estimate of log Z is digamma(successes) - digamma(trials)
    trials: Int[Array, " b"]
    tally: Tally


def block_size(num_samples: int, target_acceptance: float) -> int:
    """Proposals per target and block: as many as S draws need on average."""
    # The small relative slack keeps ceil(2 / 0.1) at 20 whatever the rounding of the quotient.
    return math.ceil(num_samples / target_acceptance * (1 - 1e-9))


# Later blocks have this share of the proposals of the first one; where they are shared out among
# targets, less, since few targets come to them, but not less than what costs as much as nothing.
_LATER, _LATER_SHARED = 1 / 2, 1 / 6
_CHEAP = 1000


def _later_block(block_size: int, num_targets: int, reallocate: bool) -> int:
    """Proposals per target in blocks after the first one."""
    most = math.ceil(_LATER * block_size)
    if not reallocate:
        return most
    return min(most, max(math.ceil(_LATER_SHARED * block_size), math.ceil(_CHEAP / num_targets)))


def draw_exact(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    threshold: Float[Array, " b"],
    *,
    num_samples: int,
    min_samples: int | None = None,
    epsilon: float,
    block_size: int,
    max_proposals: int,
    reallocate: bool = False,
    axis: str | None = None,
) -> Draws:
    """Propose until every target has its accepted draws (Algorithm 2).

    Parameters
    ----------
    threshold
        ``T``, one per target.
    min_samples
        Stop as soon as every target has this many draws, by default all S; of more than these
        the first S are kept. A block of ``S / Z`` proposals holds two draws of S = 2 with
        probability 0.6, but one with 0.88.
    block_size
        Proposals per target in the first block; see :func:`block_size`. Later blocks have fewer,
        since targets that come to them lack less.
    max_proposals
        Bound on the proposals per target (on their average over targets when reallocating).
        Where it is hit, ``complete`` is False.
    reallocate
        Whether blocks after the first one serve only targets that still lack draws, in
        proportion to what they lack. Pays when acceptance differs between targets.
    axis
        The axis of devices that the proposals of a block are spread over, see
        :mod:`rvrs.core.mesh`. A block is then that of the first device, followed by that of the
        second one and so on, so that what is kept depends on flags and order as before. Every
        device gets all draws. Not with ``reallocate``, whose targets are spread instead.

    ``log_normalizer`` is unbiased for ``log Z``. The number ``n`` of proposals up to the m-th
    accepted one, with m of ``min_samples``, is negative binomial, so that
    ``E[digamma(m) - digamma(n)] = E[H_{m-1} - H_{n-1}] = log Z``. Where the first block, of K
    proposals, holds M >= m accepted ones, these are in random places, and the mean over the places
    is ``H_M - H_K``, which is less noisy and does not depend on m.
    """
    wanted = num_samples if min_samples is None else min_samples
    targets, threshold = lax.stop_gradient((targets, threshold))
    block_size, max_proposals = (-(-n // mesh.size(axis)) for n in (block_size, max_proposals))
    first = min(block_size, max_proposals)
    later = min(_later_block(block_size, targets.num_targets, reallocate), max_proposals - first)
    max_rounds = (max_proposals - first) // later if later else 0
    # One split for all keys: each split costs as much as drawing a block's uniform numbers.
    rng_key = mesh.own_key(unrolled(rng_key), axis)
    noise_key, accept_key, loop_key = jax.random.split(rng_key, 3)

    nothing = jnp.zeros(targets.num_targets, jnp.int32)
    block = _propose((noise_key, accept_key), problem, targets, threshold, epsilon, first)
    progress = _start(_harvest(block, nothing, num_samples, wanted, axis))

    def unfinished(carry: tuple[Array, PRNGKey, _Progress]) -> Array:
        round_, _, progress = carry
        return (round_ < max_rounds) & jnp.any(progress.accepted < wanted)

    def propose_more(
        carry: tuple[Array, PRNGKey, _Progress],
    ) -> tuple[Array, PRNGKey, _Progress]:
        round_, key, progress = carry
        key, offset_key, *keys = jax.random.split(key, 4)
        lacking = jnp.maximum(wanted - progress.accepted, 0)
        if reallocate:
            assigned = _share_out(offset_key, lacking, later * targets.num_targets)
            rows, thresholds = targets.take(assigned), threshold[assigned]
            block = _propose(keys, problem, rows, thresholds, epsilon, 1)
            harvest = _harvest_assigned(block, assigned, progress.accepted, num_samples, wanted)
        else:
            block = _propose(keys, problem, targets, threshold, epsilon, later)
            harvest = _harvest(block, progress.accepted, num_samples, wanted, axis)
        return round_ + 1, key, _add(progress, harvest, wanted)

    def propose_until_done(progress: _Progress) -> _Progress:
        start = (jnp.int32(0), loop_key, progress)
        return lax.while_loop(unfinished, propose_more, start)[2]

    if max_rounds:
        done = jnp.all(progress.accepted >= wanted)
        progress = lax.cond(done, lambda progress: progress, propose_until_done, progress)

    complete = progress.accepted >= wanted
    # An incomplete target has stopped on a failure; the same formula with one more proposal, taken
    # for a success, stays finite.
    successes = jnp.where(complete, progress.successes, progress.accepted + 1)
    trials = jnp.where(complete, progress.trials, progress.tally.num_proposals + 1)
    psi = digamma(jnp.stack([successes, trials]).astype(threshold.dtype))
    log_normalizer = psi[0] - psi[1]
    return Draws(
        progress.noise,
        progress.log_weight,
        progress.accepted,
        complete,
        log_normalizer,
        progress.tally,
    )


def draw_budget(
    rng_key: PRNGKey,
    problem: Problem,
    targets: Targets,
    threshold: Float[Array, " b"],
    *,
    num_samples: int,
    epsilon: float,
    num_proposals: int,
) -> Draws:
    """Make ``num_proposals`` (S') proposals per target and keep the first S accepted (Algorithm 3).

    ``complete`` is the algorithm's mask. ``log_normalizer`` is the log of the mean acceptance
    probability of the S' proposals, whose bias is about ``-Var(a_e) / (2 S' Z^2)``.
    """
    targets, threshold = lax.stop_gradient((targets, threshold))
    noise_key, accept_key = jax.random.split(unrolled(rng_key))
    block = _propose((noise_key, accept_key), problem, targets, threshold, epsilon, num_proposals)
    nothing = jnp.zeros(targets.num_targets, jnp.int32)
    progress = _start(_harvest(block, nothing, num_samples, num_samples))
    mean_acceptance = progress.tally.acceptance / num_proposals
    return Draws(
        progress.noise,
        progress.log_weight,
        progress.accepted,
        progress.accepted == num_samples,
        jnp.log(mean_acceptance),
        progress.tally,
    )


def accept_all(noise: PyTree, log_weight: Float[Array, "s b"]) -> Draws:
    """Take all proposals of finite density as draws: T is infinite, and Z their share.

    Others are replaced by the first of these. ``complete`` is whether there are any.
    """
    num_samples, num_targets = log_weight.shape
    finite = jnp.isfinite(log_weight)
    first, column = lax.argmax(finite, 0, jnp.int32), jnp.arange(num_targets)

    def fill(leaf: Array) -> Array:
        mask = finite.reshape(finite.shape + (1,) * (leaf.ndim - 2))
        return jnp.where(mask, leaf, leaf[first, column])

    noise, log_weight = jax.tree.map(fill, (noise, log_weight))
    num_finite = jnp.sum(finite, axis=0).astype(log_weight.dtype)
    zeros = jnp.zeros_like(log_weight[0])
    count = jnp.full(num_targets, num_samples, jnp.int32)
    tally = Tally(
        num_proposals=count,
        acceptance=num_finite,
        slope=zeros,
        cross=zeros,
        ratio=zeros,
        ratio_slope=zeros,
    )
    log_normalizer = jnp.log(num_finite / num_samples)
    return Draws(noise, log_weight, count, num_finite > 0, log_normalizer, tally)


class _Block(NamedTuple):
    """K proposals for each of B rows."""

    noise: PyTree
    log_weight: Float[Array, "k b"]
    accepted: Bool[Array, "k b"]
    acceptance: Float[Array, "k b"]
    slope: Float[Array, "k b"]
    ratio: Float[Array, "k b"]


class _Harvest(NamedTuple):
    """What a block gives to the S slots of each target."""

    found: Bool[Array, "s b"]  # the slots that it fills
    noise: PyTree
    log_weight: Float[Array, "s b"]
    accepted: Int[Array, " b"]
    trial: Int[Array, " b"]  # which of the target's proposals here is the last that it lacked
    tally: Tally


def _propose(
    keys: Sequence[PRNGKey],
    problem: Problem,
    targets: Targets,
    threshold: Float[Array, " b"],
    epsilon: float,
    size: int,
) -> _Block:
    noise_key, accept_key = keys
    shape = (size, targets.num_targets)
    noise = problem.sample_noise(noise_key, shape)
    log_weight = log_weights(problem, targets, noise)
    acceptance = evaluate(log_weight, threshold[None], epsilon)
    a_e = acceptance.probability
    accepted = accept(accept_key, a_e)
    # T of infinity, where everything is accepted, has no finite origin; nothing needs one there.
    ratio = jnp.where(a_e > 0, acceptance.log_ratio + jnp.nan_to_num(threshold, posinf=0.0), 0.0)
    return _Block(noise, log_weight, accepted, a_e, a_e * acceptance.c, ratio)


def accept(rng_key: PRNGKey, probability: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether each of some proposals is accepted; never at probability 0, always at 1."""
    return _uniform(rng_key, probability.shape, probability.dtype) <= probability


def _uniform(rng_key: PRNGKey, shape: tuple[int, ...], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """Uniform on (0, 1] with a resolution of 2^-32 near zero.

    ``jax.random.uniform`` has steps of 2^-23 in float32 and returns an exact 0 that often, so it
    would accept anything once in eight million times. With this one ``u <= 0`` never holds and
    ``u <= 1`` always does.
    """
    bits = jax.random.bits(rng_key, shape, jnp.uint32)
    return (bits.astype(dtype) + 0.5) * 2.0**-32


def _harvest(
    block: _Block,
    already: Int[Array, " b"],
    num_samples: int,
    min_samples: int,
    axis: str | None = None,
) -> _Harvest:
    """Keep the first accepted proposals of a block whose columns are the targets."""
    num_proposals, num_targets = block.accepted.shape
    rank = _running_count(block.accepted)
    already = already + mesh.before(rank[-1], axis)
    wanted = _wanted_ranks(already, num_samples)
    position = jax.vmap(_first_reaching, in_axes=(1, 1), out_axes=1)(rank, wanted)
    found = (wanted > 0) & (wanted <= rank[-1])
    # Slots that stay empty hold a proposal of finite density, if there is one, so that a model
    # evaluated there for the sake of a fixed shape gives finite numbers.
    filler = lax.argmax(jnp.isfinite(block.log_weight), 0, jnp.int32)
    row, column = jnp.where(found, position, filler), jnp.arange(num_targets)
    noise, log_weight = jax.tree.map(
        lambda leaf: leaf.at[row, column].get(mode="promise_in_bounds"),
        (block.noise, block.log_weight),
    )
    tally = _tally(
        jnp.full(num_targets, num_proposals, jnp.int32), block, lambda x: jnp.sum(x, axis=0)
    )
    trial = position[min_samples - 1] + 1
    own = _Harvest(found, noise, log_weight, rank[-1], trial, tally)
    return own if axis is None else _merge(own, num_proposals, min_samples, axis)


def _merge(own: _Harvest, num_proposals: int, min_samples: int, axis: str) -> _Harvest:
    """What the devices have found in their parts of a block: no slot is filled by two of them."""
    found = mesh.total(own.found.astype(jnp.int32), axis) > 0
    # A slot that nobody fills has its proposal of finite density from the first device with one.
    usable = own.found | (~found & jnp.isfinite(own.log_weight))
    chosen = usable & (mesh.before(usable.astype(jnp.int32), axis) == 0)

    def pick(leaf: Array) -> Array:
        mask = chosen.reshape(chosen.shape + (1,) * (leaf.ndim - 2))
        return mesh.total(jnp.where(mask, leaf, jnp.zeros_like(leaf)), axis)

    noise, log_weight = jax.tree.map(pick, (own.noise, own.log_weight))
    # With nothing of finite density anywhere there is nothing to evaluate, as before.
    nobody = mesh.total(chosen.astype(jnp.int32), axis) == 0
    trial = jnp.where(own.found[min_samples - 1], own.trial + mesh.place(axis) * num_proposals, 0)
    return _Harvest(
        found,
        noise,
        jnp.where(nobody, -jnp.inf, log_weight),
        mesh.total(own.accepted, axis),
        mesh.total(trial, axis),
        mesh.total(own.tally, axis),
    )


def _share_out(rng_key: PRNGKey, lacking: Int[Array, " b"], slots: int) -> Int[Array, " slots"]:
    """Assign proposals to targets, in ascending order, in proportion to the draws they lack.

    The random offset common to all serves every target sooner or later, even when there are
    fewer proposals than targets.
    """
    share = jnp.cumsum(lacking).astype(jnp.float32)
    offset = jax.random.uniform(rng_key, dtype=jnp.float32)
    ticket = (jnp.arange(slots, dtype=jnp.float32) + offset) / slots
    assigned = jnp.searchsorted(share, ticket * share[-1], side="right").astype(jnp.int32)
    # Rounding may push the last tickets past the last share: they go to the last needy target.
    last_needy = lacking.size - 1 - lax.argmax(lacking[::-1] > 0, 0, jnp.int32)
    return jnp.minimum(assigned, last_needy)


def _harvest_assigned(
    block: _Block,
    assigned: Int[Array, " slots"],
    already: Int[Array, " b"],
    num_samples: int,
    min_samples: int,
) -> _Harvest:
    """Keep the first accepted proposals of a block of one row, sorted by target."""
    block = jax.tree.map(lambda leaf: leaf[0], block)
    targets = jnp.arange(already.size, dtype=jnp.int32)
    begin = jnp.searchsorted(assigned, targets, side="left").astype(jnp.int32)
    end = jnp.searchsorted(assigned, targets, side="right").astype(jnp.int32)
    rank = jnp.cumsum(block.accepted, dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), rank])
    accepted = before[end] - before[begin]
    wanted = _wanted_ranks(already, num_samples)
    position = _first_reaching(rank, wanted + before[begin])
    found = (wanted > 0) & (wanted <= accepted)
    noise, log_weight = jax.tree.map(
        lambda leaf: leaf.at[position].get(mode="clip"), (block.noise, block.log_weight)
    )

    def total(x: Float[Array, " slots"]) -> Float[Array, " b"]:
        # Not a difference of running sums, which would cancel.
        return jax.ops.segment_sum(x, assigned, already.size, indices_are_sorted=True)

    tally = _tally(end - begin, block, total)
    trial = position[min_samples - 1] - begin + 1
    return _Harvest(found, noise, log_weight, accepted, trial, tally)


def _tally(
    num_proposals: Int[Array, " b"], block: _Block, total: Callable[[Array], Array]
) -> Tally:
    """The sums of a block, ``total`` over the proposals of each target."""
    return Tally(
        num_proposals=num_proposals,
        acceptance=total(block.acceptance),
        slope=total(block.slope),
        cross=total(block.acceptance * block.slope),
        ratio=total(block.acceptance * block.ratio),
        ratio_slope=total(block.slope * block.ratio),
    )


def _wanted_ranks(already: Int[Array, " b"], num_samples: int) -> Int[Array, "s b"]:
    """Which of a block's accepted proposals (1 = the first) each slot takes; <= 0 if it is full."""
    return jnp.arange(1, num_samples + 1, dtype=jnp.int32)[:, None] - already


def _running_count(accepted: Bool[Array, "k b"]) -> Int[Array, "k b"]:
    """How many of the first proposals were accepted, the present one included."""
    size, num_targets = accepted.shape
    if size * size * num_targets > 2**14:
        return jnp.cumsum(accepted, axis=0, dtype=jnp.int32)
    # A sum over all pairs is one fused operation, a cumulative sum several.
    earlier = jnp.tri(size, dtype=bool)[:, :, None]
    return jnp.sum(earlier & accepted, axis=1, dtype=jnp.int32)


def _first_reaching(rank: Int[Array, " k"], wanted: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """The first position whose running count reaches ``wanted``; past the end if none does."""
    # Comparing all pairs is one fused operation; a binary search is a chain of gathers.
    few = rank.size * wanted.size <= 2**14
    method = "compare_all" if few else "scan_unrolled"
    return jnp.searchsorted(rank, wanted, side="left", method=method).astype(jnp.int32)


def _start(harvest: _Harvest) -> _Progress:
    accepted = jnp.minimum(harvest.accepted, harvest.found.shape[0])
    # Of use where there are min_samples draws already.
    successes, trials = harvest.accepted + 1, harvest.tally.num_proposals + 1
    return _Progress(harvest.noise, harvest.log_weight, accepted, successes, trials, harvest.tally)


def _add(progress: _Progress, harvest: _Harvest, min_samples: int) -> _Progress:
    found = harvest.found
    last = found[min_samples - 1]

    better = found
    if min_samples < found.shape[0]:
        # Slots may stay empty; what one of them holds may be of no finite density (_harvest).
        better = found | ~jnp.isfinite(progress.log_weight)

    def fill(old: Array, new: Array) -> Array:
        return jnp.where(better.reshape(better.shape + (1,) * (new.ndim - 2)), new, old)

    noise, log_weight = jax.tree.map(
        fill, (progress.noise, progress.log_weight), (harvest.noise, harvest.log_weight)
    )
    return _Progress(
        noise,
        log_weight,
        accepted=jnp.minimum(progress.accepted + harvest.accepted, found.shape[0]),
        successes=jnp.where(last, min_samples, progress.successes),
        trials=jnp.where(last, progress.tally.num_proposals + harvest.trial, progress.trials),
        tally=jax.tree.map(jnp.add, progress.tally, harvest.tally),
    )
