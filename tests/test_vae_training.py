"""Training of a tiny autoencoder, and RVRS of it against quadrature."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs import vae_training
from rvrs.guides import _semi_posterior
from rvrs.vae import VAE
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


class Stopped(Exception):  # noqa: N818
    """Ends a training from outside."""


@pytest.mark.parametrize("name", ["standard", pytest.param("rvrs", marks=pytest.mark.slow)])
def test_a_stopped_training_goes_on_to_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(vae_training, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    images = np.concatenate([IMAGES] * 4)
    options = {"num_epochs": 3, "batch_size": 2, "learning_rate": 0.01, "progress": False}
    # Six batches of an epoch are one call, so that there is a checkpoint after each epoch.
    run = lambda **more: train(  # noqa: E731
        METHODS[name](TINY), jax.random.key(0), images, **options, **more
    )
    state, losses = run()
    path, seen = tmp_path / "vae.npz", []

    def stop(done, latest):
        seen.append((done, len(latest)))
        if done == 12:
            raise Stopped

    with pytest.raises(Stopped):
        run(checkpoint=path, callback=stop)
    assert seen == [(6, 6), (12, 6)]
    again, all_losses = run(resume=path, checkpoint=path)
    np.testing.assert_array_equal(all_losses, losses)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"description": {"method": "other"}}, "description: method"),
        ({"num_epochs": 5}, "training: num_epochs"),
        ({"rng_key": jax.random.key(1)}, "training: seed"),
        ({"images": np.ones((6, 5), np.uint8)}, "images"),
        ({"method": METHODS["uha"](TINY)}, "does not fit"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_and_kept(change, words, tmp_path, monkeypatch):
    monkeypatch.setattr(vae_training, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    path = tmp_path / "vae.npz"
    options = {
        "method": METHODS["standard"](TINY),
        "rng_key": jax.random.key(0),
        "images": np.concatenate([IMAGES] * 2),
        "batch_size": 2,
        "description": {"method": "standard"},
        "progress": False,
        "checkpoint": path,
    }
    train(**options)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words):
        train(**options | {"resume": path} | change)
    assert path.read_bytes() == before


def test_a_step_without_a_finite_gradient_changes_nothing():
    standard = METHODS["standard"](TINY)

    def loss(rng_key, params, images):
        # Of one batch in two.
        return standard.loss(rng_key, params, images) * jnp.where(images[0, 0] == 1, jnp.nan, 1.0)

    images = np.array([[1, 0, 1, 0, 1], [0, 1, 1, 0, 0]], np.uint8)
    options = {"num_epochs": 4, "batch_size": 1, "progress": False, "params": params()}
    state, losses = train(standard._replace(loss=loss), jax.random.key(0), images, **options)
    assert np.isfinite(losses).sum() == 4
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state))
    assert int(state.opt_state[0].count) == 4


def test_a_folder_that_is_not_there_is_told_before_training(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        train(
            METHODS["standard"](TINY),
            jax.random.key(0),
            IMAGES,
            batch_size=3,
            checkpoint=tmp_path / "missing" / "vae.npz",
        )


def test_the_learning_rate_may_be_a_schedule():
    frozen, _ = train(
        METHODS["standard"](TINY),
        jax.random.key(0),
        IMAGES,
        batch_size=3,
        learning_rate=lambda step: 0.0 * step,
        params=params(),
        progress=False,
    )
    jax.tree.map(np.testing.assert_array_equal, frozen.params, params())


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


@pytest.mark.slow
def test_the_memory_of_an_evaluation_does_not_grow_with_the_proposals():
    # Images are no small matter: at Z = 0.025, T of 256 of them comes from four million proposals.
    vae = VAE(num_latent=2, num_hidden=4)
    images = np.zeros((256, vae.num_pixels), np.uint8)
    params, arguments = vae.init(jax.random.key(0)), ((images,), {})

    def megabytes(target_acceptance):
        guide = rvrs_guide(vae, target_acceptance, sampler="exact")
        function = partial(_semi_posterior.evaluate, guide, guide.plate_of(arguments), 1, 100)
        program = jax.jit(function).lower(jax.random.key(1), params, np.arange(256), arguments)
        return program.compile().memory_analysis().temp_size_in_bytes / 1e6

    few, many = megabytes(0.5), megabytes(0.025)
    assert many < 500
    # What does grow is a log weight for each.
    assert many - few < 3 * 256 * 16_000 * 4 / 1e6
