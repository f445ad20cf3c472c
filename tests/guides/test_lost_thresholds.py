"""Points that have left their T behind, and batches of which few points have draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs import vae, vae_training
from rvrs.core import threshold
from rvrs.core.rejection import Draws, Tally
from rvrs.guides._semi_target import Points

NUM_IMAGES, TARGET = 40, 0.2


@pytest.fixture(scope="module")
def trained():
    """A method, its parameters and images, and thresholds after a sight of all of them."""
    rng = np.random.default_rng(0)
    images = jnp.asarray((rng.random((NUM_IMAGES, 16)) < 0.3).astype(np.uint8))
    autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    method = vae_training.rvrs(autoencoder, TARGET, num_proposals=40)
    params = method.init(jax.random.key(0))
    unseen = method.first_state(NUM_IMAGES)
    everything = jnp.arange(NUM_IMAGES)
    seen = method.see(jax.random.key(1), params, unseen, everything, images)
    return method, params, images, seen


def step(trained, state, key=2):
    method, params, images, _ = trained
    key = jax.random.key(key)
    return method.remembering_loss(key, params, state, jnp.arange(NUM_IMAGES), images)[1]


@pytest.mark.slow
def test_all_points_of_a_batch_get_a_threshold_at_first_sight(trained):
    # More than are solved for at once, and not a multiple of that.
    *_, seen = trained
    assert np.all(np.asarray(seen["memory"]) > 0)
    assert np.unique(np.asarray(seen["value"])).size == NUM_IMAGES
    acceptance = float(step(trained, seen)["acceptance"])
    assert acceptance == pytest.approx(TARGET, rel=0.25)


def test_a_point_that_left_its_threshold_behind_gets_a_new_one_and_the_others_keep_theirs(trained):
    *_, seen = trained
    lost = np.array([3, 17, 30])
    wrong = seen | {"value": seen["value"].at[lost].add(-30.0)}
    # The visit at which they get no draws finds it out ...
    found = step(trained, wrong)
    assert np.flatnonzero(np.asarray(found["memory"]) == 0).tolist() == lost.tolist()
    assert int(found["num_dropped"]) >= len(lost)
    # ... and at the next one they are solved for before anything is drawn.
    again = step(trained, found, key=3)
    assert np.all(np.asarray(again["memory"])[lost] > 0)
    errors = np.asarray(again["value"] - seen["value"])
    # 25 proposals tell T this well; where it was left alone it has moved by one step.
    assert np.all(np.abs(errors[lost]) < 2.0)
    assert np.all(np.abs(np.delete(errors, lost)) < 2.0)


def test_a_sight_of_a_batch_changes_points_without_a_threshold_only(trained):
    method, params, images, seen = trained
    unknown = np.array([0, 5, 39])
    some = seen | {"memory": seen["memory"].at[unknown].set(0.0)}
    again = method.see(jax.random.key(9), params, some, jnp.arange(NUM_IMAGES), images)
    changed = np.flatnonzero(np.asarray(again["value"] != seen["value"]))
    assert changed.tolist() == unknown.tolist()
    assert np.all(np.asarray(again["memory"]) > 0)


def test_points_at_their_threshold_are_not_solved_for_again(trained):
    *_, state = trained
    for key in range(3, 8):
        state = step(trained, state, key)
    # Each memory has grown by one a step, if it was not lost by chance.
    assert np.mean(np.asarray(state["memory"]) == 0) < 0.1
    assert np.mean(np.asarray(state["memory"]) > 5) > 0.6


def gradient_and_value(num_complete, batch_size):
    autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    guide = vae_training.rvrs_guide(autoencoder, 0.5, num_proposals=3)
    assert guide.settings.expected_complete == pytest.approx(0.5)
    nothing = jnp.zeros(batch_size)
    complete = jnp.arange(batch_size) < num_complete
    draws = Draws(
        noise=None,
        log_weight=nothing[None],
        num_draws=2 * complete,
        complete=complete,
        log_normalizer=nothing,
        tally=Tally(*[nothing] * len(Tally._fields)),
    )
    points = Points(nothing, nothing, threshold.init(nothing), 100)

    def total(x):
        return guide._of_all_points(points, draws, jnp.where(complete, x, 0.0), None)

    value, gradient = jax.value_and_grad(total)(3.0)
    return float(value), float(gradient)


@pytest.mark.parametrize("num_complete", [8, 9, 16, 20])
def test_points_with_draws_stand_for_all(num_complete):
    # At least 0.8 of the 10 of 20 that are expected.
    value, gradient = gradient_and_value(num_complete, 20)
    assert value == pytest.approx(300.0)
    assert gradient == pytest.approx(100.0)


@pytest.mark.parametrize("num_complete", [1, 4, 7])
def test_the_gradient_of_far_fewer_points_than_expected_is_damped_and_the_value_is_not(
    num_complete,
):
    value, gradient = gradient_and_value(num_complete, 20)
    assert value == pytest.approx(300.0)
    assert gradient == pytest.approx(100.0 * num_complete / 8)


def test_a_batch_without_any_draws_has_no_value():
    value, _ = gradient_and_value(0, 20)
    assert np.isnan(value)


def test_the_exact_sampler_is_expected_to_complete_all_points():
    autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    guide = vae_training.rvrs_guide(autoencoder, 0.1, sampler="exact")
    assert guide.settings.expected_complete == 1.0
    budget = vae_training.rvrs_guide(autoencoder, 0.1)
    # 1 - 0.9^20 - 20 * 0.1 * 0.9^19
    assert budget.settings.expected_complete == pytest.approx(0.6082533, abs=1e-6)
