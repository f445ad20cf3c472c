"""What a method is given, and what it gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

Schedule = Literal["own", "paper"]
"""``"own"``: every method starts from the normal distribution that :func:`rvrs.fit` starts from,
and Adam's rate falls along a cosine; RVRS is trained as :func:`rvrs.fit` trains it. ``"paper"``:
Adam's rate is divided by ten after a third and after two thirds of the steps; UHA, VRS and RVRS
start from a fit of the normal that they refine, all others from where NumPyro puts them."""

Proposal = Literal["diagonal", "mvn"]
"""The normal distribution that IWAE, UHA and RVRS refine: independent, or with full covariance."""

Report = Callable[[float, str], None]
"""``(share of the work that is done, from 0 to 1; a few words)``."""


class DivergedError(RuntimeError):
    """A method has come to nothing; the message says how."""


class LocalParts(NamedTuple):
    """How a model with a latent variable for every data point is made."""

    global_model: Callable[[], Any]
    """Draws the global latents, and returns what ``local_model`` takes."""
    local_model: Callable[[Any], Any]
    """Has the plate of data points, with all else in it."""
    marginal: Callable[[], Any] | None = None
    """The model with the local latents integrated out, where that can be done."""


class Task(NamedTuple):
    """A posterior that every method can be given."""

    name: str
    model: Callable[[], Any]
    """A NumPyro model without arguments: it holds its data."""
    local: LocalParts | None = None
    """What the methods for local latents need."""


class Estimate(NamedTuple):
    """An average and its Monte Carlo standard error."""

    value: float
    error: float


class Trained(NamedTuple):
    """What training ends with."""

    params: dict[str, Any]
    losses: np.ndarray
    """Means over equal parts of the training."""
    seconds_per_step: float
    """Median over these parts, compilation apart."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A method that has been trained and judged."""

    method: str
    elbo: float | None
    """The method's own bound on the log evidence: the ELBO of its approximation, the annealed one
    of UHA, the K-sample one of IWAE. None for NUTS, which has none."""
    elbo_error: float | None
    """Monte Carlo standard error of ``elbo``."""
    seconds_per_step: float
    """Of training, compilation apart; of NUTS, per draw of one chain."""
    params: dict[str, Any] = field(repr=False)
    losses: np.ndarray = field(repr=False)
    """Minus the bound along the way."""
    details: dict[str, Any]
    """What only some methods know of themselves."""
    draw: Callable[[jax.Array, int], dict[str, jax.Array]] = field(repr=False)

    def sample(self, rng_key: jax.Array, num_samples: int) -> dict[str, jax.Array]:
        """Posterior draws of all latent and deterministic sites, with one leading axis.

        Those of IWAE-K are each chosen by weight from K draws of its normal, which is the
        distribution that its bound belongs to.
        """
        return self.draw(rng_key, num_samples)


def silent(share: float, words: str) -> None:
    """A report that nobody reads."""
