"""The optimizer of parameters that every step moves, and of those that belong to data points."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rvrs.semi_training import _scale_by_adam


def updates(optimizer, gradients):
    """Of one parameter, from a series of its gradients."""

    def step(state, gradient):
        update, state = optimizer.update(gradient, state)
        return state, update

    return np.asarray(jax.lax.scan(step, optimizer.init(jnp.zeros(())), jnp.asarray(gradients))[1])


def every(steps, values):
    """Gradients of a parameter that has one every so many steps."""
    gradients = np.zeros(steps * len(values), np.float32)
    gradients[::steps] = values
    return gradients


@pytest.mark.parametrize("steps_between", [1, 20])
def test_a_bad_start_is_forgotten(steps_between):
    values = np.concatenate([np.full(100, 100.0), np.ones(900)])
    gradients = every(steps_between, values)
    last = updates(_scale_by_adam(steps_between), gradients)[-steps_between:].sum()
    # The step of a parameter whose gradient has been 1 all the time, over one visit.
    wanted = updates(_scale_by_adam(steps_between), every(steps_between, np.ones(1000)))
    assert last == pytest.approx(wanted[-steps_between:].sum(), rel=0.1)
    forever = updates(optax.scale_by_adam(b2=1 - 1 / (1000 * steps_between)), gradients)
    assert forever[-steps_between:].sum() < 0.1 * last


def test_a_parameter_that_is_seldom_moved_never_jumps():
    values = np.random.default_rng(0).normal(size=200)
    found = updates(_scale_by_adam(20.0), every(20, values))
    # Squares are averaged over all steps, of which one in 20 is a visit.
    assert np.abs(found).max() < 2 * np.sqrt(20)


def test_skewed_gradients_of_mean_zero_move_nothing_in_the_long_run():
    # One in a hundred is large: averaged over few, it would count less than the others.
    random = np.random.default_rng(1)
    values = np.where(random.random(40_000) < 0.01, 99.0, -1.0)
    moved = updates(_scale_by_adam(1), values)[20_000:]
    short = updates(optax.scale_by_adam(b2=0.9), values)[20_000:]
    assert short.mean() < -0.3
    assert abs(moved.mean()) < 0.03
