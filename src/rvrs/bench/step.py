"""How long a training step takes, compared with the work that it cannot avoid and with peers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers

from rvrs import training, vi
from rvrs.bench import autoencoder, hierarchical, peers, works
from rvrs.bench.bare import NUM_SAMPLES, Task, bare_steps, naive_steps, task
from rvrs.bench.contest import Entry, contest
from rvrs.bench.report import Row, Suite
from rvrs.bench.timing import Contestant
from rvrs.bench.works import Work
from rvrs.core.objectives import Baseline
from rvrs.experiments import hierarchical_model as experiment
from rvrs.guides import AutoRVRS
from rvrs.vae import VAE

NAME = "step"
TITLE = "A training step over the bare work, and over steps of peers"
NOTES = (
    "Ratios are medians over turns, with quartiles. Bare work: ceil(S / Z) proposals in one batch, "
    "one gradient over S draws, one Adam update; peers, which have no Z, are compared with it at "
    "the first Z of the table. Naive: one proposal at a time. The Gaussian process has a diagonal "
    "proposal, and its kernel parameters are learned. A peer's step has one draw (IWAE-K: K). RVRS "
    'takes a step with the draws that its proposals hold, S at most; "all draws" waits for S.'
)

TARGET_ACCEPTANCES = (0.1, 0.3, 0.05)
"""The first is the one that peers and the naive loop are compared at."""
_PEERS = ("AutoDiagonalNormal", "IWAE-24", "AutoDAIS-24")
_LEARNING_RATE = 1e-3


class _Plan(NamedTuple):
    """How much is measured."""

    num_steps: int
    """Of the smallest work in a turn: enough that it takes some hundredths of a second."""
    repeats: int
    target_acceptances: tuple[float, ...] = TARGET_ACCEPTANCES
    peers: tuple[str, ...] = _PEERS
    num_settling: int = 5000
    """Steps before the measurement: T and the proposal settle, as the cost depends on them."""
    variants: bool = True
    """Whether the bare work with fixed noise, the naive loop and RVRS that waits take part."""


_FULL = _Plan(num_steps=1000, repeats=9)
_QUICK = _Plan(4, 1, (0.1,), ("AutoDiagonalNormal",), 8)


def measure(*, quick: bool, progress: Callable[[str], None]) -> Suite:
    """Time steps of RVRS beside the bare work, the naive loop and peers, on all works."""
    plan = _QUICK if quick else _FULL
    notes, rows = NOTES, []
    for build, own in _small_works(quick):
        work = build()
        progress(work.name)
        rows += contest(work.name, _entries(work, own), repeats=plan.repeats)
    for name, entries in (("hierarchical", _hierarchical), ("VAE", _autoencoder)):
        progress(name)
        rows += contest(*entries(quick), repeats=plan.repeats if quick else 7)
    if not quick:
        found, missing = _data_sets(plan, progress)
        rows += found
        notes += f" {missing}" if missing else ""
    return Suite(NAME, TITLE, notes, rows)


def _small_works(quick: bool) -> list[tuple[Callable[[], Work], _Plan]]:
    """Works with one target."""
    if quick:
        return [
            (lambda: works.made_up_logistic(20, 3), _QUICK),
            (lambda: works.gaussian_process(8), _QUICK._replace(peers=(), variants=False)),
        ]
    # As many steps as take about as long.
    fewer = _FULL._replace(num_steps=30, num_settling=300)
    return [
        (lambda: works.made_up_logistic(100, 17), _FULL),
        (lambda: works.made_up_logistic(100, 58), _FULL),
        (lambda: works.made_up_logistic(10_000, 50), fewer),
        (works.gaussian_process, fewer),
    ]


def _entries(work: Work, plan: _Plan) -> dict[str, Entry]:
    """RVRS, bare work and naive loop at every acceptance, and peers."""
    found: dict[str, Entry] = {}
    optimizer = optax.adam(_LEARNING_RATE)
    settle = _settled if work.log_joint is None else _settled_guide
    for target in plan.target_acceptances:
        settled = settle(work, target, plan)
        bare, quiet = f"bare work Z={target:g}", f"bare work Z={target:g}, fixed noise"
        over = {"over bare work": bare}
        if plan.variants:
            over["over bare work with fixed noise"] = quiet
        own = over | {f"over {peer}": peer for peer in plan.peers}
        found[f"RVRS Z={target:g}"] = Entry(settled.steps, plan.num_steps, own, settled.proposals)
        start = settled.task
        for name in list(over.values()):
            contestant = bare_steps(start, optimizer, plan.num_steps, random=name == bare)
            found[name] = Entry(contestant, plan.num_steps, {}, start.num_proposals, NUM_SAMPLES)
        if target != plan.target_acceptances[0] or not plan.variants:
            continue
        naive = naive_steps(start, optimizer, plan.num_steps, settled.threshold)
        proposals = float(naive(jax.random.key(0))[-1]) * NUM_SAMPLES
        found[f"naive Z={target:g}"] = Entry(naive, plan.num_steps, over, proposals, NUM_SAMPLES)
        patient = settle(work, target, plan, "leave_one_out")
        found[f"RVRS Z={target:g}, all draws"] = Entry(
            patient.steps, plan.num_steps, over, patient.proposals, NUM_SAMPLES
        )
    reference = {"over bare work": f"bare work Z={plan.target_acceptances[0]:g}"}
    # Some of them take many times as long for a step.
    num_steps = max(1, plan.num_steps // 4)
    for peer in plan.peers:
        found[peer] = Entry(peers.svi_steps(peer, work, num_steps), num_steps, reference)
    return found


class _Settled(NamedTuple):
    """RVRS after it has settled."""

    steps: Contestant
    task: Task
    """The same training from the same parameters on."""
    threshold: jax.Array
    proposals: float
    """Per step."""


def _settled(
    work: Work, target_acceptance: float, plan: _Plan, baseline: Baseline = "running"
) -> _Settled:
    """Steps of ``rvrs.vi``."""
    algorithm = vi.as_top_level_api(
        work.log_density,
        optax.adam(_LEARNING_RATE),
        target_acceptance=target_acceptance,
        num_samples=NUM_SAMPLES,
        baseline=baseline,
    )
    size = plan.num_steps

    def run(key: jax.Array, state: Any, num_steps: int) -> Any:
        return vi.run(key, algorithm, state, num_steps, chunk_size=size)

    first = algorithm.init(jnp.zeros(work.dimension))
    state, info = run(jax.random.key(0), first, max(size, plan.num_settling))
    bare = task(work, target_acceptance)
    return _Settled(
        steps=lambda key: run(key, state, size),
        task=bare._replace(parameters=bare.parameters | {"proposal": state.parameters}),
        threshold=state.threshold.value,
        proposals=float(np.mean(info.num_proposals)),
    )


def _settled_guide(
    work: Work, target_acceptance: float, plan: _Plan, baseline: Baseline = "running"
) -> _Settled:
    """Training steps of a guide, as ``rvrs.fit`` takes them: the model's parameters learn, too."""
    guide = AutoRVRS(
        work.model,
        proposal="diagonal",
        target_acceptance=target_acceptance,
        num_samples=NUM_SAMPLES,
        baseline=baseline,
    )
    with handlers.block(), handlers.seed(rng_seed=0):
        guide._setup_prototype(*work.args)
    theta = {name: jnp.exp(value) for name, value in work.parameters.items()}
    scales = jnp.full(work.dimension, 0.3)
    trainable, frame = training.first_trainable(guide, theta, jnp.zeros(work.dimension), scales)
    arguments, size = (work.args, {}), plan.num_steps
    state = training.first_state(guide, trainable, frame, arguments)

    def run(key: jax.Array, state: Any) -> Any:
        counts = (0, size, size, size)
        return training.run_chunk(guide, "training", key, state, frame, *counts, arguments)

    info = None
    for key in jax.random.split(jax.random.key(0), -(-plan.num_settling // size)):
        state, info = run(key, state)
    assert info is not None
    proposal, _ = training.parameters(guide, state.trainable, frame)
    learned = {"proposal": proposal, "model": state.trainable.model}
    return _Settled(
        steps=lambda key: run(key, state),
        task=task(work, target_acceptance)._replace(parameters=learned),
        threshold=state.guide_state["value"],
        proposals=float(np.mean(info.num_proposals)),
    )


def _hierarchical(quick: bool) -> tuple[str, dict[str, Entry]]:
    if quick:
        dataset, size = hierarchical.made_up_data(64, 3), 16
        entries = hierarchical.entries(
            dataset, size, (0.5,), 4, num_settling=8, peers=hierarchical.PEERS[:1]
        )
    else:
        try:
            dataset = experiment.load("pol")
        except FileNotFoundError:
            dataset = hierarchical.made_up_data()
        size = hierarchical.BATCH_SIZE
        entries = hierarchical.entries(dataset, size, (0.5, 0.1), 500, num_settling=1000)
    return f"hierarchical ({dataset.name}) N={len(dataset.responses)} B={size}", entries


def _autoencoder(quick: bool) -> tuple[str, dict[str, Entry]]:
    vae, size = (VAE(16, 2, 8), 4) if quick else (VAE(), autoencoder.BATCH_SIZE)
    if quick:
        entries = autoencoder.entries(vae, size, (0.1,), 2, peers=["standard"])
    else:
        entries = autoencoder.entries(vae, size, (0.1, 0.05), 5)
    return f"VAE {vae.num_pixels} pixels B={size}", entries


def _data_sets(plan: _Plan, progress: Callable[[str], None]) -> tuple[list[Row], str]:
    """RVRS at one acceptance against peers on data sets; what was left out, in words."""
    once = plan._replace(
        target_acceptances=plan.target_acceptances[:1], peers=_PEERS[1:], variants=False
    )
    rows, missing = [], []
    for name in works.LOGISTIC:
        try:
            work = works.logistic(name)
        except FileNotFoundError:
            missing.append(name)
            continue
        progress(name)
        rows += contest(name, _entries(work, once), repeats=plan.repeats)
    text = f"Left out, as there are no data: {', '.join(missing)} (see rvrs.datasets)."
    return rows, text if missing else ""
