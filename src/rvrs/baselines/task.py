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
    """A method has come to nothing; the message says how.

    >>> from rvrs import baselines
    >>> try:
    ...     raise baselines.DivergedError("the bound is not finite")
    ... except RuntimeError as error:
    ...     print(error)
    the bound is not finite
    """


class LocalParts(NamedTuple):
    """How a model with a latent variable for every data point is made.

    >>> import jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> from rvrs import baselines
    >>> y = jnp.array([0.5, 1.5, 0.1])
    >>> def global_model():
    ...     return numpyro.sample("mean", dist.Normal(0.0, 1.0))
    >>> def local_model(mean):
    ...     with numpyro.plate("data", 3):
    ...         z = numpyro.sample("z", dist.Normal(mean, 1.0))
    ...         numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
    >>> parts = baselines.LocalParts(global_model, local_model)
    >>> task = baselines.Task("toy", lambda: local_model(global_model()), parts)
    """

    global_model: Callable[[], Any]
    """Draws the global latents, and returns what ``local_model`` takes."""
    local_model: Callable[[Any], Any]
    """Has the plate of data points, with all else in it."""
    marginal: Callable[[], Any] | None = None
    """The model with the local latents integrated out, where that can be done."""


class Task(NamedTuple):
    """A posterior that every method can be given.

    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from rvrs import baselines
    >>> def model():
    ...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(x, 1.0), obs=2.0)
    >>> baselines.Task("conjugate", model).name
    'conjugate'
    """

    name: str
    model: Callable[[], Any]
    """A NumPyro model without arguments: it holds its data."""
    local: LocalParts | None = None
    """What the methods for local latents need."""


class Estimate(NamedTuple):
    """An average and its Monte Carlo standard error.

    >>> from rvrs import baselines
    >>> value, error = baselines.Estimate(-3.2, 0.1)
    >>> print(f"{value} ± {error}")
    -3.2 ± 0.1
    """

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
    """A method that has been trained and judged; made by :func:`rvrs.baselines.fit`.

    >>> import jax, numpyro
    >>> import numpyro.distributions as dist
    >>> from rvrs import baselines
    >>> def model():
    ...     x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("y", dist.Normal(x, 1.0), obs=2.0)
    >>> task = baselines.Task("conjugate", model)
    >>> fitted = baselines.fit(
    ...     jax.random.key(0), "mf", task, num_steps=200, num_evaluation_draws=1000
    ... )
    >>> fitted.sample(jax.random.key(1), 10)["x"].shape
    (10,)
    """

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
