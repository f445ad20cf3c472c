import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from rvrs import baselines
from rvrs.baselines import Task, names, start, svi
from rvrs.baselines.task import DivergedError, silent

# x ~ N(0, I), y = A x + N(0, 1): everything about the posterior is known.
DESIGN = np.array([[1.0, 0.8], [0.8, 1.0], [0.3, -0.5]], np.float32)
Y = np.array([1.0, -0.5, 2.0], np.float32)


def conjugate_model():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.asarray(DESIGN) @ x, 1.0).to_event(1), obs=Y)


CONJUGATE = Task("conjugate", conjugate_model)
COVARIANCE = np.linalg.inv(np.eye(2) + DESIGN.T @ DESIGN)
MEAN = COVARIANCE @ DESIGN.T @ Y
EVIDENCE_COVARIANCE = np.eye(3) + DESIGN @ DESIGN.T
LOG_EVIDENCE = -0.5 * (
    Y @ np.linalg.solve(EVIDENCE_COVARIANCE, Y)
    + np.linalg.slogdet(EVIDENCE_COVARIANCE)[1]
    + 3 * math.log(2 * math.pi)
)
# The best mean-field normal has the precisions of the posterior on its diagonal.
PRECISION = np.diag(np.linalg.inv(COVARIANCE))
MEAN_FIELD_ELBO = LOG_EVIDENCE - 0.5 * (
    np.linalg.slogdet(COVARIANCE)[1] + np.sum(np.log(PRECISION))
)


def fit(method, **options):
    options = {"num_steps": 1500, "num_evaluation_draws": 20_000} | options
    return baselines.fit(jax.random.key(0), method, CONJUGATE, **options)


def test_mean_field_reaches_the_best_elbo_that_it_can_have():
    fitted = fit("mf")
    assert abs(fitted.elbo - MEAN_FIELD_ELBO) < 4 * fitted.elbo_error + 0.005
    draws = np.asarray(fitted.sample(jax.random.key(1), 5000)["x"])
    np.testing.assert_allclose(draws.std(axis=0), PRECISION**-0.5, rtol=0.06)


@pytest.mark.parametrize(
    "method", ["mvn", "rvrs-0.2", pytest.param("vrs-0.2", marks=pytest.mark.slow)]
)
def test_methods_that_can_hold_the_posterior_reach_the_log_evidence(method):
    fitted = fit(method, proposal="mvn", num_steps=4000)
    assert abs(fitted.elbo - LOG_EVIDENCE) < 4 * fitted.elbo_error + 0.005
    draws = np.asarray(fitted.sample(jax.random.key(1), 4000)["x"])
    z = (draws.mean(axis=0) - MEAN) / np.sqrt(np.diag(COVARIANCE) / len(draws))
    assert np.all(np.abs(z) < 4.5)
    np.testing.assert_allclose(np.cov(draws.T), COVARIANCE, atol=0.05)


def test_importance_weighting_lies_between_mean_field_and_the_log_evidence():
    few, many = fit("iwae-2", num_steps=600), fit("iwae-16", num_steps=600)
    assert MEAN_FIELD_ELBO + 0.02 < few.elbo < many.elbo < LOG_EVIDENCE + 4 * many.elbo_error
    # Its draws are weighted, so that they have the correlation that its normal lacks.
    draws = np.asarray(many.sample(jax.random.key(1), 8000)["x"])
    found, exact = (
        np.corrcoef(draws.T)[0, 1],
        COVARIANCE[0, 1] / np.sqrt(np.prod(np.diag(COVARIANCE))),
    )
    assert abs(found - exact) < 0.1


def test_annealing_improves_on_its_normal_and_stays_a_bound():
    fitted = fit("uha-4", num_steps=4000)
    assert MEAN_FIELD_ELBO + 0.02 < fitted.elbo < LOG_EVIDENCE + 4 * fitted.elbo_error
    assert fitted.sample(jax.random.key(1), 50)["x"].shape == (50, 2)


def test_nuts_draws_from_the_posterior():
    fitted = fit("nuts", num_steps=4000, num_warmup=300)
    assert fitted.elbo is None
    draws = np.asarray(fitted.sample(jax.random.key(1), 4000)["x"], float)
    z = (draws.mean(axis=0) - MEAN) / np.sqrt(np.diag(COVARIANCE) / fitted.details["least_ess"])
    assert np.all(np.abs(z) < 4.5)
    with pytest.raises(ValueError, match="num_samples must be at most 4000"):
        fitted.sample(jax.random.key(1), 4001)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mf@paper", "uha-2@paper", "rvrs-0.3@paper", "flow"])
def test_the_paper_s_way_and_the_flow_stay_below_the_log_evidence_and_come_close(method):
    fitted = fit(method, num_steps=30_000, proposal="diagonal")
    assert MEAN_FIELD_ELBO - 0.05 < fitted.elbo < LOG_EVIDENCE + 4 * fitted.elbo_error


def test_the_paper_s_rate_is_divided_by_ten_after_a_third_and_two_thirds():
    transform = svi.optimizer("uha", "paper", 30, 2)
    state = transform.init(jnp.zeros(()))
    sizes = []
    for _ in range(30):
        update, state = transform.update(jnp.ones(()), state)
        sizes.append(-float(update))
    np.testing.assert_allclose([sizes[5], sizes[15], sizes[25]], [1e-4, 1e-5, 1e-6], rtol=1e-3)


def test_dynamics_follow_the_parameters_of_the_model():
    """NumPyro's own AutoDAIS would anneal towards the model at its initial parameters."""

    def model():
        location = numpyro.param("location", 0.0)
        x = numpyro.sample("x", dist.Normal(location, 1.0))
        numpyro.sample("y", dist.Normal(x, 0.1), obs=3.0)

    found = svi.approximation(names.parse("uha-8@own"), model, "diagonal")
    guide = start.prepared(found.guide)
    base = {"auto_z_0_loc": jnp.zeros(1), "auto_z_0_scale": jnp.ones(1), "auto_eta0": 0.2}
    rest = {"auto_eta_coeff": 0.0, "auto_gamma": 0.9, "auto_beta_increments": jnp.ones(8)}
    rest |= {"auto_mass_matrix": jnp.full(1, 20.0)}

    def mean(location):
        params = base | rest | {"location": jnp.asarray(location)}
        keys = jax.random.split(jax.random.key(0), 200)
        draws = jax.vmap(lambda key: guide.sample_posterior(key, params)["x"])(keys)
        return float(draws.mean())

    assert mean(50.0) > mean(0.0) + 0.05


def test_local_latents_are_weighted_one_by_one():
    """The bound of a plate of independent points is the sum of their own bounds."""
    y = jnp.array([0.5, -1.0, 2.0])

    def model(y):
        with numpyro.plate("data", len(y)):
            x = numpyro.sample("x", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    def guide(y):
        with numpyro.plate("data", len(y)):
            numpyro.sample("x", dist.Normal(0.0, 1.0))

    def bound(y):
        loss = svi.approximation(names.parse("iwae-5"), model, "diagonal").loss
        found = svi.Approximation(lambda: guide(y), loss, 5)
        return svi.bound(jax.random.key(1), Task("local", lambda: model(y)), found, {}, 40_000)

    together, apart = bound(y), [bound(y[i : i + 1]) for i in range(3)]
    error = math.sqrt(together.error**2 + sum(one.error**2 for one in apart))
    assert abs(together.value - sum(one.value for one in apart)) < 4 * error
    # Weighting all points at once would be a bound far below.
    assert error < 0.02


def test_a_method_without_finite_gradients_has_diverged():
    def model():
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.factor("broken", jnp.where(x > 0, jnp.nan, 0.0))

    task = Task("broken", model)
    found = svi.approximation(names.parse("mf@paper"), model, "diagonal")
    begin = {"auto_loc": jnp.zeros(1), "auto_scale": jnp.ones(1)}
    with pytest.raises(DivergedError, match="had no finite loss or gradient"):
        svi.train(
            jax.random.key(0),
            task,
            found,
            svi.optimizer("mf", "paper", 500, 1),
            500,
            start=begin,
            report=silent,
        )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mf", names.Method("mf")),
        ("iwae-24@paper", names.Method("iwae", number=24, schedule="paper")),
        ("rvrs-0.1", names.Method("rvrs", target_acceptance=0.1)),
        (
            "rvrs-.25-truncated@own",
            names.Method("rvrs", target_acceptance=0.25, truncated=True),
        ),
    ],
)
def test_names_are_taken_apart(name, expected):
    assert baselines.parse(name) == expected


@pytest.mark.parametrize("name", ["advi", "iwae", "iwae-0", "rvrs", "mf@theirs", "", None])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="iwae-K, uha-K, rvrs-Z"):
        baselines.parse(name)


def test_an_acceptance_beyond_one_is_refused():
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        baselines.parse("rvrs-2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"proposal": "flow"}, "proposal"),
        ({"num_evaluation_draws": -1}, "num_evaluation_draws"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fit("mf", **options)


def test_a_task_without_a_model_is_refused():
    with pytest.raises(ValueError, match="task must be a Task"):
        baselines.fit(jax.random.key(0), "mf", Task("none", None), num_steps=1)


def test_a_start_is_the_same_normal_in_every_guide():
    begin = start.Start(
        jnp.array([1.0, -2.0]), jnp.array([[0.5, 0.0], [0.3, 0.2]]), {"location": 3.0}
    )
    guide = start.prepared(
        baselines.rejecting.AutoRVRS(conjugate_model, proposal="mvn", target_acceptance=0.5)
    )
    back = start.of_guide(guide, start.for_guide(guide, begin._replace(model={})))
    np.testing.assert_allclose(back.loc, begin.loc, rtol=1e-6)
    np.testing.assert_allclose(back.scale, begin.scale, rtol=1e-6)
    params = svi.start_params(names.parse("uha-3"), begin)
    assert set(params) == {"auto_z_0_loc", "auto_z_0_scale_tril", "location"}
    assert constraints.lower_cholesky(params["auto_z_0_scale_tril"])
