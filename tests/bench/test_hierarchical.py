import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer.util import log_density

from rvrs.bench import bare, hierarchical
from rvrs.experiments import hierarchical_model as experiment

DATASET = hierarchical.made_up_data(12, 3)


def test_the_bare_density_is_that_of_the_model():
    models = experiment.build(DATASET, 12)
    rng = np.random.default_rng(1)

    @jax.jit
    def both(latents, u):
        sites = {
            "coefficients": latents[:3],
            "scale": jnp.exp(latents[3]),
            "degrees_of_freedom": jnp.exp(latents[4]),
            "tau": jnp.exp(u),
            "data": jnp.arange(12),
        }
        log_jacobian = latents[3] + latents[4] + jnp.sum(u)
        rows = (jnp.asarray(DATASET.covariates), jnp.asarray(DATASET.responses))
        local = jax.vmap(hierarchical.log_local, (None, 0, 0))(latents, rows, u[:, None])
        model = log_density(models.model, (), {}, sites)[0] + log_jacobian
        return jnp.sum(local) + hierarchical.log_global(latents), model

    found = [
        both(jnp.asarray(rng.normal(size=5)), jnp.asarray(rng.normal(size=12))) for _ in range(2)
    ]
    (bare_first, model_first), (bare_second, model_second) = found
    # Constants of the prior are left out.
    np.testing.assert_allclose(bare_first - bare_second, model_first - model_second, rtol=1e-4)


def test_batches_of_an_epoch_have_every_row_at_most_once():
    rows = np.asarray(hierarchical._batches(13, 4))
    assert rows.shape == (3, 4)
    assert len(set(rows.ravel().tolist())) == 12


def test_a_bare_step_moves_the_rows_of_its_batch_and_no_others():
    task = hierarchical.hierarchical_task(DATASET, 4, 0.5)
    assert task.batches.shape == (3, 4)
    found, _, log_weights = bare.bare_steps(task, optax.adam(0.1), 2)(jax.random.key(0))
    moved = np.flatnonzero(np.asarray(found["local"].loc != task.parameters["local"].loc))
    assert set(moved) == set(np.asarray(task.batches[:2]).ravel().tolist())
    assert np.all(np.asarray(found["global"].loc) != 0)
    assert log_weights.shape == (4, 4)
