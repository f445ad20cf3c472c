"""The bounds of a tiny autoencoder against quadrature over its two latent variables.

The quadrature has the networks and densities written a second time, in NumPy.
"""

import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from scipy.special import logsumexp

from rvrs.experiments import vae_steps
from rvrs.vae import VAE, Layer, log_likelihood
from rvrs.vae_training import METHODS, guided, iwae, rvrs, standard, uha

TINY = VAE(num_pixels=5, num_latent=2, num_hidden=4)
IMAGES = np.array([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]], np.uint8)
NUM_KEYS = 20_000


@cache
def params():
    # A posterior that is far from normal, and an encoder that is wide enough for importance weights
    # to have a variance and that tells the images apart.
    networks = TINY.init(jax.random.key(2))
    *hidden, (weights, biases) = jax.tree.map(lambda leaf: 2 * leaf, networks["encoder"])
    last = (weights * jnp.array([0.5, 0.5, 0.15, 0.15]), biases + jnp.array([0, 0, 0.2, 0.2]))
    return {
        "encoder": (*hidden, Layer(*last)),
        "decoder": jax.tree.map(lambda leaf: 3 * leaf + 0.3, networks["decoder"]),
    }


def network(layers, x):
    *hidden, last = [(np.asarray(w, float), np.asarray(b, float)) for w, b in layers]
    for weights, biases in hidden:
        x = np.tanh(x @ weights + biases)
    return x @ last[0] + last[1]


class Exact(NamedTuple):
    """By quadrature, of every image."""

    log_evidence: np.ndarray
    elbo: np.ndarray
    relative_variance: np.ndarray
    """Of the importance weight of a draw from the encoder."""


@cache
def exact():
    axis = np.linspace(-15, 15, 401)
    z = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    log_cell = 2 * np.log(axis[1] - axis[0])
    logits = network(params()["decoder"], z)
    loc, log_scale = np.split(network(params()["encoder"], IMAGES.astype(float)), 2, -1)
    rows = []
    for image, m, s in zip(IMAGES, loc, log_scale, strict=True):
        log_p = -(z**2).sum(-1) / 2 - np.log(2 * np.pi)
        log_p += (image * logits - np.logaddexp(0, logits)).sum(-1)
        log_q = (-(((z - m) / np.exp(s)) ** 2) / 2 - s).sum(-1) - np.log(2 * np.pi)
        np.testing.assert_allclose(logsumexp(log_q + log_cell), 0, atol=1e-6)
        log_evidence = logsumexp(log_p + log_cell)
        second_moment = np.exp(logsumexp(2 * log_p - log_q + log_cell) - 2 * log_evidence)
        elbo = np.sum(np.exp(log_q + log_cell) * (log_p - log_q))
        rows.append((log_evidence, elbo, second_moment - 1))
    return Exact(*np.array(rows).T)


@cache
def method(name, **options):
    return METHODS[name](TINY, **options)


@cache
def start(method):
    return method.init(jax.random.key(0)) | params()


@cache
def compiled(method):
    return jax.jit(jax.vmap(method.loss, in_axes=(0, None, None)))


def losses(method, images=IMAGES, seed=0, **changes):
    """The loss at many keys."""
    keys = jax.random.split(jax.random.key(seed), NUM_KEYS)
    return np.asarray(compiled(method)(keys, start(method) | changes, images), float)


def uha_losses(eta):
    share = eta / 0.25  # of the largest step
    logit = jnp.asarray(np.log(share) - np.log1p(-share), float)
    return losses(method("uha"), auto_eta0=logit)


def z_score(values, wanted):
    return (values.mean() - wanted) / (values.std() / np.sqrt(len(values)))


def difference_z_score(first, second):
    error = np.sqrt(first.var() / len(first) + second.var() / len(second))
    return (first.mean() - second.mean()) / error


def test_the_cases_are_hard_enough_to_tell_the_bounds_apart():
    assert np.all(exact().log_evidence - exact().elbo > 0.5)
    assert np.all(exact().relative_variance > 1)
    assert np.all(exact().relative_variance < 10)


def test_the_importance_bound_of_each_image_is_its_log_evidence():
    num_samples = 20_000
    bound = TINY.importance_bound(jax.random.key(0), params(), IMAGES, num_samples)
    error = np.sqrt(exact().relative_variance / num_samples)
    assert bound.shape == (3,)
    assert np.all(abs(bound - exact().log_evidence) / error < 4)


def test_the_importance_bound_does_not_depend_on_the_chunks():
    bound = partial(TINY.importance_bound, jax.random.key(0), params(), IMAGES, 100)
    np.testing.assert_allclose(bound(chunk=33), bound(chunk=1000), rtol=1e-5)


def test_iwae_with_many_samples_is_the_log_evidence():
    num_samples = 20_000
    loss = jax.jit(method("iwae", num_samples=num_samples).loss)
    bound = -loss(jax.random.key(0), params(), IMAGES)
    error = np.sqrt(exact().relative_variance.sum() / num_samples) / len(IMAGES)
    assert abs(bound - exact().log_evidence.mean()) / error < 4


def test_the_standard_loss_is_minus_the_elbo():
    assert abs(z_score(losses(method("standard")), -exact().elbo.mean())) < 4


def test_iwae_with_one_sample_is_the_standard_loss():
    one = losses(method("iwae", num_samples=1))
    assert abs(difference_z_score(one, losses(method("standard"), seed=1))) < 4


def test_iwae_averages_weights_within_each_image():
    several = method("iwae", num_samples=5)
    singles = [losses(several, image[None], seed) for seed, image in enumerate(IMAGES, start=1)]
    assert abs(difference_z_score(losses(several), np.mean(singles, axis=0))) < 4


def test_uha_estimates_the_evidence_without_bias():
    for eta in (0.2, 0.1):
        relative = np.exp(-len(IMAGES) * uha_losses(eta) - exact().log_evidence.sum())
        assert abs(z_score(relative, 1)) < 4


def test_uha_with_vanishing_steps_is_the_elbo():
    assert abs(z_score(uha_losses(1e-6), -exact().elbo.mean())) < 4


def test_uha_is_tighter_than_the_elbo():
    values = uha_losses(0.2)
    assert z_score(values, -exact().elbo.mean()) < -10
    assert z_score(values, -exact().log_evidence.mean()) > 4


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_has_a_gradient(name):
    gradient = jax.jit(jax.grad(method(name).loss, argnums=1))
    weights = start(method(name))
    found = gradient(jax.random.key(0), weights, IMAGES)
    assert jax.tree.structure(found) == jax.tree.structure(weights)
    for leaf in jax.tree.leaves(found):
        assert np.all(np.isfinite(leaf))
        assert np.any(leaf != 0)


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_takes_batches_of_any_size(name):
    for images in (IMAGES, IMAGES[:1]):
        loss = jax.eval_shape(method(name).loss, jax.random.key(0), start(method(name)), images)
        assert loss.shape == ()


def test_the_type_of_a_parameter_does_not_change_in_a_step():
    for leaf in jax.tree.leaves(start(method("uha"))):
        assert not leaf.weak_type


def test_methods_start_from_the_same_networks():
    expected = TINY.init(jax.random.key(0))
    for name in METHODS:
        found = method(name).init(jax.random.key(0))
        assert found.keys() >= expected.keys()
        for network in expected:
            jax.tree.map(np.testing.assert_array_equal, found[network], expected[network])


def brute_force_likelihood(pixels, logits):
    pixels, logits = np.asarray(pixels, float), np.asarray(logits, float)
    return np.sum(pixels * logits - np.logaddexp(0, logits), axis=-1)


@pytest.mark.parametrize("num_pixels", [1, 5, 8, 64, 783, 784])
def test_the_log_likelihood_and_its_gradients_are_those_of_bernoulli_pixels(num_pixels):
    keys = jax.random.split(jax.random.key(num_pixels))
    with jax.enable_x64(True):
        logits = 5 * jax.random.normal(keys[0], (3, num_pixels), float)
        pixels = jax.random.uniform(keys[1], (3, num_pixels), float)
        found = log_likelihood(pixels, logits)
        slopes = jax.grad(lambda *x: log_likelihood(*x).sum(), argnums=(0, 1))(pixels, logits)
    np.testing.assert_allclose(found, brute_force_likelihood(pixels, logits), rtol=1e-13)
    np.testing.assert_allclose(slopes[0], logits)
    sigmoid = 1 / (1 + np.exp(-np.asarray(logits)))
    np.testing.assert_allclose(slopes[1], np.asarray(pixels) - sigmoid, rtol=1e-12)


@pytest.mark.parametrize("size", [0.0, 1e-3, 90.0, 1e6, 1e30])
def test_the_log_likelihood_does_not_overflow(size):
    logits = jnp.full((16,), size) * jnp.array([1.0, -1.0] * 8)
    for pixels in (jnp.zeros(16), jnp.ones(16), (logits > 0).astype(float)):
        found = log_likelihood(pixels, logits)
        exact = brute_force_likelihood(pixels, logits)
        np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
        assert np.all(np.isfinite(jax.grad(log_likelihood, argnums=1)(pixels, logits)))


@pytest.mark.parametrize("make", [standard, iwae, uha, rvrs], ids=lambda make: make.__name__)
def test_every_method_has_one_logarithm_for_several_pixels(make):
    # NumPyro's own has a log1p for each; what a plate expands must not fall back to it.
    method = make(TINY)
    loss = jax.make_jaxpr(method.loss)(jax.random.key(0), method.init(jax.random.key(0)), IMAGES)
    assert not re.search(rf"\[[0-9,]*\b{TINY.num_pixels}\] = log1p", str(loss))


def test_decoded_pixels_expand_as_numpyro_wants_it():
    pixels = TINY.decode(params()["decoder"], jnp.ones(2))
    assert (pixels.batch_shape, pixels.event_shape) == ((), (5,))
    expanded = pixels.expand((3,))
    assert (expanded.batch_shape, expanded.event_shape) == ((3,), (5,))
    np.testing.assert_allclose(expanded.log_prob(IMAGES), pixels.log_prob(IMAGES), rtol=1e-6)
    assert expanded.sample(jax.random.key(0), (4,)).shape == (4, 3, 5)


def test_glorot_weights_and_two_hidden_layers():
    vae = VAE()
    weights = vae.init(jax.random.key(0))
    shapes = {name: [layer.weights.shape for layer in weights[name]] for name in weights}
    assert shapes == {
        "encoder": [(784, 200), (200, 200), (200, 100)],
        "decoder": [(50, 200), (200, 200), (200, 784)],
    }
    for layer in (*weights["encoder"], *weights["decoder"]):
        np.testing.assert_allclose(
            layer.weights.std(), np.sqrt(2 / sum(layer.weights.shape)), rtol=0.05
        )
        assert not layer.biases.any()


def test_the_model_and_the_guide_are_what_numpyro_expects():
    def run(images):
        with handlers.seed(rng_seed=0):
            guide = handlers.trace(TINY.encoder_guide).get_trace(images)
            model = handlers.trace(handlers.replay(TINY.model, guide)).get_trace(images)
        assert set(guide) == {"encoder", "images", "z"}
        assert set(model) == {"decoder", "images", "z", "pixels"}
        for site in (guide["z"], model["z"], model["pixels"]):
            assert site["fn"].batch_shape == (len(images),)
            assert site["fn"].event_dim == 1
            (frame,) = site["cond_indep_stack"]
            assert (frame.name, frame.dim, frame.size) == ("images", -1, len(images))

    for images in (IMAGES, IMAGES[:1]):
        jax.eval_shape(run, images)


def test_stock_numpyro_has_the_elbo_of_the_standard_method():
    trace_elbo = guided(TINY, lambda: TINY.encoder_guide)
    assert abs(z_score(losses(trace_elbo), -exact().elbo.mean())) < 4


def test_the_model_trains_with_stock_svi():
    svi = SVI(TINY.model, TINY.encoder_guide, optax.adam(1e-2), Trace_ELBO())
    result = svi.run(jax.random.key(0), 300, IMAGES, progress_bar=False)
    assert result.losses[-50:].mean() < result.losses[:50].mean() - 1


def test_the_model_and_the_guide_can_be_mapped_over_batches():
    def elbo(images):
        key = jax.random.key(0)
        return Trace_ELBO().loss(key, params(), TINY.model, TINY.encoder_guide, images)

    batches = np.stack([IMAGES, IMAGES[::-1]])
    mapped = jax.jit(jax.vmap(elbo))(batches)
    np.testing.assert_allclose(mapped, [jax.jit(elbo)(batch) for batch in batches], rtol=1e-5)


@pytest.mark.parametrize("x64", [False, True])
def test_bytes_become_floats_of_the_default_precision(x64):
    def run(key):
        with handlers.seed(rng_seed=key):
            model = handlers.trace(TINY.model).get_trace(IMAGES)
        weights = TINY.init(key)
        loss = standard(TINY).loss(key, weights, IMAGES)
        return jax.tree.leaves((weights, model["pixels"]["value"], model["z"]["value"], loss))

    with jax.enable_x64(x64):
        wanted = jnp.float64 if x64 else jnp.float32
        for leaf in jax.eval_shape(run, jax.random.key(0)):
            assert leaf.dtype == wanted


def test_wrong_images_are_refused_by_name():
    key = jax.random.key(0)
    weights = params()
    calls = [
        lambda images: TINY.importance_bound(key, weights, images),
        lambda images: standard(TINY).loss(key, weights, images),
        handlers.seed(TINY.model, 0),
        handlers.seed(TINY.encoder_guide, 0),
    ]
    for call in calls:
        for images in (IMAGES[0], IMAGES[None], IMAGES[:, :4], IMAGES[:0]):
            with pytest.raises(ValueError, match=r"images must have the shape \(rows, 5\)"):
                call(images)
        for images in (IMAGES * 255, IMAGES - 1.0, IMAGES * np.nan):
            with pytest.raises(ValueError, match="images must have values from 0 to 1"):
                call(images)
    with pytest.raises(ValueError, match=r"images must have the shape \(rows, 5\)"):
        jax.jit(standard(TINY).loss)(key, weights, IMAGES[:, :4])


def test_images_may_be_a_constant_of_a_compiled_function():
    images = jnp.asarray(IMAGES)
    jax.eval_shape(lambda key: standard(TINY).loss(key, params(), images), jax.random.key(0))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_pixels", lambda: VAE(num_pixels=0)),
        ("num_latent", lambda: VAE(num_latent=2.0)),
        ("num_hidden", lambda: VAE(num_hidden=-1)),
        ("num_samples", lambda: iwae(TINY, num_samples=0)),
        ("num_steps", lambda: uha(TINY, num_steps=0)),
        ("num_samples", lambda: TINY.importance_bound(jax.random.key(0), {}, IMAGES, 0)),
        ("chunk", lambda: TINY.importance_bound(jax.random.key(0), {}, IMAGES, chunk=0)),
        ("num_steps", lambda: vae_steps.measure({}, IMAGES, num_steps=0)),
        ("images", lambda: vae_steps.measure({"standard": standard(TINY)}, IMAGES)),
        ("methods", lambda: vae_steps.measure({"uha": uha(TINY)}, IMAGES)),
        ("auto_eta0", lambda: jax.eval_shape(uha(TINY).loss, jax.random.key(0), params(), IMAGES)),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, call):
    with pytest.raises(ValueError, match=name):
        call()


def test_steps_are_timed_in_turns():
    methods = {"iwae": method("iwae"), "standard": method("standard")}
    weighted, reference = vae_steps.measure(methods, IMAGES, num_steps=1, batch_size=1)
    assert (weighted.name, reference.name) == ("iwae", "standard")
    assert reference.milliseconds > 0
    assert reference.ratio == 1
    assert weighted.ratio == weighted.milliseconds / reference.milliseconds
