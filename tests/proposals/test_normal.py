import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rvrs import proposals

D = 5
FAMILIES = {
    "diagonal": proposals.diagonal_normal(),
    "full rank": proposals.full_rank_normal(),
    "low rank": proposals.low_rank_normal(2),
}


def random_parameters(family, dtype=None):
    """Parameters with every entry moved away from its initial value."""
    parameters = family.init(jnp.arange(D, dtype=jnp.result_type(float)), 0.5)
    leaves, tree = jax.tree.flatten(parameters)
    rng = np.random.default_rng(0)
    moved = [leaf + jnp.asarray(0.4 * rng.standard_normal(leaf.shape)) for leaf in leaves]
    return jax.tree.unflatten(tree, moved)


def covariance(parameters):
    if isinstance(parameters, proposals.DiagonalNormal):
        return np.diag(np.exp(2 * np.asarray(parameters.log_scale)))
    if isinstance(parameters, proposals.FullRankNormal):
        unit = np.tril(parameters.lower, -1) + np.eye(D)
        lower = np.exp(np.asarray(parameters.log_diagonal))[:, None] * unit
        return lower @ lower.T
    scale = np.diag(np.exp(parameters.log_scale))
    return scale @ (np.eye(D) + parameters.factor @ parameters.factor.T) @ scale


@pytest.mark.parametrize("name", FAMILIES)
def test_log_density_is_that_of_scipy_on_and_off_the_sampling_path(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family)
        reference = stats.multivariate_normal(np.asarray(parameters.loc), covariance(parameters))
        noise = family.sample_noise(jax.random.key(0), (20,), parameters)
        z, log_q = jax.vmap(family.propose, (None, 0))(parameters, noise)
        np.testing.assert_allclose(log_q, reference.logpdf(z), rtol=1e-10)
        far = 10 * jax.random.normal(jax.random.key(1), (20, D))
        log_q = jax.vmap(family.log_density, (None, 0))(parameters, far)
        np.testing.assert_allclose(log_q, reference.logpdf(far), rtol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_have_the_moments_of_the_family(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family)
        count = 200_000
        noise = family.sample_noise(jax.random.key(2), (count,), parameters)
        z = np.asarray(jax.vmap(family.propose, (None, 0))(parameters, noise)[0])
        wanted = covariance(parameters)
        sd = np.sqrt(np.diag(wanted))
        assert np.all(np.abs(z.mean(0) - parameters.loc) < 4.5 * sd / np.sqrt(count))
        # Var of a sample covariance of normals: (S_ij^2 + S_ii S_jj) / n.
        error = np.sqrt((wanted**2 + np.outer(sd, sd) ** 2) / count)
        assert np.all(np.abs(np.cov(z.T) - wanted) < 4.5 * error)


@pytest.mark.parametrize("name", FAMILIES)
def test_init_is_centred_with_the_given_scale(name):
    family = FAMILIES[name]
    parameters = family.init(jnp.full(D, 3.0), 0.25)
    np.testing.assert_allclose(parameters.loc, 3.0)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance(parameters))), 0.25, rtol=0.01)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_that_counts_has_a_gradient_at_the_start(name):
    # A zero gradient at the initial value would leave the parameter there for ever.
    family = FAMILIES[name]
    parameters = family.init(jnp.zeros(D), 0.5)
    noise = family.sample_noise(jax.random.key(0), (1,), parameters)[0]
    direction = jnp.asarray(np.random.default_rng(0).standard_normal((D, D)), jnp.float32)

    def loss(parameters):
        z, log_q = family.propose(parameters, noise)
        return jnp.sum((direction @ z) ** 2) + log_q

    gradient = jax.grad(loss)(parameters)
    for field, leaf in zip(gradient._fields, gradient, strict=True):
        counts = np.tril(np.ones((D, D)), -1) > 0 if field == "lower" else np.ones(leaf.shape) > 0
        assert np.all(np.asarray(leaf)[counts] != 0), field


def frame(family):
    """A location and a scale of the kind that the family takes, in very different units."""
    location, diagonal = jnp.array([5.0, -7.0, 0.0, 100.0, 1e-3]), 10.0 ** jnp.arange(-2, D - 2)
    if family.closed_under == "diagonal":
        return location, diagonal, jnp.diag(diagonal)
    below = np.tril(np.random.default_rng(1).standard_normal((D, D)), -1)
    scale = jnp.diag(diagonal) @ (jnp.eye(D) + below)
    return location, scale, scale


@pytest.mark.parametrize("name", FAMILIES)
def test_push_forward_is_the_distribution_of_the_transformed_draws(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family)
        location, scale, matrix = frame(family)
        pushed = family.push_forward(parameters, location, scale)
        np.testing.assert_allclose(pushed.loc, location + matrix @ parameters.loc, rtol=1e-12)
        np.testing.assert_allclose(
            covariance(pushed), matrix @ covariance(parameters) @ matrix.T, rtol=1e-10
        )
        # The same noise gives the same draw, not only one of the same distribution.
        noise = family.sample_noise(jax.random.key(0), (20,), parameters)
        z, log_q = jax.vmap(family.propose, (None, 0))(parameters, noise)
        z_pushed, log_q_pushed = jax.vmap(family.propose, (None, 0))(pushed, noise)
        np.testing.assert_allclose(z_pushed, location + z @ matrix.T, rtol=1e-9)
        wanted = log_q - np.linalg.slogdet(matrix)[1]
        np.testing.assert_allclose(log_q_pushed, wanted, rtol=1e-10)


def test_constructors_return_the_same_family_again():
    assert proposals.diagonal_normal() is proposals.diagonal_normal()
    assert proposals.low_rank_normal(3) is proposals.low_rank_normal(3)


@pytest.mark.parametrize("rank", [0, -1, 1.5, "2"])
def test_a_rank_that_is_not_a_positive_whole_number_is_refused(rank):
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1"):
        proposals.low_rank_normal(rank)
