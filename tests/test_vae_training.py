"""Training of a tiny autoencoder, and RVRS of it against quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs import vae_training
from rvrs.vae_training import METHODS, rvrs_guide, train
from tests.test_vae import IMAGES, TINY, network, params


def quadrature_elbo(thresholds, epsilon):
    """``E_r[A] + log Z`` of every image at given thresholds."""
    axis = np.linspace(-15, 15, 401)
    z = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    log_cell = 2 * np.log(axis[1] - axis[0])
    logits = network(params()["decoder"], z)
    loc, log_scale = np.split(network(params()["encoder"], IMAGES.astype(float)), 2, -1)
    elbos, acceptances = [], []
    for image, m, s, t in zip(IMAGES, loc, log_scale, thresholds, strict=True):
        log_p = -(z**2).sum(-1) / 2 - np.log(2 * np.pi)
        log_p += (image * logits - np.logaddexp(0, logits)).sum(-1)
        log_q = (-(((z - m) / np.exp(s)) ** 2) / 2 - s).sum(-1) - np.log(2 * np.pi)
        a = epsilon + (1 - epsilon) / (1 + np.exp(-(log_p - log_q + t)))
        mass = np.exp(log_q + log_cell)
        acceptance = np.sum(mass * a)
        ratio = np.sum(mass * a * (log_p - log_q - np.log(a))) / acceptance
        elbos.append(ratio + np.log(acceptance))
        acceptances.append(acceptance)
    return np.array(elbos), np.array(acceptances)


@pytest.mark.parametrize("target_acceptance", [0.5, 0.1])
def test_the_elbo_at_images_never_seen_is_that_of_quadrature(target_acceptance):
    guide = rvrs_guide(TINY, target_acceptance)
    found = guide.evaluate(jax.random.key(0), params(), IMAGES, num_local=100_000)
    elbos, acceptances = quadrature_elbo(np.asarray(found.threshold), guide.settings.epsilon)
    assert abs(float(found.elbo) - elbos.sum()) < 4 * float(found.elbo_error)
    np.testing.assert_allclose(np.exp(found.log_normalizer), acceptances, rtol=0.03)
    # T was calibrated from the images and the parameters alone.
    np.testing.assert_allclose(acceptances, target_acceptance, rtol=0.2)


def test_rejection_closes_the_gap_to_the_evidence():
    key = jax.random.key(0)
    gaps = []
    for z in (1.0, 0.3, 0.03):
        found = rvrs_guide(TINY, z).evaluate(key, params(), IMAGES, num_local=50_000)
        gaps.append(float(found.marginal_elbo - found.elbo))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]
    assert gaps[2] < 0.05 * gaps[0]


def test_the_loss_of_rvrs_is_minus_its_elbo():
    # So many proposals that the normaliser, the log of their mean, has no bias to speak of.
    method = METHODS["rvrs"](TINY, 0.4, num_proposals=400)
    thresholds = np.array([2.0, 3.0, 4.0], np.float32)
    seen = {"value": jnp.asarray(thresholds), "memory": jnp.ones(3)}
    state = method.first_state(3) | seen

    @jax.jit
    @jax.vmap
    def losses(key):
        return method.step_loss(key, params(), state, jnp.arange(3), IMAGES)[0]

    values = np.asarray(losses(jax.random.split(jax.random.key(1), 4000)), float)
    elbos, _ = quadrature_elbo(thresholds, epsilon=1e-4)
    error = values.std() / np.sqrt(len(values))
    assert abs(values.mean() + elbos.mean()) < 4 * error + 0.002
    assert error < 0.01


@pytest.mark.parametrize("name", METHODS)
def test_training_lowers_the_loss(name):
    rng = np.random.default_rng(0)
    patterns = np.array([[1, 1, 0, 0, 1], [0, 0, 1, 1, 0]], np.uint8)
    images = patterns[rng.integers(0, 2, 60)]
    method = METHODS[name](TINY)
    state, losses = train(
        method,
        jax.random.key(0),
        images,
        num_epochs=40,
        batch_size=20,
        learning_rate=0.02,
        progress=False,
    )
    assert losses.shape == (120,)
    assert losses[-20:].mean() < losses[:5].mean() - 0.5
    assert set(state.params) >= {"encoder", "decoder"}


def test_every_image_has_a_threshold_that_only_its_batches_change():
    images = np.concatenate([IMAGES] * 2)
    method = METHODS["rvrs"](TINY, 0.3)
    state = method.first_state(len(images))
    index = jnp.array([4, 1])
    _, new = jax.jit(method.step_loss)(jax.random.key(0), params(), state, index, images[index])
    seen = np.asarray(new["memory"]) > 0
    np.testing.assert_array_equal(np.flatnonzero(seen), [1, 4])
    assert np.all(np.asarray(new["value"])[seen] != 0)


def test_training_starts_from_the_networks_of_another_method():
    method = METHODS["rvrs"](TINY)
    state, _ = train(
        method,
        jax.random.key(0),
        IMAGES,
        batch_size=3,
        learning_rate=1e-9,
        params=params(),
        progress=False,
    )
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old, atol=1e-6),
        state.params["decoder"],
        params()["decoder"],
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("num_epochs", {"num_epochs": 0}),
        ("batch_size", {"batch_size": 4}),
        ("learning_rate", {"learning_rate": 0.0}),
    ],
)
def test_wrong_arguments_of_training_are_refused_by_name(name, options):
    with pytest.raises(ValueError, match=name):
        train(METHODS["standard"](TINY), jax.random.key(0), IMAGES, **options)


def test_the_papers_number_of_proposals_is_the_default():
    assert vae_training.rvrs_guide(TINY, 0.05).settings.num_proposals == 40
