import jax
import jax.numpy as jnp
import numpy as np

from rvrs.bench import autoencoder
from rvrs.vae import VAE

AUTOENCODER = VAE(num_pixels=6, num_latent=2, num_hidden=3)


def test_the_bare_densities_are_those_of_the_autoencoder():
    images = autoencoder.made_up_images(2, 5, 6)
    task = autoencoder.autoencoder_task(AUTOENCODER, images, 0.1)

    @jax.jit
    def both(params, batch):
        problem, targets, _ = task.build(params, jax.random.key(0), batch)
        noise = jax.random.normal(jax.random.key(1), (5, 2))
        z, log_q = jax.vmap(problem.propose)(targets.proposal, noise)
        log_p = jax.vmap(problem.log_joint, (None, 0, 0))(targets.model, targets.data, z)
        posterior = AUTOENCODER.encode(params["encoder"], batch)
        likelihood = AUTOENCODER.decode(params["decoder"], z).log_prob(batch)
        expected = posterior.log_prob(z), likelihood + AUTOENCODER.prior().log_prob(z)
        return (log_q, log_p), expected

    found, expected = both(task.parameters, task.batch(1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_made_up_images_are_binary():
    images = autoencoder.made_up_images(2, 5, 6)
    assert images.shape == (2, 5, 6)
    assert set(np.unique(images).tolist()) == {0.0, 1.0}
    assert images.dtype == jnp.float32
