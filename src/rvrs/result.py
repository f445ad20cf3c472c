"""The result of a fit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rvrs import diagnostics, plots
from rvrs.core import arguments as checks
from rvrs.core.problem import PRNGKey
from rvrs.guides import AutoRVRS
from rvrs.guides._numpyro import Arguments
from rvrs.guides._target import PosteriorDraws
from rvrs.storage import Checkpoint, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Draws that summary() is made of, and to_arviz() by default.
_SUMMARY_DRAWS = 10_000
ARVIZ_DRAWS = 2_000


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained and evaluated approximation; made by :func:`rvrs.fit`.

    Numbers are those of ``r``, the proposal after rejection, with T solved for
    ``target_acceptance``.

    >>> import jax, numpyro, rvrs
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    ...     numpyro.sample("y", dist.Poisson(rate), obs=y)
    >>> y = jax.numpy.array([3, 1, 4, 1, 5])
    >>> fit = rvrs.fit(jax.random.key(0), model, y, num_steps=500, progress=False)
    >>> print(fit.summary().splitlines()[5])  # doctest: +ELLIPSIS
      ESS           ... weighted draws
    >>> fit.sample(jax.random.key(1), 100, resample=True)["rate"].shape
    (100,)
    >>> bool(0 <= fit.log_evidence - fit.elbo < 0.1)
    True
    """

    guide: AutoRVRS
    params: dict[str, Any]
    """Parameters of guide and model, as ``guide.sample_posterior`` and ``SVI`` take them."""
    elbo: float
    elbo_error: float
    """Monte Carlo standard error of ``elbo``."""
    log_evidence: float
    """``log p(x)`` by importance sampling; only as good as ``khat`` says."""
    log_evidence_error: float
    acceptance: float
    """Z, the acceptance probability of a proposal."""
    threshold: float
    """T."""
    khat: float
    """Pareto k-hat of the draws' weights against the posterior: up to 0.7 is fine."""
    ess: float
    """Effective sample size of ``num_draws`` draws when weighted or resampled."""
    num_draws: int
    """Draws that ``khat`` and ``ess`` come from."""
    losses: np.ndarray
    """Minus an estimate of the ELBO, for every training step."""
    acceptances: np.ndarray
    """Acceptance, for every training step."""
    thresholds: np.ndarray
    """T, for every training step."""
    proposals_per_draw: np.ndarray
    """Proposals per draw, for every training step."""
    warnings: tuple[str, ...]
    """What is doubtful about the fit, in words; empty if nothing is."""
    seconds: float
    """Wall time of the whole fit, compilation included."""
    proposal_name: str
    """``"diagonal"``, ``"mvn"``, ``"low_rank"`` or what the proposal was given as."""
    arguments: Arguments = field(repr=False)
    """The model's arguments, the data among them."""
    checkpoint: Checkpoint = field(repr=False)
    """What training ended with; it is what ``save`` stores."""

    def __repr__(self) -> str:
        return (
            f"Fit(elbo={self.elbo:.3f} ± {self.elbo_error:.3f}, "
            f"acceptance={self.acceptance:.3g}, khat={self.khat:.2f}, "
            f"proposal={self.proposal_name!r})"
        )

    def sample(
        self, rng_key: PRNGKey, num_samples: int = 1000, *, resample: bool = False
    ) -> dict[str, jax.Array]:
        """Posterior draws of all latent and deterministic sites, with one leading axis.

        Parameters
        ----------
        resample
            Whether to draw more and keep ``num_samples`` of them with probabilities given by their
            Pareto-smoothed weights against the posterior (with replacement). Brings the draws
            closer to the posterior where ``khat`` is low; some of them then appear twice, and
            ``ess`` tells how many of ``num_draws`` count.
        """
        checks.check_key("rng_key", rng_key)
        checks.check_count("num_samples", num_samples)
        checks.check_flag("resample", resample)
        if not resample:
            return self._constrain(self._draw(rng_key, num_samples).latent)
        draw_key, choice_key = jax.random.split(rng_key)
        # Several times as many, so that the resampled ones are mostly different.
        drawn = self._draw(draw_key, 4 * num_samples)
        kept = np.flatnonzero(drawn.complete)
        smoothed = diagnostics.smooth(np.asarray(drawn.log_ratio)[kept])
        chosen = jax.random.choice(
            choice_key, jnp.asarray(kept), (num_samples,), p=jnp.asarray(smoothed.weights)
        )
        return self._constrain(drawn.latent[chosen])

    def summary(self) -> str:
        """A table of the posterior's moments and quantiles, below the quality of the fit."""
        draws = self._latent_sites(self.sample(jax.random.key(0), _SUMMARY_DRAWS))
        lines = [
            f"RVRS fit, {self.proposal_name} proposal, {len(self.losses)} steps, "
            f"{self.seconds:.1f} s",
            f"  ELBO          {self.elbo:.4f} ± {self.elbo_error:.4f}",
            f"  log evidence  {self.log_evidence:.4f} ± {self.log_evidence_error:.4f}",
            f"  acceptance    {self.acceptance:.4f}  (T = {self.threshold:.2f}, "
            f"{1 / self.acceptance:.1f} proposals per draw)",
            f"  k-hat         {self.khat:.2f}  ({_judgement(self.khat)})",
            f"  ESS           {self.ess:.0f} of {self.num_draws} weighted draws",
            "",
            *diagnostics.table(draws),
        ]
        lines += ["", *(f"WARNING: {warning}" for warning in self.warnings)]
        return "\n".join(lines).rstrip()

    def to_arviz(self, rng_key: PRNGKey | None = None, num_samples: int = ARVIZ_DRAWS) -> Any:
        """An ``arviz.InferenceData`` of independent draws (one chain).

        Its ``sample_stats`` hold ``lw`` (log weight under the proposal), ``A`` (log weight of the
        draw against the posterior) and ``acceptance`` of every draw, its attributes the fit's
        figures.
        """
        checks.check_count("num_samples", num_samples)
        arviz = diagnostics.arviz()
        drawn = self._draw(jax.random.key(0) if rng_key is None else rng_key, num_samples)
        sites = self._constrain(drawn.latent)
        stats = {"lw": drawn.log_weight, "A": drawn.log_ratio, "acceptance": drawn.acceptance}
        as_chain = {name: np.asarray(value)[None] for name, value in (sites | stats).items()}
        attributes = {
            name: getattr(self, name)
            for name in (
                *("elbo", "elbo_error", "log_evidence", "log_evidence_error", "acceptance"),
                *("threshold", "khat", "ess", "proposal_name"),
            )
        }
        return arviz.from_dict(
            posterior={name: as_chain[name] for name in sites},
            sample_stats={name: as_chain[name] for name in stats},
            attrs=attributes | {"inference_library": "rvrs"},
            **self._axes(),
        )

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """The ELBO and acceptance while training, and marginals of proposal and fit.

        Returns the figure, and saves it if ``path`` is given.
        """
        checks.check_optional_file("path", path)
        args, kwargs = self.arguments
        fitted = self.sample(jax.random.key(0), _SUMMARY_DRAWS)
        proposed = self.guide.propose_latent(
            jax.random.key(1), self.params, *args, num_samples=_SUMMARY_DRAWS, **kwargs
        )
        proposal = self._constrain(proposed)
        return plots.plot_fit(
            losses=self.losses,
            acceptances=self.acceptances,
            target_acceptance=self.guide.settings.target_acceptance,
            elbo=self.elbo,
            proposal=self._latent_sites(proposal),
            fitted=self._latent_sites(fitted),
            path=path,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Store the fit in one file (no pickle), for :func:`rvrs.load` and for resuming."""
        checks.check_file("path", path)
        write(path, self.checkpoint)

    def _draw(self, rng_key: PRNGKey, num_samples: int) -> PosteriorDraws:
        args, kwargs = self.arguments
        return self.guide.draw_latent(
            rng_key, self.params, *args, num_samples=num_samples, **kwargs
        )

    def _constrain(self, latent: jax.Array) -> dict[str, jax.Array]:
        """What users see of flat unconstrained draws."""
        args, kwargs = self.arguments
        return self.guide.constrain(self.params, latent, *args, **kwargs)

    def _latent_names(self) -> Sequence[str]:
        """What tables and figures show of it."""
        return self.guide.latent_names

    def _axes(self) -> dict[str, Any]:
        """Names of axes and of what is along them, as ArviZ takes them."""
        return {}

    def _latent_sites(self, sites: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        return {name: np.asarray(sites[name]) for name in self._latent_names()}


def _judgement(khat: float) -> str:
    if np.isnan(khat):
        return "unknown"
    return "good" if khat <= 0.5 else "fair" if khat <= diagnostics.KHAT_LIMIT else "not reliable"
