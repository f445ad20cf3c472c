"""Gradients of stock ``Trace_ELBO()`` with AutoSemiRVRS against autodiff of the quadrature ELBO.

The gradient is that of global, local and model parameters, for any batch size; a lost N/B, a
gradient that leaks through the emitted draw or the missing covariance of a model gradient would
each shift the mean over many keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import Trace_ELBO

from rvrs.core import threshold
from rvrs.guides._semi_target import Points
from tests.guides import hierarchies
from tests.guides.hierarchies import HIERARCHIES

EPSILON = 1e-2
THRESHOLD = 1.0
COUNT = 10_000


@functools.cache
def exact(name):
    """The ELBO and its gradient, by the names of the parameters."""
    case = HIERARCHIES[name]
    with jax.enable_x64():
        value, gradient = jax.jit(
            jax.value_and_grad(lambda p: hierarchies.exact_elbo(case, p, THRESHOLD, EPSILON))
        )(case.parameters())
    return float(value), {n: np.asarray(g) for n, g in gradient.items()}


def estimates(name, size, count=COUNT, **settings):
    """Losses and gradients of the stock loss, one row per key."""
    case = HIERARCHIES[name]
    options = {"target_acceptance": 0.4, "threshold": THRESHOLD, "epsilon": EPSILON} | settings
    guide = case.guide(size, **options)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), case.parameters())
    # Once without tracing, as SVI does, so that the model is checked.
    Trace_ELBO().loss(jax.random.key(0), params, guide.model, guide)

    @jax.jit
    def rows(keys):
        loss = lambda params, key: Trace_ELBO().loss(key, params, guide.model, guide)  # noqa: E731
        return jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(params, keys)

    return jax.tree.map(np.asarray, rows(jax.random.split(jax.random.key(1), count)))


def z_scores(values, gradients, name):
    elbo, gradient = exact(name)
    wanted = {"elbo": elbo} | gradient
    found = {"elbo": -values} | {n: -rows for n, rows in gradients.items()}
    scores = {}
    for n, rows in found.items():
        rows = rows.astype(float)
        error = rows.std(0, ddof=1) / np.sqrt(len(rows))
        # A point that is not in the batch has no gradient; none is always there.
        assert np.all(error > 0)
        scores[n] = (rows.mean(0) - wanted[n]) / error
    return scores


def assert_unbiased(scores):
    assert all(np.all(np.abs(score) < 4) for score in scores.values()), scores


# Implicit gradients are slow to compile; `test_gamma.py` tries them by themselves.
SLOW = ["beta-binomial", "scale mixture", "scale mixture, Gamma"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in HIERARCHIES]
)
def test_the_gradient_of_a_batch_of_two_is_that_of_all_points(name):
    assert_unbiased(z_scores(*estimates(name, 2), name))


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (None, {}),
        (2, {"estimator": "score"}),
        pytest.param(2, {"num_samples": 4}, marks=pytest.mark.slow),
        # So many proposals that hardly any point is dropped.
        (2, {"sampler": "budget", "num_proposals": 100}),
    ],
)
def test_it_is_the_same_for_any_batch_size_estimator_and_sampler(size, settings):
    assert_unbiased(z_scores(*estimates("normal", size, **settings), "normal"))


def test_a_truncated_gradient_is_biased_in_model_and_global_parameters_only():
    scores = z_scores(*estimates("normal", 2, model_gradient="truncated"), "normal")
    assert abs(scores["theta"]) > 6
    assert abs(scores["g_scale"]) > 6
    for name in ("elbo", "auto_z_loc", "auto_z_scale"):
        assert np.all(np.abs(scores[name]) < 4), name


def test_without_rejection_a_batch_stands_for_all_points():
    # The warm-up's objective: ordinary variational inference.
    guide, params = HIERARCHIES["normal"].guide(2), HIERARCHIES["normal"].parameters()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    plate, arguments = guide.prepare(params, (), {})

    def estimates_of(size):
        def value(key):
            index_key, key = jax.random.split(key)
            index = jax.random.permutation(index_key, plate.size)[:size]
            points = Points(index, index, threshold.init(jnp.zeros(size)), plate.size)
            return guide.objective(plate, False, None, key, params, points, arguments)[0]

        return np.asarray(
            jax.jit(jax.vmap(value))(jax.random.split(jax.random.key(1), 20_000)), float
        )

    few, all_of_them = estimates_of(2), estimates_of(plate.size)
    error = np.hypot(few.std(), all_of_them.std()) / np.sqrt(len(few))
    assert abs(few.mean() - all_of_them.mean()) < 4 * error
    # A batch that stood for itself alone would show.
    assert abs(all_of_them.mean()) > 20 * error
