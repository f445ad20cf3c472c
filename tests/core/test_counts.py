"""What a step is made of, in numbers that do not depend on the machine's mood.

A step that became slower would show here first: as another compilation, as more operations in the
compiled loop, or as proposals that were made for nothing.
"""

import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rvrs import loop, vi

DIMENSION = 17


@pytest.fixture(autouse=True)
def _standard_promotion():
    # The optimizer and the model are users' code here.
    with jax.numpy_dtype_promotion("standard"):
        yield


def log_density(z):
    features = jnp.asarray(np.random.default_rng(0).standard_normal((100, DIMENSION)), jnp.float32)
    return jnp.sum(jax.nn.log_sigmoid(features @ z)) - 0.5 * jnp.sum(z**2)


def algorithm(**settings):
    return vi.as_top_level_api(log_density, optax.adam(1e-2), **settings)


@pytest.fixture
def compilations():
    """A list that grows by one at every compilation."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_chunks_of_a_run_share_one_program(compilations):
    alg = algorithm()
    state = alg.init(jnp.zeros(DIMENSION))
    state, _ = vi.run(jax.random.key(0), alg, state, 20, chunk_size=20)
    assert compilations
    programs = loop._run_chunk._cache_size()
    compilations.clear()
    # More chunks, a shorter last one, other keys and states.
    vi.run(jax.random.key(1), alg, state, 20, chunk_size=20)
    assert not compilations
    vi.run(jax.random.key(1), alg, state, 50, chunk_size=20)
    assert loop._run_chunk._cache_size() == programs


def loop_body(alg):
    """Operations in the body of the compiled loop over steps, and in what it always calls."""
    state = alg.init(jnp.zeros(DIMENSION))
    program = loop._run_chunk.lower(jax.random.key(0), alg.step, state, 0, 100, 100).compile()
    computations = {}
    for text in re.split(r"\n\n", program.as_text()):
        if header := re.match(r"(?:ENTRY )?%(\S+) .*\{\n", text.strip() + "\n"):
            computations[header[1]] = text
    # The loop over steps has the most fusions of all.
    return max(computations.values(), key=lambda text: text.count(" fusion("))


@pytest.mark.parametrize(
    ("settings", "most_fusions"),
    # Bounds are what was counted when a step took about as long as the work that it cannot avoid,
    # and a few more for the compiler's next version.
    [({}, 90), ({"baseline": "leave_one_out"}, 90), ({"proposal": "mvn"}, 110)],
    ids=["default", "leave one out", "mvn"],
)
def test_operations_in_the_loop_body_are_few(settings, most_fusions):
    body = loop_body(algorithm(**settings))
    assert 30 < body.count(" fusion(") <= most_fusions
    # Three conditions around random numbers and the one of the slow path.
    assert body.count(" conditional(") <= 4
    for costly in (" while(", " scatter(", " sort("):
        assert costly not in body, costly


@pytest.mark.parametrize(("baseline", "most"), [("running", 1.15), ("leave_one_out", 1.42)])
@pytest.mark.parametrize(
    "target_acceptance", [0.1, *(pytest.param(z, marks=pytest.mark.slow) for z in (0.3, 0.05))]
)
def test_proposals_of_a_step_are_hardly_more_than_its_draws_need(baseline, most, target_acceptance):
    alg = algorithm(target_acceptance=target_acceptance, baseline=baseline)
    state = alg.init(jnp.zeros(DIMENSION))
    state, _ = vi.run(jax.random.key(0), alg, state, 1000)
    _, info = vi.run(jax.random.key(1), alg, state, 2000)
    assert 1 <= float(jnp.mean(info.num_proposals)) * target_acceptance / 2 < most
