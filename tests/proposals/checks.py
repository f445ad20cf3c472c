"""What holds for every flow, whoever built it."""

import jax
import jax.numpy as jnp
import numpy as np


def check_derivatives(family, parameters, noise, atol, atol_forward=0.0):
    """By the chain rule, the derivative of log q(z(phi), phi) is that of the path's log density.

    Returns it, for every row of the noise.
    """

    @jax.vmap
    def derivatives(noise):
        path = jax.grad(lambda phi: family.propose(phi, noise)[1])(parameters)
        z, pull_back = jax.vjp(lambda phi: family.propose(phi, noise)[0], parameters)
        d_phi, d_z = jax.grad(family.log_density, (0, 1))(parameters, z)
        d_z_forward = jax.jacfwd(family.log_density, 1)(parameters, z)
        return path, jax.tree.map(jnp.add, d_phi, pull_back(d_z)[0]), d_z, d_z_forward

    path, chained, d_z, d_z_forward = jax.jit(derivatives)(noise)
    for field in path._fields:
        got, wanted = getattr(path, field), getattr(chained, field)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=atol, err_msg=field)
    np.testing.assert_allclose(d_z, d_z_forward, rtol=1e-9, atol=atol_forward)
    return path


def check_dtypes(family, size):
    """Everything has the dtype of the location."""
    with jax.enable_x64(), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.float32, jnp.float64):
            parameters = family.init(jnp.zeros(size, dtype), 0.5)
            assert {leaf.dtype for leaf in parameters} == {jnp.dtype(dtype)}
            noise = family.sample_noise(jax.random.key(0), (), parameters)
            # Flows that others have built are drawn with keys.
            assert noise.dtype in (jnp.dtype(dtype), jnp.uint32)
            # Tracing alone tells the dtypes.
            z, log_q = jax.eval_shape(family.propose, parameters, noise)
            again, gradient = jax.eval_shape(jax.value_and_grad(family.log_density), parameters, z)
            assert {leaf.dtype for leaf in (z, log_q, again, *gradient)} == {jnp.dtype(dtype)}
