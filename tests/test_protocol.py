"""One protocol for our algorithms and for BlackJAX's own: ``init``, ``step``, ``sample``.

Every test runs the same code for all of them, on a normal target of known moments.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rvrs import proposals, vi
from rvrs.bench.peers import blackjax

NUM_STEPS = 2000
# Of the coordinates "a" (two of them) and "b", which are correlated.
MEAN = np.array([0.5, -0.4, 0.8])
FACTOR = np.array([[0.5, 0.0, 0.0], [0.3, 0.4, 0.0], [0.0, 0.2, 0.3]])
PRECISION = np.linalg.inv(FACTOR @ FACTOR.T)


def log_density(position):
    away = jnp.concatenate([position["a"], position["b"][None]]) - MEAN
    return -0.5 * away @ PRECISION @ away


def optimizer():
    return optax.adam(optax.cosine_decay_schedule(2e-2, NUM_STEPS))


def ours(**settings):
    return vi.as_top_level_api(log_density, optimizer(), **settings)


ALGORITHMS = {
    "meanfield_vi": lambda: blackjax().meanfield_vi(log_density, optimizer(), num_samples=5),
    "fullrank_vi": lambda: blackjax().fullrank_vi(log_density, optimizer(), num_samples=5),
    "rvrs, diagonal": ours,
    "rvrs, mvn": lambda: ours(proposal="mvn"),
    "rvrs, score function": lambda: ours(proposal="mvn", estimator="score"),
    "rvrs, flow": lambda: ours(proposal=proposals.coupling_flow(num_layers=2, nn_width=6)),
}
# Independent normals that are fitted to the exclusive divergence have the conditional variances.
CONDITIONAL_SD = 1 / np.sqrt(np.diag(PRECISION))
MARGINAL_SD = np.sqrt(np.diag(FACTOR @ FACTOR.T))

every_algorithm = pytest.mark.parametrize(
    "name",
    [
        *list(ALGORITHMS)[:3],
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(ALGORITHMS)[3:]),
    ],
)


@functools.cache
def algorithm(name):
    return ALGORITHMS[name]()


def start():
    return {"a": jnp.zeros(2), "b": jnp.zeros(())}


@functools.cache
def trained(name):
    """By BlackJAX's own loop."""
    return blackjax().util.run_inference_algorithm(
        jax.random.key(0),
        algorithm(name),
        NUM_STEPS,
        initial_state=algorithm(name).init(start()),
        transform=lambda state, info: info.elbo,
    )


@every_algorithm
def test_the_three_functions_have_the_same_arguments(name):
    init, step, sample = algorithm(name)[:3]
    assert list(inspect.signature(init).parameters)[:1] == ["position"]
    assert list(inspect.signature(step).parameters)[:2] == ["rng_key", "state"]
    assert len(inspect.signature(sample).parameters) >= 3
    assert type(algorithm(name))._fields[:3] == ("init", "step", "sample")


@every_algorithm
def test_states_are_pytrees_that_keep_their_structure_and_types(name):
    state = algorithm(name).init(start())
    after, _ = jax.jit(algorithm(name).step)(jax.random.key(0), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert jnp.shape(new) == jnp.shape(old)
        assert jnp.result_type(new) == jnp.result_type(old)


@every_algorithm
def test_every_step_of_a_run_tells_its_elbo(name):
    _, elbos = trained(name)
    # What BlackJAX calls so has the sign of a loss.
    elbos = elbos if name.startswith("rvrs") else -elbos
    assert elbos.shape == (NUM_STEPS,)
    exact = 0.5 * np.linalg.slogdet(2 * np.pi * FACTOR @ FACTOR.T)[1]
    lost = 0.5 * (np.log(np.diag(PRECISION)).sum() - np.linalg.slogdet(PRECISION)[1])
    expected = exact - lost if name == "meanfield_vi" else exact
    assert abs(jnp.mean(elbos[-500:]) - expected) < 0.1
    assert jnp.mean(elbos[:100]) < expected - 0.5


@every_algorithm
def test_steps_and_draws_depend_on_the_key_alone(name):
    state = algorithm(name).init(start())
    step = jax.jit(algorithm(name).step)
    for function in (step, lambda key, at: algorithm(name).sample(key, at, 3)):
        first, again, other = (
            jax.tree.leaves(function(jax.random.key(seed), state)) for seed in (1, 1, 2)
        )
        assert all(map(np.array_equal, first, again))
        assert not all(map(np.array_equal, first, other))


@every_algorithm
def test_starts_are_vmapped(name):
    states = jax.vmap(algorithm(name).init)(jax.tree.map(lambda x: jnp.stack([x, x + 1]), start()))
    keys = jax.random.split(jax.random.key(0), 2)
    _, infos = jax.jit(jax.vmap(algorithm(name).step))(keys, states)
    assert infos.elbo.shape == (2,)
    assert jnp.all(jnp.isfinite(infos.elbo))


@every_algorithm
def test_draws_have_the_structure_of_the_position_and_the_moments_of_the_target(name):
    num_draws = 4000
    state, _ = trained(name)
    draws = algorithm(name).sample(jax.random.key(1), state, num_draws)
    assert jax.tree.map(jnp.shape, draws) == {"a": (num_draws, 2), "b": (num_draws,)}
    flat = np.concatenate([draws["a"], draws["b"][:, None]], axis=1)
    np.testing.assert_allclose(flat.mean(0), MEAN, atol=0.12 * MARGINAL_SD.min())
    sd = CONDITIONAL_SD if name == "meanfield_vi" else MARGINAL_SD
    np.testing.assert_allclose(flat.std(0), sd, rtol=0.1)
