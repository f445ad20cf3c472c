import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.bench import step, works


def ignore(_):
    pass


def test_data_sets_that_are_not_there_are_left_out_with_a_note(monkeypatch):
    def load(name):
        if name != "bank":
            raise FileNotFoundError
        return works.made_up_logistic(10, 2)

    monkeypatch.setattr(works, "logistic", load)
    monkeypatch.setattr(step, "_entries", lambda work, plan: (work.name, plan.target_acceptances))
    monkeypatch.setattr(step, "contest", lambda name, entries, repeats: [(name, entries)])
    rows, note = step._data_sets(step._FULL, ignore)
    assert rows == [("bank", ("logistic N=10 D=2", (0.1,)))]
    assert note.startswith("Left out, as there are no data: adult, mushroom, spambase, thyroid")


@pytest.mark.slow
def test_the_bare_work_and_the_naive_loop_start_where_the_product_has_settled():
    plan = step._Plan(num_steps=400, repeats=1, num_settling=400)
    settled = step._settled(works.made_up_logistic(20, 2), 0.5, plan)
    state, info = settled.steps(jax.random.key(1))
    assert info.elbo.shape == (400,)
    start = settled.task.parameters["proposal"]
    assert bool(jnp.any(start.loc != 0))
    # One block of proposals serves most steps, and there is at least one.
    assert settled.task.num_proposals <= settled.proposals < 8
    np.testing.assert_allclose(jnp.mean(info.acceptance), 0.5, atol=0.05)
    assert settled.threshold.shape == state.threshold.value.shape == (1,)


@pytest.mark.slow
def test_a_quick_run_compares_all_contestants_on_all_works():
    seen = []
    suite = step.measure(quick=True, progress=seen.append)
    assert len(seen) == 4
    assert suite.name == step.NAME
    by_work = {}
    for row in suite.rows:
        by_work.setdefault(row.work, {})[row.contestant] = row.figures
    logistic, process, hierarchical, vae = by_work.values()
    assert set(logistic) == {
        "RVRS Z=0.1",
        "bare work Z=0.1",
        "bare work Z=0.1, fixed noise",
        "naive Z=0.1",
        "RVRS Z=0.1, all draws",
        "AutoDiagonalNormal",
    }
    assert logistic["RVRS Z=0.1"]["over AutoDiagonalNormal"] > 0
    assert logistic["naive Z=0.1"]["proposals per draw"] > 1
    assert set(process) == {"RVRS Z=0.1", "bare work Z=0.1"}
    assert {"semi-RVRS Z=0.5", "mean-field"} < set(hierarchical)
    assert {"RVRS Z=0.1", "standard"} < set(vae)
    for row in suite.rows:
        if not row.contestant.startswith("bare"):
            assert row.figures["over bare work"] > 0
