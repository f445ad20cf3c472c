"""A variational autoencoder of binary images, on batches: steps of all methods."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from rvrs.bench.bare import NUM_SAMPLES, Task, bare_steps, normal_problem
from rvrs.bench.contest import Entry
from rvrs.bench.timing import Contestant
from rvrs.core.problem import Problem, Targets
from rvrs.proposals.normal import DiagonalNormal
from rvrs.vae import VAE, apply_network
from rvrs.vae_training import Method, first_train_state, iwae, rvrs, standard, train_step, uha

BATCH_SIZE = 100
_LEARNING_RATE = 1e-4
_SHARE_OF_ONES = 0.3


def made_up_images(num_batches: int, batch_size: int, num_pixels: int) -> Array:
    """Batches of binary images without any structure."""
    shape = (num_batches, batch_size, num_pixels)
    return jax.random.bernoulli(jax.random.key(0), _SHARE_OF_ONES, shape).astype(jnp.float32)


PEERS: dict[str, Callable[[VAE], Method]] = {
    "standard": standard,
    "IWAE-10": partial(iwae, num_samples=10),
    "IWAE-20": partial(iwae, num_samples=20),
    "UHA-10": partial(uha, num_steps=10),
}


def entries(
    vae: VAE,
    batch_size: int,
    target_acceptances: tuple[float, ...],
    num_steps: int,
    *,
    peers: Iterable[str] = tuple(PEERS),
) -> dict[str, Entry]:
    """RVRS, its bare work, and peers."""
    images = made_up_images(num_steps, batch_size, vae.num_pixels)
    found: dict[str, Entry] = {}
    for target in target_acceptances:
        bare, quiet = f"bare work Z={target:g}", f"bare work Z={target:g}, fixed noise"
        over = {"over bare work": bare, "over bare work with fixed noise": quiet}
        over |= {f"over {name}": name for name in peers}
        method = rvrs(vae, target, num_samples=NUM_SAMPLES)
        task = autoencoder_task(vae, images, target)
        # The budget sampler makes exactly as many proposals as the bare work.
        proposals = task.num_proposals
        found[f"RVRS Z={target:g}"] = Entry(_steps(method, images), num_steps, over, proposals)
        for name, random in ((bare, True), (quiet, False)):
            work = bare_steps(task, optax.adam(_LEARNING_RATE), num_steps, random=random)
            found[name] = Entry(work, num_steps, {}, proposals, NUM_SAMPLES)
    reference = {"over bare work": f"bare work Z={target_acceptances[0]:g}"}
    for name in peers:
        found[name] = Entry(_steps(PEERS[name](vae), images), num_steps, reference)
    return found


def _steps(method: Method, images: Array) -> Contestant:
    """One training step per batch, in one compiled loop, on images that were seen before."""
    num_steps, batch_size, _ = images.shape
    optimizer = optax.adam(_LEARNING_RATE)
    numbers = jnp.arange(num_steps * batch_size).reshape(num_steps, batch_size)
    params = method.init(jax.random.key(0))
    state = first_train_state(method, optimizer, params, numbers.size)
    if method.see is not None:
        see = jax.jit(method.see)
        for index, batch in zip(numbers, images, strict=True):
            memory = see(jax.random.key(1), params, state.memory, index, batch)
            state = state._replace(memory=memory)

    @jax.jit
    def loop(key: Array, state: Any, images: Array) -> Any:
        def step(state: Any, batch: Any) -> tuple[Any, Array]:
            return train_step(method, optimizer, batch[0], state, *batch[1:])

        return lax.scan(step, state, (jax.random.split(key, num_steps), numbers, images))

    return lambda key: loop(key, state, images)


def autoencoder_task(vae: VAE, images: Array, target_acceptance: float) -> Task:
    """Encoder and decoder; images are ``(number of batches, batch size, pixels)``."""

    def log_joint(decoder: Any, image: Array, z: Array) -> Array:
        logits = apply_network(decoder, z)
        likelihood = jnp.sum(image * logits - jax.nn.softplus(logits))
        return likelihood - 0.5 * jnp.sum(z**2) - 0.5 * vae.num_latent * jnp.log(2 * jnp.pi)

    problem = normal_problem(vae.num_latent, log_joint)

    def build(parameters: Any, key: Array, images: Array) -> tuple[Problem, Targets, Any]:
        outputs = apply_network(parameters["encoder"], images)
        proposal = DiagonalNormal(*jnp.split(outputs, 2, axis=-1))
        return problem, Targets(proposal, parameters["decoder"], images), 0.0

    weight = 1 / images.shape[1]
    return Task(vae.init(jax.random.key(0)), build, target_acceptance, images, weight)
