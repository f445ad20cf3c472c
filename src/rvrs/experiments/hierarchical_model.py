"""The regression of Table 2 of the paper, with one local latent variable per data point.

Bayesian linear regression with a Student-t likelihood, which is a normal one whose precision is
mixed by a Gamma variable, local to the data point::

    tau_n ~ Gamma(nu / 2, nu / 2),    y_n ~ Normal(x_n . beta, sigma / sqrt(tau_n))

The paper gives neither the priors (here: :func:`build`) nor the size of the noise that is added to
the responses (:func:`load`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.constraints import positive

from rvrs import datasets
from rvrs.core.arguments import check_choice
from rvrs.datasets import Dataset

MADE_UP = "made-up"
"""A data set of few rows that needs no file."""
PAPER_DATASETS = ("pol", "bike")
"""Those of the paper, 5000 rows each."""
DATASETS = (*PAPER_DATASETS, MADE_UP)
NOISY_SHARE, NOISE_SD = 0.25, 2.5
"""Share of the responses that get noise, and its scale over that of least squares' residuals."""
PLATE = "data"

_MADE_UP_ROWS, _MADE_UP_COVARIATES = 400, 4
# Of Student's distribution that the noise of the made-up responses has: heavy tails, but with a
# variance, by which the responses are scaled.
_MADE_UP_DEGREES_OF_FREEDOM = 2.5


def load(name: str) -> Dataset:
    """A regression with heavy tails: responses in standard deviations, a quarter of them noisy.

    Covariates are standardised, with an intercept and without constant columns. The noise is normal
    and the same every time. It is in units of the residuals, as tails are heavy or not compared
    with what the regression leaves unexplained. The responses of :data:`MADE_UP` have heavy tails
    by themselves and get no noise.
    """
    check_choice("name", name, DATASETS)
    if name == MADE_UP:
        return _made_up()
    dataset = datasets.load(name)
    varying = dataset.covariates.any(axis=0)  # the loader turns constant columns into zeros
    covariates = dataset.covariates[:, varying]
    responses = _standardised(dataset.responses)
    coefficients = np.linalg.lstsq(covariates.astype(np.float64), responses)[0]
    noise_sd = NOISE_SD * (responses - covariates @ coefficients).std()
    random = np.random.RandomState(0)
    noisy = random.permutation(len(responses))[: round(NOISY_SHARE * len(responses))]
    responses[noisy] += noise_sd * random.normal(size=len(noisy))
    names = tuple(np.asarray(dataset.covariate_names)[varying].tolist())
    return Dataset(name, covariates, responses.astype(np.float32), names)


def _standardised(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float64)
    return (values - values.mean(axis=0)) / values.std(axis=0)


def _made_up() -> Dataset:
    random = np.random.RandomState(0)
    features = _standardised(random.normal(size=(_MADE_UP_ROWS, _MADE_UP_COVARIATES)))
    noise = random.standard_t(_MADE_UP_DEGREES_OF_FREEDOM, size=_MADE_UP_ROWS)
    responses = _standardised(features @ random.normal(size=_MADE_UP_COVARIATES) + noise)
    covariates = np.column_stack([features, np.ones(_MADE_UP_ROWS)])
    names = (*(f"feature {number}" for number in range(_MADE_UP_COVARIATES)), "intercept")
    return Dataset(MADE_UP, covariates.astype(np.float32), responses.astype(np.float32), names)


class Models(NamedTuple):
    """The regression in the form that NumPyro's ``AutoSemiDAIS`` takes, and without ``tau``."""

    global_model: Callable[[], tuple[Any, ...]]
    """Returns coefficients, scale and degrees of freedom: the argument of ``local_model``."""
    local_model: Callable[[tuple[Any, ...]], None]
    model: Callable[[], None]
    oracle_model: Callable[..., None]
    """``(local_gap=None)``: a function of the shape of the posteriors of ``tau``, if given, tells
    what each of them loses against the exact one."""
    gamma_guide: Callable[[tuple[Any, ...]], None]
    """Gamma proposals, with two parameters of every data point."""


def build(dataset: Dataset, batch_size: int) -> Models:
    """The regression on random batches of a data set; of all its rows, there is only one batch.

    The coefficients are standard normal, ``sigma`` is half normal with scale 1, and ``nu`` has the
    prior Gamma(2, 0.1) of Juarez and Steel (2010).
    """
    size, num_covariates = dataset.covariates.shape
    if not 1 <= batch_size <= size:
        raise ValueError(f"batch_size must be from 1 to {size}, the rows; got {batch_size}.")
    covariates, responses = jnp.asarray(dataset.covariates), jnp.asarray(dataset.responses)

    def global_model() -> tuple[Any, ...]:
        prior = dist.Normal(0.0, 1.0).expand([num_covariates]).to_event(1)
        coefficients = numpyro.sample("coefficients", prior)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        return coefficients, scale, numpyro.sample("degrees_of_freedom", dist.Gamma(2.0, 0.1))

    def local_model(latents: tuple[Any, ...]) -> None:
        coefficients, scale, nu = latents
        with numpyro.plate(PLATE, size, subsample_size=batch_size) as rows:
            tau = numpyro.sample("tau", dist.Gamma(nu / 2, nu / 2))
            likelihood = dist.Normal(covariates[rows] @ coefficients, scale / jnp.sqrt(tau))
            numpyro.sample("responses", likelihood, obs=responses[rows])

    def gamma_guide(latents: tuple[Any, ...]) -> None:
        with numpyro.plate(PLATE, size, subsample_size=batch_size) as rows:
            shape, rate = (
                cast(Any, numpyro.param(f"tau_{name}", jnp.ones(size), constraint=positive))
                for name in ("shape", "rate")
            )
            numpyro.sample("tau", dist.Gamma(shape[rows], rate[rows]))

    def oracle_model(local_gap: Callable[[Any], Any] | None = None) -> None:
        coefficients, scale, nu = global_model()
        if local_gap is not None:
            numpyro.factor("local_gap", -size * local_gap(nu / 2 + 0.5))
        with numpyro.plate(PLATE, size, subsample_size=batch_size) as rows:
            likelihood = dist.StudentT(nu, covariates[rows] @ coefficients, scale)
            numpyro.sample("responses", likelihood, obs=responses[rows])

    def model() -> None:
        local_model(global_model())

    return Models(global_model, local_model, model, oracle_model, gamma_guide)
