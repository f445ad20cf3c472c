"""On a hierarchy of normals, of which everything is known."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from rvrs import baselines
from rvrs.baselines import LocalParts, Task

# mu ~ N(0, 1), x_n ~ N(mu, 1), y_n ~ N(x_n, 1); without x, y_n ~ N(mu, sqrt 2).
Y = np.array([0.5, -1.0, 2.0, 0.3, 1.1, -0.4], np.float32)


def global_model():
    return numpyro.sample("mu", dist.Normal(0.0, 1.0))


def local_model(mu):
    with numpyro.plate("data", len(Y)) as rows:
        x = numpyro.sample("x", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=jnp.asarray(Y)[rows])


def model():
    local_model(global_model())


def marginal():
    mu = global_model()
    with numpyro.plate("data", len(Y)):
        numpyro.sample("y", dist.Normal(mu, math.sqrt(2)), obs=jnp.asarray(Y))


TASK = Task("hierarchy", model, LocalParts(global_model, local_model, marginal))

COVARIANCE = 2 * np.eye(len(Y)) + 1
LOG_EVIDENCE = -0.5 * (
    Y @ np.linalg.solve(COVARIANCE, Y)
    + np.linalg.slogdet(COVARIANCE)[1]
    + len(Y) * math.log(2 * math.pi)
)
# The precision of (mu, x) given y; the best independent normals have its diagonal.
PRECISION = np.diag([1.0 + len(Y), *[2.0] * len(Y)])
PRECISION[0, 1:] = PRECISION[1:, 0] = -1.0
MEAN_FIELD_ELBO = LOG_EVIDENCE - 0.5 * (
    np.sum(np.log(np.diag(PRECISION))) - np.linalg.slogdet(PRECISION)[1]
)
# Local normals around one place each cannot follow mu; with the exact local posteriors for every mu
# the normal of mu alone is exact.
MU_MEAN = np.sum(Y) / 2 / (1 + len(Y) / 2)
MU_SD = (1 + len(Y) / 2) ** -0.5


def fit(method, **options):
    options = {"num_steps": 3000, "num_evaluation_draws": 20_000} | options
    return baselines.fit(jax.random.key(0), method, TASK, **options)


def test_mean_field_reaches_the_best_elbo_that_it_can_have():
    fitted = fit("mf")
    assert abs(fitted.elbo - MEAN_FIELD_ELBO) < 4 * fitted.elbo_error + 0.005
    assert fitted.sample(jax.random.key(1), 10)["x"].shape == (10, len(Y))


def test_the_oracle_reaches_the_log_evidence():
    fitted = fit("oracle")
    assert abs(fitted.elbo - LOG_EVIDENCE) < 4 * fitted.elbo_error + 0.002
    draws = np.asarray(fitted.sample(jax.random.key(1), 4000)["mu"])
    assert abs(draws.mean() - MU_MEAN) < 4.5 * MU_SD / math.sqrt(4000) + 0.01
    assert abs(draws.std() / MU_SD - 1) < 0.06


@pytest.mark.parametrize(
    "method", ["semi-dais-12", pytest.param("semi-rvrs-0.2", marks=pytest.mark.slow), "iwae-8"]
)
def test_methods_for_local_latents_lie_between_mean_field_and_the_oracle(method):
    fitted = fit(method)
    assert MEAN_FIELD_ELBO + 0.1 < fitted.elbo < LOG_EVIDENCE + 4 * fitted.elbo_error
    if not method.startswith("iwae"):
        draws = fitted.sample(jax.random.key(1), 20)
        assert draws["mu"].shape == (20,)
        assert draws["x"].shape == (20, len(Y))
    assert fitted.seconds_per_step > 0


@pytest.mark.parametrize("method", ["oracle", "semi-dais-4", "semi-rvrs-0.2"])
def test_a_task_without_local_parts_is_refused(method):
    with pytest.raises(ValueError, match=r"need a task with local=LocalParts\(\.\.\.\)"):
        baselines.fit(jax.random.key(0), method, Task("plain", model), num_steps=10)


def test_an_oracle_needs_the_model_without_its_local_latents():
    task = Task("no marginal", model, LocalParts(global_model, local_model))
    with pytest.raises(ValueError, match="oracle needs a task whose LocalParts have marginal="):
        baselines.fit(jax.random.key(0), "oracle", task, num_steps=10)


@pytest.mark.parametrize("method", ["semi-rvrs-0.2@paper", "semi-rvrs-0.2-truncated"])
def test_ways_that_semi_rvrs_does_not_have_are_refused(method):
    with pytest.raises(ValueError, match="leave out -truncated and @paper"):
        fit(method)
