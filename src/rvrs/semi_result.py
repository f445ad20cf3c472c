"""The result of a fit with local latent variables."""

from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rvrs import diagnostics, plots
from rvrs.batches import Batches
from rvrs.core import arguments as checks
from rvrs.core.problem import PRNGKey
from rvrs.guides import AutoSemiRVRS
from rvrs.storage import Checkpoint, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Draws that summary() is made of.
_SUMMARY_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class SemiFit:
    """A trained and evaluated :class:`rvrs.AutoSemiRVRS`; made by :func:`rvrs.fit`.

    >>> import jax, numpyro, rvrs
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     with numpyro.plate("data", len(y)):
    ...         z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    ...         numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
    >>> guide = rvrs.AutoSemiRVRS(model, model, target_acceptance=0.5)
    >>> y = jax.numpy.linspace(-2.0, 2.0, 20)
    >>> fit = rvrs.fit(
    ...     jax.random.key(0), model, y, guide=guide, batch_size=5, num_steps=200, progress=False
    ... )
    >>> fit.sample(jax.random.key(1), 100, indices=[0, 19])["z"].shape
    (100, 2)
    """

    guide: AutoSemiRVRS
    params: dict[str, Any]
    """Parameters of guide and model, as ``guide.sample_posterior`` and ``SVI`` take them."""
    elbo: float
    elbo_error: float
    """Monte Carlo standard error of ``elbo``."""
    elbo_bias: float
    """Estimated bias of ``elbo``; see :meth:`rvrs.AutoSemiRVRS.evaluate`."""
    marginal_elbo: float
    """What ``elbo`` would be with exact local posteriors: the rest is what rejection could still
    gain."""
    marginal_elbo_error: float
    acceptance: float
    """Acceptance probability of a proposal, averaged over data points."""
    acceptance_range: tuple[float, float]
    """Its 5 and 95 % quantiles over data points."""
    losses: np.ndarray
    """Minus an estimate of the ELBO, for every training step."""
    acceptances: np.ndarray
    """Acceptance, for every training step."""
    proposals_per_draw: np.ndarray
    """Proposals per draw, for every training step."""
    dropped: np.ndarray
    """Share of the batch's points that did not get their draws, for every training step."""
    thresholds: np.ndarray
    """T of every data point at the end of training."""
    warnings: tuple[str, ...]
    """What is doubtful about the fit, in words; empty if nothing is."""
    seconds: float
    """Wall time of the whole fit, compilation included."""
    data: Batches = field(repr=False)
    """The model's arguments, the data among them, and how batches are made of them."""
    checkpoint: Checkpoint = field(repr=False)
    """What training ended with; it is what ``save`` stores."""

    def __repr__(self) -> str:
        return (
            f"SemiFit(elbo={self.elbo:.3f} ± {self.elbo_error:.3f}, "
            f"acceptance={self.acceptance:.3g}, num_points={self.data.num_points})"
        )

    def sample(
        self, rng_key: PRNGKey, num_samples: int = 1000, *, indices: Any = None
    ) -> dict[str, jax.Array]:
        """Posterior draws of all latent and deterministic sites, with one leading axis.

        Parameters
        ----------
        indices
            The data points whose local latents are wanted; by default all.
        """
        checks.check_key("rng_key", rng_key)
        checks.check_count("num_samples", num_samples)
        index = self.data.check_index("indices", indices)
        return self.guide.draw_points(
            rng_key, self.params, jnp.asarray(index), self.data.take(index), num_samples
        )

    def summary(self) -> str:
        """The quality of the fit, and a table of the global latents."""
        epochs = len(self.losses) / self.data.per_epoch
        draws = self.sample(jax.random.key(0), _SUMMARY_DRAWS, indices=[0])
        local = [site.name for site in self.guide.plate_of(self.data.take(np.array([0]))).local]
        lowest, highest = self.acceptance_range
        lines = [
            f"RVRS fit of {self.data.num_points} data points with local latents "
            f"({', '.join(local)}), {len(self.losses)} steps of {self.data.batch_size} "
            f"({epochs:.1f} epochs), {self.seconds:.1f} s",
            f"  ELBO            {self.elbo:.4f} ± {self.elbo_error:.4f}",
            f"  marginal ELBO   {self.marginal_elbo:.4f} ± {self.marginal_elbo_error:.4f}  "
            "(with exact local posteriors)",
            f"  acceptance      {self.acceptance:.4f}  (90 % of points: {lowest:.3g} to "
            f"{highest:.3g})",
            f"  dropped points  {100 * self.dropped[-self.data.per_epoch :].mean():.2g} % of a "
            "batch at the end",
        ]
        sites = {n: np.asarray(v) for n, v in draws.items() if n in self._global_names()}
        lines += ["", *diagnostics.table(sites)] if sites else []
        lines += ["", *(f"WARNING: {warning}" for warning in self.warnings)]
        return "\n".join(lines).rstrip()

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """The ELBO, acceptance and dropped points while training.

        Returns the figure, and saves it if ``path`` is given.
        """
        checks.check_optional_file("path", path)
        return plots.plot_semi_fit(
            losses=self.losses,
            acceptances=self.acceptances,
            target_acceptance=self.guide.settings.target_acceptance,
            dropped=self.dropped,
            elbo=self.elbo,
            path=path,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Store the fit in one file (no pickle), for :func:`rvrs.load` and for resuming."""
        checks.check_file("path", path)
        write(path, self.checkpoint)

    def _global_names(self) -> tuple[str, ...]:
        return self.guide.plate_of(self.data.take(np.array([0]))).global_names
