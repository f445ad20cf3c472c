"""A variational autoencoder of binary images to start from.

Encoder and decoder are multilayer perceptrons in plain JAX, and their weights trees of arrays.
:class:`VAE` has them as a NumPyro model with its guide, for stock ``SVI``, for
:class:`rvrs.AutoSemiRVRS` and for the methods of :mod:`rvrs.vae_training`. The bounds of two
methods are not comparable; :meth:`VAE.importance_bound` is the yardstick for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from jax.core import Tracer
from jax.scipy.special import logsumexp

from rvrs.core.arguments import check_count, check_key, check_like, check_positive, shown
from rvrs.core.problem import PRNGKey

__all__ = ["VAE", "Layer", "apply_network", "init_network"]


class Layer(NamedTuple):
    """An affine map, with weights ``(inputs, outputs)`` and biases ``(outputs,)``.

    >>> import jax
    >>> from rvrs import vae
    >>> network = vae.init_network(jax.random.key(0), num_inputs=4, num_hidden=8, num_outputs=2)
    >>> [layer.weights.shape for layer in network]
    [(4, 8), (8, 8), (8, 2)]
    """

    weights: Array
    biases: Array


Network = tuple[Layer, ...]
"""A multilayer perceptron with tanh between its layers."""
Params = dict[str, Any]
"""Unconstrained parameters: the networks ``"encoder"`` and ``"decoder"``, and those of a method."""


def init_network(rng_key: PRNGKey, num_inputs: int, num_hidden: int, num_outputs: int) -> Network:
    """A network with two hidden layers, Glorot's uniform weights and biases of 0.

    >>> import jax
    >>> from rvrs import vae
    >>> len(vae.init_network(jax.random.key(0), num_inputs=4, num_hidden=8, num_outputs=2))
    3
    """
    sizes = (num_inputs, num_hidden, num_hidden, num_outputs)
    glorot = jax.nn.initializers.glorot_uniform()
    keys = jax.random.split(rng_key, len(sizes) - 1)
    return tuple(
        Layer(glorot(key, shape), jnp.zeros(shape[1]))
        for key, shape in zip(keys, pairwise(sizes), strict=True)
    )


def apply_network(network: Network, inputs: Array) -> Array:
    """The outputs ``(..., outputs)`` at inputs ``(..., inputs)``.

    >>> import jax
    >>> from rvrs import vae
    >>> network = vae.init_network(jax.random.key(0), num_inputs=4, num_hidden=8, num_outputs=2)
    >>> vae.apply_network(network, jax.numpy.ones((5, 4))).shape
    (5, 2)
    """
    *hidden, last = network
    for layer in hidden:
        inputs = jnp.tanh(inputs @ layer.weights + layer.biases)
    return inputs @ last.weights + last.biases


# Numbers between 1 and 2 that are multiplied before a logarithm is taken: no type of float
# overflows, and more of them would save little.
_FACTORS = 8


@jax.custom_jvp
def log_likelihood(pixels: Array, logits: Array) -> Array:
    """``sum(pixels * logits - log(1 + exp(logits)))`` over the last axis: Bernoulli variables.

    As ``log(1 + e^l) = max(l, 0) + log(1 + e^-|l|)``, there is one logarithm for the product of
    several pixels. Logarithms are half of the work of a decoder that needs no gradient, as those
    of rejected proposals do.
    """
    columns = -(-logits.shape[-1] // _FACTORS)
    fill = [(0, 0)] * (logits.ndim - 1) + [(0, _FACTORS * columns - logits.shape[-1])]
    # What is filled up has a factor of 1.
    distance = jnp.pad(jnp.abs(logits), fill, constant_values=jnp.inf)
    factors = 1 + jnp.exp(-distance.reshape(*logits.shape[:-1], _FACTORS, columns))
    logarithms = jnp.log(jnp.prod(factors, axis=-2))
    return jnp.sum(pixels * logits - jnp.maximum(logits, 0), axis=-1) - jnp.sum(logarithms, axis=-1)


@log_likelihood.defjvp
def _log_likelihood_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (pixels, logits), (pixels_dot, logits_dot) = primals, tangents
    slopes = (pixels - jax.nn.sigmoid(logits)) * logits_dot + logits * pixels_dot
    return log_likelihood(pixels, logits), jnp.sum(slopes, axis=-1)


class _Pixels(dist.Independent):
    """An image of independent binary pixels; NumPyro's own, but for a faster log density."""

    def log_prob(self, value: Any, intermediates: Any = None) -> Array:
        logits: Any = cast(Any, self.base_dist).logits
        return log_likelihood(*jnp.broadcast_arrays(value, logits))

    def expand(self, batch_shape: Sequence[int]) -> "_Pixels":
        # That of NumPyro, which plates call, makes an ordinary distribution of it.
        shape = (*batch_shape, *self.event_shape)
        logits = jnp.broadcast_to(cast(Any, self.base_dist).logits, shape)
        return _Pixels(dist.Bernoulli(logits=logits), 1)


@dataclass(frozen=True)
class VAE:
    """Images of Bernoulli pixels, decoded from standard normal latent variables.

    Images are batches ``(n, num_pixels)`` of any type of number, with values from 0 to 1.

    >>> import jax
    >>> from rvrs import vae
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> params = autoencoder.init(jax.random.key(0))
    >>> images = jax.random.bernoulli(jax.random.key(1), 0.3, (5, 16)).astype("uint8")
    >>> autoencoder.importance_bound(jax.random.key(2), params, images, num_samples=10).shape
    (5,)
    """

    num_pixels: int = 784
    num_latent: int = 50
    """Dimension of the latent variable ``z`` of an image."""
    num_hidden: int = 200
    """Units of each of the two hidden layers of a network."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count(field.name, getattr(self, field.name))

    def init(self, rng_key: PRNGKey) -> Params:
        """Fresh weights of both networks."""
        check_key("rng_key", rng_key)
        return _init(self, rng_key)

    def init_encoder(self, rng_key: PRNGKey) -> Network:
        """Fresh weights, from pixels to the locations and the log scales of ``z``."""
        check_key("rng_key", rng_key)
        return init_network(rng_key, self.num_pixels, self.num_hidden, 2 * self.num_latent)

    def init_decoder(self, rng_key: PRNGKey) -> Network:
        """Fresh weights, from ``z`` to the logits of the pixels."""
        check_key("rng_key", rng_key)
        return init_network(rng_key, self.num_latent, self.num_hidden, self.num_pixels)

    def prior(self) -> dist.Distribution:
        """``p(z)``."""
        return dist.Normal(jnp.zeros(self.num_latent), jnp.ones(self.num_latent)).to_event(1)

    def encode(self, encoder: Network, images: Any) -> dist.Distribution:
        """``q(z | x)``: a diagonal normal for every image."""
        outputs = apply_network(encoder, self.checked(images))
        loc, log_scale = jnp.split(outputs, 2, axis=-1)
        return dist.Normal(loc, jnp.exp(log_scale)).to_event(1)

    def decode(self, decoder: Network, z: Array) -> dist.Distribution:
        """``p(x | z)`` at latent variables ``(..., num_latent)``."""
        return _Pixels(dist.Bernoulli(logits=apply_network(decoder, z)), 1)

    def model(self, images: Any) -> None:
        """The NumPyro model: sites ``z`` and ``pixels`` in the plate ``images``."""
        pixels = self.checked(images)
        decoder: Any = numpyro.param("decoder", self.init_decoder)
        with numpyro.plate("images", len(pixels), dim=-1):
            z: Any = numpyro.sample("z", self.prior())
            numpyro.sample("pixels", self.decode(decoder, z), obs=pixels)

    def encoder_guide(self, images: Any) -> None:
        """The NumPyro guide of :meth:`model`."""
        encoder: Any = numpyro.param("encoder", self.init_encoder)
        posterior = self.encode(encoder, images)
        with numpyro.plate("images", len(images), dim=-1):
            numpyro.sample("z", posterior)

    def log_weights(self, rng_key: PRNGKey, params: Params, images: Any, num_samples: int) -> Array:
        """``log p(x, z) - log q(z | x)`` at draws from ``q``, of the shape ``(num_samples, n)``."""
        check_key("rng_key", rng_key)
        check_count("num_samples", num_samples)
        self.check_networks(params)
        posterior = self.encode(params["encoder"], images)
        z: Any = posterior.sample(rng_key, (num_samples,))
        likelihood: Any = self.decode(params["decoder"], z).log_prob(self.checked(images))
        return likelihood + self.prior().log_prob(z) - posterior.log_prob(z)

    def importance_bound(
        self,
        rng_key: PRNGKey,
        params: Params,
        images: Any,
        num_samples: int = 5000,
        chunk: int = 500,
    ) -> Array:
        """The importance-weighted lower bound on ``log p(x)`` of each image, ``(n,)``.

        Parameters
        ----------
        params
            Those of any method; only the networks count.
        num_samples
            Draws from the encoder per image: the more, the tighter.
        chunk
            Draws that are decoded at once, for one image after the other: this bounds the memory.
        """
        check_key("rng_key", rng_key)
        check_count("num_samples", num_samples)
        check_count("chunk", chunk)
        self.check_networks(params)
        return _importance_bound(self, rng_key, params, self.checked(images), num_samples, chunk)

    def checked(self, images: Any) -> Array:
        """The images as floats, if they can be images of this autoencoder."""
        check_rows(images, self.num_pixels)
        if not isinstance(images, Tracer):
            check_pixels(images)
        return jnp.asarray(images, jnp.result_type(float))

    def check_networks(self, params: Any) -> None:
        """Refuse parameters that are not those of this autoencoder."""
        if not isinstance(params, Mapping) or not {"encoder", "decoder"} <= set(params):
            raise ValueError(
                "params must be a dict with the networks 'encoder' and 'decoder', as VAE.init and "
                f"vae_training.train give them, got {shown(params)}."
            )
        check_start(params, jax.eval_shape(self.init, jax.random.key(0)))


def check_start(params: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse parameters of other shapes than those that an autoencoder, or a method, has."""
    for name in set(params) & set(wanted):
        advice = "It is of an autoencoder of other sizes"
        check_like(f"params[{name!r}]", params[name], wanted[name], advice)


@partial(jax.jit, static_argnames="vae")
def _init(vae: VAE, rng_key: PRNGKey) -> Params:
    keys = jax.random.split(rng_key)
    return {"encoder": vae.init_encoder(keys[0]), "decoder": vae.init_decoder(keys[1])}


def check_rows(images: Any, num_pixels: int | None = None) -> tuple[int, ...]:
    """The shape of images, one per row."""
    try:
        # Not of a tracer: it has a shape, but no values.
        shape = images.shape if hasattr(images, "shape") else np.shape(images)
    except ValueError:  # rows of different lengths
        shape = ()
    if len(shape) != 2 or shape[0] == 0 or num_pixels not in (None, shape[1]):
        raise ValueError(
            f"images must have the shape (rows, {num_pixels or 'pixels'}), one image per row, got "
            f"{shape or shown(images)}; reshape them, or set num_pixels of the VAE."
        )
    return shape


# Images that are looked at before training: who passes grey values up to 255 does so in all of
# them, and a memory map may be larger than what can be read in a moment.
_CHECKED_ROWS = 10_000


def check_training(
    rng_key: Any, images: Any, num_epochs: Any, batch_size: Any, learning_rate: Any
) -> Any:
    """The images as an array; what an autoencoder cannot be trained with is refused."""
    check_key("rng_key", rng_key)
    num_images = check_rows(images)[0]
    images = images if hasattr(images, "shape") else np.asarray(images)
    check_pixels(images[:_CHECKED_ROWS])
    check_count("num_epochs", num_epochs)
    check_count("batch_size", batch_size)
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    if batch_size > num_images:
        raise ValueError(f"batch_size={batch_size} is more than the {num_images} images.")
    return images


def check_pixels(images: Any) -> None:
    """Refuse images whose values are not from 0 to 1."""
    # By NumPy: JAX would trace even known values inside of jit.
    values = np.asarray(images)
    # Of numbers other than complex ones; JAX's small floats are of no kind that NumPy knows.
    if values.dtype.kind not in "biufV" or values.dtype.names:
        raise ValueError(f"images must be numbers from 0 to 1, got the type {values.dtype}.")
    low, high = np.min(values), np.max(values)
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"images must have values from 0 to 1, got {low} to {high}; binarize them, or "
            "divide grey values by their maximum."
        )


@partial(jax.jit, static_argnames=("vae", "num_samples", "chunk"))
def _importance_bound(
    vae: VAE, rng_key: PRNGKey, params: Params, images: Array, num_samples: int, chunk: int
) -> Array:
    def of_image(key_and_image: tuple[PRNGKey, Array]) -> Array:
        key, image = key_and_image

        def log_weight(key: PRNGKey) -> Array:
            return vae.log_weights(key, params, image[None], num_samples=1)[0, 0]

        # vmap within a chunk leaves the encoder, which has no draw, outside of the batch.
        keys = jax.random.split(key, num_samples)
        return log_mean_exp(lax.map(log_weight, keys, batch_size=min(chunk, num_samples)))

    return lax.map(of_image, (jax.random.split(rng_key, len(images)), images))


def log_mean_exp(log_weights: Array) -> Array:
    """Over the first axis, that of the draws: what remains is one bound per image."""
    return logsumexp(log_weights, axis=0) - jnp.log(len(log_weights))
