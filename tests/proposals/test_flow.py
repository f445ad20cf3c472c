import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.scipy.stats import norm

import rvrs
from rvrs import proposals
from rvrs.core.objectives import elbo_surrogate
from rvrs.core.problem import Problem, Targets
from rvrs.core.rejection import draw_budget
from tests.proposals.checks import check_derivatives, check_dtypes

pytest.importorskip("flowjax")

CONSTRUCTORS = {
    "coupling": proposals.coupling_flow,
    "masked autoregressive": proposals.masked_autoregressive_flow,
}
# Small, and with an odd number of layers and a second hidden layer, which the defaults are not.
FAMILIES = {
    name: constructor(num_layers=3, nn_width=8, nn_depth=2)
    for name, constructor in CONSTRUCTORS.items()
}
# In four dimensions the shuffle of the second layer is not its own inverse.
D = 4


def random_parameters(family, size=D, spread=0.4):
    """Parameters with every entry moved away from its initial value, so far from a normal."""
    parameters = family.init(jnp.arange(size, dtype=jnp.result_type(float)), 0.5)
    leaves, tree = jax.tree.flatten(parameters)
    rng = np.random.default_rng(0)
    moved = [leaf + jnp.asarray(spread * rng.standard_normal(leaf.shape)) for leaf in leaves]
    return jax.tree.unflatten(tree, moved)


def frame():
    """A location and a lower-triangular scale."""
    below = np.tril(np.random.default_rng(1).standard_normal((D, D)), -1)
    scale = below + np.diag([0.5, 2.0, 30.0, 1.0])
    return jnp.array([5.0, -7.0, 100.0, 0.0]), jnp.asarray(scale, jnp.result_type(float))


@pytest.mark.parametrize("name", FAMILIES)
def test_log_density_on_and_off_the_sampling_path_is_the_change_of_variables(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family)
        # Noise of standard deviation 3 reaches points that the family itself rarely draws.
        noise = 3 * family.sample_noise(jax.random.key(0), (20,), parameters)

        @jax.vmap
        def all_of_it(noise):
            z, log_q = family.propose(parameters, noise)
            jacobian = jax.jacfwd(lambda noise: family.propose(parameters, noise)[0])(noise)
            wanted = jnp.sum(norm.logpdf(noise)) - jnp.linalg.slogdet(jacobian)[1]
            return log_q, family.log_density(parameters, z), wanted

        on_the_path, at_the_point, wanted = jax.jit(all_of_it)(noise)
        np.testing.assert_allclose(on_the_path, wanted, rtol=1e-10)
        np.testing.assert_allclose(at_the_point, wanted, rtol=1e-8)
        assert np.ptp(on_the_path - norm.logpdf(noise).sum(-1)) > 1, "the flow is all but affine"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_density_integrates_to_one(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family, size=2)
        noise = family.sample_noise(jax.random.key(0), (10_000,), parameters)
        z, _ = jax.jit(jax.vmap(family.propose, (None, 0)))(parameters, noise)
        # The box holds all of 10000 draws with as much space again on every side.
        low, high = 2 * z.min(0) - z.mean(0), 2 * z.max(0) - z.mean(0)
        first, second = (jnp.linspace(low[i], high[i], 400) for i in range(2))
        grid = jnp.stack(jnp.meshgrid(first, second), -1).reshape(-1, 2)
        density = jnp.exp(jax.jit(jax.vmap(family.log_density, (None, 0)))(parameters, grid))
        integral = density.sum() * (first[1] - first[0]) * (second[1] - second[0])
        np.testing.assert_allclose(integral, 1.0, rtol=1e-5)


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize("size", [2, 10])
def test_init_is_close_to_the_normal_of_the_given_location_and_scale(name, size):
    family = CONSTRUCTORS[name]()
    location = jnp.linspace(-3.0, 5.0, size)
    parameters = family.init(location, 0.25)
    noise = family.sample_noise(jax.random.key(0), (2000,), parameters)
    z, log_q = jax.jit(jax.vmap(family.propose, (None, 0)))(parameters, noise)
    divergence = log_q - norm.logpdf(z, location, 0.25).sum(-1)
    assert np.mean(divergence) < 0.01
    assert np.std(divergence) < 0.15


@pytest.mark.parametrize("name", FAMILIES)
def test_push_forward_is_the_distribution_of_the_transformed_draws(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family)
        location, scale = frame()

        @jax.vmap
        def both(noise):
            z, log_q = family.propose(parameters, noise)
            pushed = family.push_forward(parameters, location, scale)
            wanted = location + scale @ z, log_q - jnp.linalg.slogdet(scale)[1]
            return family.propose(pushed, noise), family.log_density(pushed, wanted[0]), wanted

        noise = family.sample_noise(jax.random.key(0), (10,), parameters)
        (z, on_the_path), at_the_point, wanted = jax.jit(both)(noise)
        np.testing.assert_allclose(z, wanted[0], rtol=1e-10)
        np.testing.assert_allclose(on_the_path, wanted[1], rtol=1e-10)
        np.testing.assert_allclose(at_the_point, wanted[1], rtol=1e-8)
    assert family.closed_under == "triangular"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_derivatives_of_path_and_density_are_consistent_in_both_modes(name):
    family = FAMILIES[name]
    with jax.enable_x64():
        parameters = random_parameters(family)
        noise = family.sample_noise(jax.random.key(0), (1,), parameters)
        check_derivatives(family, parameters, noise, atol=1e-9)


def trained_entries(name, size, num_layers, width):
    """How many of the weights act: all of them, or those that the masks let through."""
    if name == "coupling":
        moved = size - size // 2
        return num_layers * (width * (size // 2 + 1) + 2 * moved * (width + 1))
    inputs, hidden = np.arange(size), np.arange(width) % (size - 1)
    edges = np.sum(hidden[:, None] >= inputs) + 2 * np.sum(inputs[:, None] > hidden)
    return num_layers * (edges + width + 2 * size)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_surrogate_has_a_finite_gradient_in_every_parameter_that_counts(name):
    family = CONSTRUCTORS[name](num_layers=2, nn_width=6)
    parameters = family.init(jnp.zeros(D), 1.0)
    problem = Problem(
        sample_noise=lambda key, shape: family.sample_noise(key, shape, parameters),
        propose=family.propose,
        log_proposal=family.log_density,
        log_joint=lambda model, data, z: -jnp.sum((z - data) ** 4) - jnp.prod(z) ** 2,
    )

    @jax.jit
    def gradient(parameters):
        threshold = jnp.zeros(2)
        # Two targets with proposals of their own.
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.1 * leaf]), parameters)
        targets = Targets(both, None, jnp.array([[0.1, 0.2, -0.3, 0.2], [-0.5, 0.2, 0.4, 0.1]]))
        draws = draw_budget(
            jax.random.key(0),
            problem,
            targets,
            threshold,
            num_samples=4,
            epsilon=1e-4,
            num_proposals=64,
        )

        def surrogate(phi):
            targets_ = targets._replace(proposal=phi)
            return elbo_surrogate(problem, targets_, draws, threshold, epsilon=1e-4).surrogate.sum()

        return draws.complete, jax.grad(surrogate)(both)

    complete, gradient = gradient(parameters)
    assert complete.all()
    for field, leaf in zip(gradient._fields, gradient, strict=True):
        assert np.all(np.isfinite(leaf)), field
    assert np.all(gradient.loc != 0)
    assert np.all(gradient.log_diagonal != 0)
    assert np.all(np.asarray(gradient.lower)[:, np.tril(np.ones((D, D)), -1) > 0] != 0)
    wanted = trained_entries(name, D, num_layers=2, width=6)
    np.testing.assert_array_equal(np.sum(gradient.weights != 0, axis=1), wanted)


def banana(z):
    return norm.logpdf(z[0]) + norm.logpdf(z[1], z[0] ** 2, 0.3)


# The best normal has independent coordinates, the second with standard deviation 0.3; what is left
# of its ELBO is a function of the first's variance v, -v / 2 - v^2 / 0.09 + log(v) / 2 + 1 / 2.
V = (np.sqrt(1 + 16 / 0.09) - 1) / (8 / 0.09)
BEST_NORMAL = -V / 2 - V**2 / 0.09 + np.log(V) / 2 + 0.5


@pytest.mark.slow
def test_a_trained_flow_is_far_closer_to_a_banana_than_the_best_normal():
    algorithm = rvrs.vi.as_top_level_api(
        banana,
        optax.adam(1e-2),
        proposal=proposals.coupling_flow(num_layers=4, nn_width=16),
        target_acceptance=1.0,
        num_samples=16,
        init_scale=0.5,
    )
    state = algorithm.init(jnp.zeros(2))
    _, info = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps=2000, chunk_size=2000)
    # The banana is normalised: the ELBO of the target itself is 0.
    assert BEST_NORMAL < -0.75
    assert np.mean(info.elbo[-100:]) > 0.2 * BEST_NORMAL


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_float32_stays_float32_where_x64_is_on_and_promotion_is_strict(name):
    family = CONSTRUCTORS[name](num_layers=2, nn_width=4, seed=7)
    check_dtypes(family, D)
    with jax.enable_x64(), jax.numpy_dtype_promotion("strict"):
        single, double = (family.init(jnp.zeros(D, dt), 0.5).weights for dt in ("f4", "f8"))
        np.testing.assert_array_equal(single, double.astype("f4"))


def test_a_flow_that_was_first_built_while_tracing_serves_afterwards():
    family = proposals.coupling_flow(num_layers=2, nn_width=4, seed=11)
    traced = jax.jit(jax.vmap(lambda at: family.init(at, 0.5)))(jnp.zeros((1, D)))
    parameters = family.init(jnp.zeros(D), 0.5)
    np.testing.assert_array_equal(traced.weights[0], parameters.weights)
    z, log_q = family.propose(parameters, jnp.ones(D))
    np.testing.assert_allclose(family.log_density(parameters, z), log_q, rtol=1e-5)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_return_the_same_family_for_the_same_settings(name):
    constructor = CONSTRUCTORS[name]
    assert constructor() is constructor()
    assert constructor(seed=0) is constructor()
    assert constructor(seed=1) is not constructor()


@pytest.mark.parametrize("name", CONSTRUCTORS)
@pytest.mark.parametrize("argument", ["num_layers", "nn_width", "nn_depth"])
@pytest.mark.parametrize("value", [0, 1.5, "2", [3]])
def test_sizes_that_are_not_positive_whole_numbers_are_refused_by_name(name, argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be a whole number of at least 1"):
        CONSTRUCTORS[name](**{argument: value})


@pytest.mark.parametrize("seed", [-1, 0.5, None, True])
def test_a_seed_that_is_not_a_whole_number_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        proposals.coupling_flow(seed=seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_dimension_is_refused_with_a_family_to_use_instead(name):
    with pytest.raises(ValueError, match=r'at least 2 dimensions, got 1; .*"mvn"'):
        FAMILIES[name].init(jnp.zeros(1), 1.0)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_without_flowjax_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "flowjax", None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[flows\]'"):
        CONSTRUCTORS[name]()
