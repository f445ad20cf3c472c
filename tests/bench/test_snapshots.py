import warnings

import jax
import numpy as np
import pytest

from rvrs import fitting
from rvrs import run as running
from rvrs.bench import peers, snapshots, works

WORK = works.made_up_logistic(20, 3)


def increasing(values):
    return np.all(np.diff(values) > 0)


@pytest.mark.slow
def test_the_snapshots_of_a_fit_are_on_the_way_of_rvrs_fit_to_the_same_bits(monkeypatch):
    monkeypatch.setattr(running, "_WARM_UP_STEPS", 60)
    key, num_steps = jax.random.key(3), 60
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fit = fitting.fit(
            key, WORK.model, *WORK.args, num_steps=num_steps, num_evaluation_draws=100,
            proposal="diagonal", progress=False,
        )  # fmt: skip
    curve = snapshots.of_fit(key, fit.guide, fit.arguments, num_steps)
    labels = [snapshot.label for snapshot in curve.snapshots]
    stages = [f"{stage} {step}" for stage in ("warm-up", "training") for step in (25, 50, 60)]
    assert labels == ["start", *stages]
    assert increasing([s.seconds for s in curve.snapshots if not s.label.startswith("warm-up")])
    last = curve.snapshots[-1].parameters
    assert last.keys() == fit.params.keys()
    for name, value in fit.params.items():
        np.testing.assert_array_equal(last[name], value)
    bound = curve.bound(jax.random.key(0), last)
    assert abs(bound.value - fit.elbo) < 5 * np.hypot(bound.error, fit.elbo_error)


@pytest.mark.parametrize("decays", [True, False])
def test_the_snapshots_of_a_peer_are_denser_at_the_beginning(decays):
    peer = peers.trainer("meanfield_vi", WORK)
    curve = snapshots.of_peer(
        jax.random.key(0), peer, 3000, learning_rate=0.01, decays=decays, num_snapshots=8
    )
    steps = [int(s.label.split("/")[0].split()[-1]) for s in curve.snapshots]
    assert len(steps) == 8
    assert steps[0] == 3
    assert steps[-1] == 3000
    assert increasing(np.diff(steps))
    assert increasing([s.seconds for s in curve.snapshots])
    first, last = (curve.bound(jax.random.key(1), curve.snapshots[i].parameters) for i in (0, -1))
    assert last.value > first.value + 4 * first.error
    assert ("cosine" in curve.snapshots[0].label) == decays


def test_steps_that_are_affordable_are_bounded():
    peer = peers.trainer("meanfield_vi", WORK)
    assert snapshots.affordable_steps(peer, 100.0, 7) == 7
    assert snapshots.affordable_steps(peer, 1e-9, 7) == 1
