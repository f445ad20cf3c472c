"""Logistic regression on few data: mean-field is too narrow, rejection makes up for it.

31 coefficients meet 100 patients of the breast-cancer data of scikit-learn, whose features are
strongly correlated. So the coefficients are correlated in the posterior, which independent normals
answer with variances that are too small. Rejection keeps the independent normals as the proposal
and gives the correlations back. NUTS is the reference.
"""

import time
import warnings
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

from rvrs import datasets, fitting, plots
from rvrs.core.arguments import check_count
from rvrs.datasets import Dataset
from rvrs.run import Callback

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rvrs import result

NUM_ROWS = 100
"""Patients. Of all 569, the data would say so much that the normals would nearly be right."""
NUM_STEPS = fitting.NUM_STEPS
"""Training steps per fit."""
NUM_DRAWS = 10_000
"""Draws that a fit is compared by: the standard error of a mean is then 0.01 standard deviations.
As many as ``Fit.summary`` takes, so that the program is compiled once."""

# NUTS mixes well here: this is an effective sample size of over 8000 in every coefficient.
_NUTS_WARM_UP = 1_000
_NUTS_DRAWS = 10_000

_NUM_PANELS = 8
_SITE = "coefficients"


class Method(NamedTuple):
    """What a fit is called, and how it is made."""

    name: str
    proposal: str
    target_acceptance: float


METHODS = (
    Method("mean-field", "diagonal", 1.0),
    Method("MVN", "mvn", 1.0),
    Method("RVRS 0.3", "diagonal", 0.3),
    Method("RVRS 0.1", "diagonal", 0.1),
    Method("RVRS 0.1 MVN", "mvn", 0.1),
)
"""RVRS has the proposal of mean-field, so that the difference is made by rejection alone; in the
end, what :func:`rvrs.fit` does by default."""


class MethodFit(NamedTuple):
    """A fit by one method."""

    name: str
    fit: "result.Fit"
    draws: np.ndarray
    """``(NUM_DRAWS, D)``: coefficients."""


class Reference(NamedTuple):
    """A run of NUTS."""

    draws: np.ndarray
    """``(n, D)``: coefficients."""
    seconds: float
    """Wall time, including compilation."""


class Comparison(NamedTuple):
    """How far a method's coefficients are from the reference's."""

    mean_error: float
    """Largest distance of a mean from the reference's, in the reference's standard deviations."""
    min_sd_ratio: float
    """Least standard deviation over the reference's."""
    max_sd_ratio: float


def model(covariates: Any, responses: Any) -> None:
    """Bayesian logistic regression with standard normal coefficients."""
    prior = dist.Normal(0.0, 1.0).expand([covariates.shape[1]]).to_event(1)
    coefficients = numpyro.sample(_SITE, prior)
    numpyro.sample("responses", dist.Bernoulli(logits=covariates @ coefficients), obs=responses)


def load() -> Dataset:
    """The data: the same ``NUM_ROWS`` patients every time."""
    return datasets.load("breast_cancer", num_rows=NUM_ROWS)


def fit(
    rng_key: jax.Array,
    method: Method,
    dataset: Dataset,
    *,
    num_steps: int = NUM_STEPS,
    callback: Callback | None = None,
) -> MethodFit:
    """Fit the model by one method, and draw from the fit.

    Warnings are not emitted but kept in ``fit.warnings``: that mean-field gives cause for them is
    what the experiment shows.
    """
    fit_key, draw_key = jax.random.split(rng_key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = fitting.fit(
            fit_key,
            model,
            dataset.covariates,
            dataset.responses,
            proposal=method.proposal,
            target_acceptance=method.target_acceptance,
            num_steps=num_steps,
            progress=False,
            callback=callback,
        )
        draws = np.asarray(found.sample(draw_key, NUM_DRAWS)[_SITE], float)
    return MethodFit(method.name, found, draws)


def reference(
    rng_key: jax.Array,
    dataset: Dataset,
    *,
    num_warmup: int = _NUTS_WARM_UP,
    num_samples: int = _NUTS_DRAWS,
) -> Reference:
    """Draw from the posterior by NUTS."""
    check_count("num_warmup", num_warmup)
    check_count("num_samples", num_samples)
    start = time.perf_counter()
    mcmc = MCMC(NUTS(model), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.run(rng_key, dataset.covariates, dataset.responses)
    draws = np.asarray(mcmc.get_samples()[_SITE], float)
    return Reference(draws, time.perf_counter() - start)


def compare(draws: np.ndarray, reference: Reference) -> Comparison:
    """Compare coefficients ``(n, D)`` with the reference's."""
    mean, sd = reference.draws.mean(axis=0), reference.draws.std(axis=0)
    error = np.abs(draws.mean(axis=0) - mean) / sd
    ratio = draws.std(axis=0) / sd
    return Comparison(float(error.max()), float(ratio.min()), float(ratio.max()))


def narrowest(draws: np.ndarray, reference: Reference, count: int) -> np.ndarray:
    """The coefficients whose standard deviations fall shortest of the reference's."""
    return np.argsort(draws.std(axis=0) / reference.draws.std(axis=0))[:count]


def plot(
    fits: Sequence[MethodFit],
    reference: Reference,
    dataset: Dataset,
    path: str | PathLike[str] | None = None,
) -> "Figure":
    """Draw the marginals where the first of the fits (mean-field) is narrowest.

    Parameters
    ----------
    path
        Image file to save the figure to; its suffix tells the format.
    """
    if not fits:
        raise ValueError("fits must hold at least one fit.")
    shown = narrowest(fits[0].draws, reference, _NUM_PANELS)

    def named(draws: np.ndarray) -> dict[str, np.ndarray]:
        return {dataset.covariate_names[index]: draws[:, index] for index in shown}

    return plots.plot_marginals(
        {fit.name: named(fit.draws) for fit in fits},
        named(reference.draws),
        title=(
            f"Breast cancer, {len(dataset.covariates)} patients: posterior of the {len(shown)} "
            f"coefficients where {fits[0].name} is narrowest"
        ),
        path=path,
    )
