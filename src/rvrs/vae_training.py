"""Training of a variational autoencoder by several bounds, on the same networks.

>>> import jax, jax.numpy as jnp
>>> from rvrs import vae, vae_training
>>> images = jax.random.bernoulli(jax.random.key(0), 0.3, (40, 16)).astype(jnp.uint8)
>>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
>>> standard = vae_training.METHODS["standard"](autoencoder)
>>> start, _ = vae_training.train(
...     standard, jax.random.key(1), images, num_epochs=2, batch_size=10, progress=False
... )
>>> method = vae_training.METHODS["rvrs"](autoencoder, target_acceptance=0.2)
>>> trained, losses = vae_training.train(
...     method, jax.random.key(2), images, batch_size=10, params=start.params, progress=False
... )
>>> guide = vae_training.rvrs_guide(autoencoder, target_acceptance=0.2)
>>> bool(guide.evaluate(jax.random.key(3), trained.params, images).elbo < 0)
True
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from numpyro import handlers
from numpyro.distributions import biject_to, constraints, kl_divergence
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoSemiDAIS
from tqdm.auto import tqdm

from rvrs import loop, storage
from rvrs.batches import Batches
from rvrs.core.arguments import (
    check_block,
    check_callable,
    check_choice,
    check_count,
    check_kind,
    check_reporting,
    check_target_acceptance,
)
from rvrs.core.problem import PRNGKey, PyTree
from rvrs.guides import AutoSemiRVRS
from rvrs.guides._semi_target import next_state, points_of
from rvrs.settings import Sampler
from rvrs.storage import Checkpoint
from rvrs.vae import VAE, Params, check_start, check_training, log_mean_exp

__all__ = [
    "METHODS",
    "Method",
    "TrainState",
    "guided",
    "iwae",
    "rvrs",
    "rvrs_guide",
    "standard",
    "train",
    "uha",
]

RememberingLoss = Callable[[PRNGKey, Params, PyTree, Array, Any], tuple[Array, PyTree]]


class Method(NamedTuple):
    """A way to train a :class:`rvrs.vae.VAE`.

    >>> import jax
    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.standard(autoencoder)
    >>> sorted(method.init(jax.random.key(0)))
    ['decoder', 'encoder']
    """

    init: Callable[[PRNGKey], Params]
    """First parameters. All methods have the same networks for the same key. To start from the
    networks of another method: ``method.init(rng_key) | {"encoder": ..., "decoder": ...}``."""
    loss: Callable[[PRNGKey, Params, Any], Array]
    """``(rng_key, params, images) -> scalar``: minus the bound, as the mean over the images."""
    first_state: Callable[[int], PyTree] = lambda num_images: ()
    """``(num_images) -> state``: what the method remembers of every image while training."""
    remembering_loss: RememberingLoss | None = None
    """``(rng_key, params, state, index, images) -> (scalar, state)``: the loss of a method that
    remembers, at the images that have these numbers among all."""
    see: Callable[[PRNGKey, Params, PyTree, Array, Any], PyTree] | None = None
    """``(rng_key, params, state, index, images) -> state``: what the method has to find out about
    an image before its first step on it, which a step does otherwise."""

    def step_loss(
        self, rng_key: PRNGKey, params: Params, state: PyTree, index: Array, images: Any
    ) -> tuple[Array, PyTree]:
        """The loss of a training step, and the next state, of a method of either kind."""
        if self.remembering_loss is None:
            return self.loss(rng_key, params, images), state
        return self.remembering_loss(rng_key, params, state, index, images)


def standard(vae: VAE) -> Method:
    """The ELBO, with one draw per image for the likelihood and the exact divergence.

    >>> import jax
    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.standard(autoencoder)
    >>> images = jax.numpy.zeros((3, 16))
    >>> method.loss(jax.random.key(1), method.init(jax.random.key(0)), images).shape
    ()
    """
    check_kind("vae", vae, VAE, "a rvrs.vae.VAE")

    def loss(rng_key: PRNGKey, params: Params, images: Any) -> Array:
        posterior = vae.encode(params["encoder"], images)
        z: Any = posterior.sample(rng_key)
        likelihood: Any = vae.decode(params["decoder"], z).log_prob(vae.checked(images))
        return jnp.mean(kl_divergence(posterior, vae.prior()) - likelihood)

    return Method(vae.init, loss)


def iwae(vae: VAE, num_samples: int = 10) -> Method:
    """The importance-weighted bound of Burda et al. (2015), with ``num_samples`` draws (K).

    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.iwae(autoencoder, num_samples=5)
    """
    check_kind("vae", vae, VAE, "a rvrs.vae.VAE")
    check_count("num_samples", num_samples)

    def loss(rng_key: PRNGKey, params: Params, images: Any) -> Array:
        # One mean of weights per image; of whole batches, the bound would be looser.
        return -jnp.mean(log_mean_exp(vae.log_weights(rng_key, params, images, num_samples)))

    return Method(vae.init, loss)


def uha(vae: VAE, num_steps: int = 10) -> Method:
    """Uncorrected Hamiltonian annealing (DAIS): ``num_steps`` (K) from encoder to posterior.

    Step sizes, damping, temperatures and masses are learned, and common to all images.

    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.uha(autoencoder, num_steps=5)
    """
    check_kind("vae", vae, VAE, "a rvrs.vae.VAE")
    check_count("num_steps", num_steps)

    make_guide = partial(
        AutoSemiDAIS,
        vae.model,
        vae.model,
        local_guide=vae.encoder_guide,
        K=num_steps,
        eta_init=0.005,
        eta_max=0.25,
        use_global_dais_params=True,
        subsample_plate="images",
    )
    return guided(vae, make_guide)


def guided(vae: VAE, make_guide: Callable[[], Callable[[Any], Any]]) -> Method:
    """The ELBO of a NumPyro guide of ``vae.model``, by stock ``Trace_ELBO()``.

    A guide is made whenever a loss is compiled: autoguides remember the size of their first batch.

    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.guided(autoencoder, lambda: autoencoder.encoder_guide)
    """
    check_kind("vae", vae, VAE, "a rvrs.vae.VAE")
    check_callable("make_guide", make_guide, "a function without arguments")

    # Compiled, since of all that an autoguide does at its first call only the values are needed.
    @jax.jit
    def init_guide(rng_key: PRNGKey) -> Params:
        image = jnp.zeros((1, vae.num_pixels))
        trace = handlers.trace(handlers.seed(make_guide(), rng_key)).get_trace(image)
        sites = [site for site in trace.values() if site["type"] == "param"]
        params = {site["name"]: _transform(site).inv(site["value"]) for site in sites}
        # Python's numbers would become arrays of another type at the first step.
        return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.result_type(x)), params)

    def init(rng_key: PRNGKey) -> Params:
        return init_guide(rng_key) | vae.init(rng_key)

    def loss(rng_key: PRNGKey, params: Params, images: Any) -> Array:
        def constrained(site: dict[str, Any]) -> Any:
            if site["type"] != "param":
                return None
            if site["name"] not in params:
                raise ValueError(f"params lacks {site['name']!r}; start from those of init.")
            return _transform(site)(params[site["name"]])

        model = handlers.substitute(vae.model, substitute_fn=constrained)
        guide = handlers.substitute(make_guide(), substitute_fn=constrained)
        total: Any = Trace_ELBO().loss(rng_key, {}, model, guide, images)
        return total / len(images)

    return Method(init, loss)


def _transform(site: dict[str, Any]) -> Any:
    return biject_to(site["kwargs"].get("constraint", constraints.real))


def rvrs(
    vae: VAE,
    target_acceptance: float = 0.1,
    *,
    num_samples: int = 2,
    num_proposals: int | None = None,
    sampler: Sampler = "budget",
) -> Method:
    """Reparameterized variational rejection sampling, with one threshold per image.

    By default as in the paper: the budget sampler with ``round(num_samples / target_acceptance)``
    proposals per image. ``loss`` solves for the thresholds afresh, so it is right for images that
    were never seen.

    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.rvrs(autoencoder, target_acceptance=0.2)
    """
    guide = rvrs_guide(
        vae,
        target_acceptance,
        num_samples=num_samples,
        num_proposals=num_proposals,
        sampler=sampler,
    )

    def step_loss(
        rng_key: PRNGKey, params: Params, state: PyTree, index: Array, images: Any
    ) -> tuple[Array, PyTree]:
        arguments = ((images,), {})
        plate = guide.plate_of(arguments)
        points = points_of(state, index)
        elbo, visit = guide.objective(plate, True, None, rng_key, params, points, arguments)
        assert visit is not None
        return -elbo / len(state["value"]), lax.stop_gradient(next_state(state, index, visit))

    def loss(rng_key: PRNGKey, params: Params, images: Any) -> Array:
        unseen = guide.first_state(len(images))
        return step_loss(rng_key, params, unseen, jnp.arange(len(images)), images)[0]

    def see(rng_key: PRNGKey, params: Params, state: PyTree, index: Array, images: Any) -> PyTree:
        arguments = ((images,), {})
        return guide.see(guide.plate_of(arguments), rng_key, params, index, state, arguments)

    return Method(vae.init, loss, guide.first_state, step_loss, see)


def rvrs_guide(
    vae: VAE,
    target_acceptance: float = 0.1,
    *,
    num_samples: int = 2,
    num_proposals: int | None = None,
    sampler: Sampler = "budget",
) -> AutoSemiRVRS:
    """The guide of :func:`rvrs`, whose ``evaluate`` and ``sample_posterior`` take any images.

    >>> from rvrs import vae, vae_training
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> guide = vae_training.rvrs_guide(autoencoder, target_acceptance=0.2)
    >>> guide.settings.num_proposals
    10
    """
    check_kind("vae", vae, VAE, "a rvrs.vae.VAE")
    check_choice("sampler", sampler, get_args(Sampler))
    if sampler == "budget" and num_proposals is None:
        check_count("num_samples", num_samples)
        check_target_acceptance(target_acceptance, epsilon=0)
        check_block(num_samples, target_acceptance)
        num_proposals = round(num_samples / target_acceptance)
    return AutoSemiRVRS(
        vae.model,
        vae.model,
        local_guide=vae.encoder_guide,
        subsample_plate="images",
        target_acceptance=target_acceptance,
        num_samples=num_samples,
        num_proposals=num_proposals,
        sampler=sampler,
    )


METHODS: dict[str, Callable[..., Method]] = {
    "standard": standard,
    "iwae": iwae,
    "uha": uha,
    "rvrs": rvrs,
}
"""By name, functions of a :class:`VAE` and of the method's options."""


class TrainState(NamedTuple):
    """What changes while training; :func:`train` returns the last one.

    >>> from rvrs import vae_training
    >>> vae_training.TrainState._fields
    ('params', 'opt_state', 'memory')
    """

    params: Params
    opt_state: PyTree
    memory: PyTree
    """The state of the method: of RVRS, the thresholds of all images."""


def first_train_state(
    method: Method, optimizer: Any, params: Params, num_images: int
) -> TrainState:
    """The state that training starts with."""
    return TrainState(params, optimizer.init(params), method.first_state(num_images))


def train_step(
    method: Method, optimizer: Any, rng_key: PRNGKey, state: TrainState, index: Array, images: Any
) -> tuple[TrainState, Array]:
    """One step on the images with the numbers ``index``; gives the loss before it, too.

    A step without a finite gradient, as of a batch no image of which got its draws, changes nothing
    but what the method remembers.
    """

    def loss(params: Params) -> tuple[Array, PyTree]:
        return method.step_loss(rng_key, params, state.memory, index, images)

    (value, memory), gradient = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(gradient, state.opt_state)
    params: Any = optax.apply_updates(state.params, updates)
    params, opt_state = loop.if_finite(
        (value, gradient), (params, opt_state), (state.params, state.opt_state)
    )
    return TrainState(params, opt_state, memory), value


class Training(NamedTuple):
    """What a checkpoint holds: a training under way."""

    state: TrainState
    losses: np.ndarray
    """Of all steps so far."""


def train(
    method: Method,
    rng_key: PRNGKey,
    images: Any,
    *,
    num_epochs: int = 1,
    batch_size: int = 100,
    learning_rate: float | optax.Schedule = 1e-3,
    params: Params | None = None,
    progress: bool = True,
    callback: Callable[[int, np.ndarray], None] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    description: Mapping[str, Any] | None = None,
) -> tuple[TrainState, np.ndarray]:
    """Train by Adam on batches drawn without replacement in every epoch.

    >>> import jax
    >>> from rvrs import vae, vae_training
    >>> images = jax.random.bernoulli(jax.random.key(0), 0.3, (40, 16)).astype("uint8")
    >>> autoencoder = vae.VAE(num_pixels=16, num_latent=2, num_hidden=8)
    >>> method = vae_training.iwae(autoencoder, num_samples=3)
    >>> state, losses = vae_training.train(
    ...     method, jax.random.key(1), images, num_epochs=2, batch_size=10, progress=False
    ... )
    >>> losses.shape
    (8,)

    Parameters
    ----------
    images
        ``(n, num_pixels)``; may be a memory map.
    learning_rate
        Adam's rate, or a function of the number of steps that gives it.
    params
        Where to start, e.g. from the networks of another method: a better start for RVRS and UHA
        is a VAE trained by ``"standard"``. None starts afresh.
    callback
        Called as ``callback(steps_done, losses_of_latest_steps)``, up to every 100 steps.
    checkpoint
        A file that training is stored in every two minutes, for ``resume``.
    resume
        A file that ``checkpoint`` wrote: training goes on from there, to the same result bit for
        bit as if it had never stopped. All else must be as it was.
    description
        What a checkpoint is to be told from others by, besides the images, the key, epochs, batches
        and the shapes of parameters: names and numbers, such as those of the method.

    Returns
    -------
    The last state, whose ``params`` are the result, and the losses of all steps. Steps without a
    finite gradient are skipped; their losses are not finite.
    """
    check_kind("method", method, Method, "one of vae_training.METHODS, called with a VAE")
    images = check_training(rng_key, images, num_epochs, batch_size, learning_rate)
    params = {} if params is None else params
    description = {} if description is None else description
    check_kind("params", params, Mapping, "a dict of parameters or None")
    check_kind("description", description, Mapping, "a dict or None")
    check_reporting(progress, callback, checkpoint, resume)
    if checkpoint is not None:
        storage.check_writable(checkpoint)
    optimizer = optax.adam(learning_rate)
    init_key, seed_key, step_key = jax.random.split(rng_key, 3)
    # Copies, since the buffers of a step become those of the next one.
    fresh = method.init(init_key)
    check_start(params, fresh)
    start = jax.tree.map(jnp.array, fresh | dict(params))
    state = first_train_state(method, optimizer, start, len(images))
    seed = tuple(int(word) for word in np.asarray(jax.random.key_data(seed_key)).ravel())
    data = Batches(((images,), {}), (0,), len(images), batch_size, seed)
    identity: dict[str, Any] = {}
    if checkpoint is not None or resume is not None:
        identity = {
            "kind": "vae",
            "description": dict(description),
            "training": {"seed": list(seed), "num_epochs": num_epochs, "batch_size": batch_size},
            "images": storage.describe_arguments(images),
        }
    now = Training(state, np.zeros(0, np.float32))
    if resume is not None:
        now = _resumed(resume, identity, now)

    @partial(jax.jit, donate_argnums=0)
    def run(state: TrainState, start: Array, index: Array, images: Array) -> tuple[Any, Array]:
        def step(state: TrainState, batch: tuple[Array, Array, Array]) -> tuple[Any, Array]:
            number, index, images = batch
            key = jax.random.fold_in(step_key, number)
            return train_step(method, optimizer, key, state, index, images)

        numbers = start + jnp.arange(len(index))
        return lax.scan(step, state, (numbers, index, images))

    # Steps of one call: as many as divide an epoch, so that one program serves all.
    length = max(n for n in range(1, _LONGEST_CHUNK + 1) if data.per_epoch % n == 0)
    num_steps = num_epochs * data.per_epoch
    stored_at = time.monotonic()
    with tqdm(
        total=num_epochs,
        initial=len(now.losses) / data.per_epoch,
        unit="epoch",
        disable=not progress,
    ) as bar:
        for first in range(len(now.losses), num_steps, length):
            index = data.indices(first, length)
            (batch,), _ = data.take(index)
            arrays = jnp.int32(first), jnp.asarray(index), jnp.asarray(batch)
            state, found = run(now.state, *arrays)
            now = Training(state, np.append(now.losses, np.asarray(found)))
            bar.set_postfix_str(f"loss {now.losses[first:].mean():.3f}", refresh=False)
            bar.update(length / data.per_epoch)
            if callback is not None:
                callback(len(now.losses), now.losses[first:])
            due = time.monotonic() - stored_at > _SECONDS_BETWEEN_CHECKPOINTS
            if checkpoint is not None and due:
                header = identity | {"steps_done": len(now.losses)}
                arrays = storage.to_arrays("training", now)
                storage.write(checkpoint, Checkpoint(header, arrays))
                stored_at = time.monotonic()
    return now.state, now.losses


def _resumed(path: str | PathLike[str], identity: dict[str, Any], like: Training) -> Training:
    stored = storage.read(path)
    # As it was read: JSON has lists for tuples.
    storage.refuse_differences(path, stored.header, json.loads(json.dumps(identity)))
    steps = stored.header["steps_done"]
    like = like._replace(losses=np.zeros(steps, like.losses.dtype))
    found = storage.from_arrays("training", stored.arrays, jax.eval_shape(lambda: like))
    return Training(found.state, np.asarray(found.losses))


# Rows of this many steps are on the device at once.
_LONGEST_CHUNK = 100
_SECONDS_BETWEEN_CHECKPOINTS = 120.0
