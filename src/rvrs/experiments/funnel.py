r"""Figure 1 of the paper: rejection sculpts a mean-field proposal towards a funnel.

The target ("Characterizing RVRS" in the paper's appendix) is a funnel turned by 45 degrees,

.. math::

    \log p(x, y) = \log \phi\left(\tfrac{x + y}{\sqrt 2} \mid 0, 1\right)
                 + \log \phi\left(\tfrac{x - y}{\sqrt 2} \mid 0, e^{(x + y) / \sqrt 2}\right),

with :math:`\phi(\cdot \mid \mu, \sigma^2)` the normal density. It is normalised, so an ELBO is
minus a KL divergence and the best possible one is 0.
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rvrs import vi
from rvrs.core.acceptance import log_acceptance
from rvrs.proposals import DiagonalNormal, diagonal_normal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET_ACCEPTANCES = (1.0, 0.5, 0.05)
"""Z_target of the figure's fits; 1 is ordinary mean-field variational inference."""

NUM_STEPS = 50_000
"""Steps per fit. The exact ELBO was then within 5e-4 of its limit for each of three seeds, less
than the Monte Carlo error of its estimate. (The paper takes 5 million steps.)"""

NUM_EVALUATION_PROPOSALS = 1_000_000
"""Proposals that an ELBO is estimated from, as in the paper."""

# Rate of Adam at the first step; it falls to zero along a cosine, which averages out the noise.
_LEARNING_RATE = 1e-2
# The paper's guardrail for this figure.
_EPSILON = 1e-6


class Fit(NamedTuple):
    """One fit and its evaluation."""

    name: str
    target_acceptance: float
    epsilon: float
    parameters: DiagonalNormal
    """The mean-field normal proposal ``q``."""
    elbo: float
    elbo_error: float
    """Monte Carlo standard error of ``elbo``."""
    acceptance: float
    """``Z``, the acceptance probability of a proposal."""
    threshold: float
    """``T``, calibrated to the trained proposal."""
    seconds: float
    """Wall time of the training, including compilation."""


def log_density(position: jax.Array) -> jax.Array:
    """Log density of the normalised funnel at ``position = (x, y)``."""
    x, y = position
    along, across = (x + y) / math.sqrt(2), (x - y) / math.sqrt(2)
    log_variance = along
    squares = along**2 + across**2 * jnp.exp(-log_variance)
    return -0.5 * (squares + log_variance) - math.log(2 * math.pi)


def method_name(target_acceptance: float) -> str:
    """What a fit is called in tables."""
    return "mean-field" if target_acceptance == 1 else f"RVRS, Z_target = {target_acceptance:g}"


def fit(
    rng_key: jax.Array,
    target_acceptance: float,
    *,
    num_steps: int = NUM_STEPS,
    num_evaluation_proposals: int = NUM_EVALUATION_PROPOSALS,
    callback: Callable[[int, vi.RVRSState, vi.RVRSInfo], None] | None = None,
) -> Fit:
    """Train a mean-field proposal at ``target_acceptance`` from the origin, and evaluate it.

    The paper starts RVRS from a mean-field fit; here the origin leads to the same ELBO. The
    ``callback`` is that of :func:`rvrs.vi.run`.
    """
    train_key, evaluate_key = jax.random.split(rng_key)
    algorithm = _algorithm(target_acceptance, num_steps)
    start = time.perf_counter()
    state = algorithm.init(jnp.zeros(2))
    state, _ = vi.run(train_key, algorithm, state, num_steps, callback=callback)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    evidence = algorithm.evaluate(evaluate_key, state, num_proposals=num_evaluation_proposals)
    return Fit(
        name=method_name(target_acceptance),
        target_acceptance=target_acceptance,
        epsilon=_epsilon(target_acceptance),
        parameters=state.parameters,
        elbo=float(evidence.elbo),
        elbo_error=float(evidence.elbo_error),
        acceptance=math.exp(evidence.log_normalizer),
        threshold=float(evidence.threshold),
        seconds=seconds,
    )


# Cached so that a second fit with the same settings finds its compiled programs.
@cache
def _algorithm(target_acceptance: float, num_steps: int) -> vi.VIAlgorithm:
    return vi.as_top_level_api(
        log_density,
        optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, num_steps)),
        proposal="diagonal",
        target_acceptance=target_acceptance,
        epsilon=_epsilon(target_acceptance),
    )


def _epsilon(target_acceptance: float) -> float:
    # Where everything is accepted there is nothing to guard.
    return 0.0 if target_acceptance == 1 else _EPSILON


class Densities(NamedTuple):
    """The functions that Figure 1 shows, on a grid; arrays are indexed ``[y, x]``."""

    target: np.ndarray
    """``p(z)``."""
    proposal: np.ndarray
    """``q(z)``."""
    acceptance: np.ndarray
    """``a_e(z)``, the probability that a proposal at z is accepted."""
    fit: np.ndarray
    """``r(z) = q(z) a_e(z) / Z``."""


def densities(fit: Fit, axis: np.ndarray) -> Densities:
    """Evaluate a fit on the square grid ``axis`` times ``axis``."""
    x, y = np.meshgrid(axis, axis)
    z = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=-1), fit.parameters.loc.dtype)
    log_p, log_q, log_a = _log_densities(z, fit.parameters, fit.threshold, epsilon=fit.epsilon)
    log_r = log_q + log_a - math.log(fit.acceptance)
    return Densities(
        *(np.exp(np.asarray(log, float)).reshape(x.shape) for log in (log_p, log_q, log_a, log_r))
    )


@partial(jax.jit, static_argnames="epsilon")
def _log_densities(
    z: jax.Array, parameters: DiagonalNormal, t: jax.typing.ArrayLike, *, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``log p``, ``log q`` and ``log a_e`` at points ``(n, 2)``."""
    log_p = jax.vmap(log_density)(z)
    log_q = jax.vmap(diagonal_normal().log_density, in_axes=(None, 0))(parameters, z)
    log_a = log_acceptance(log_p - log_q, jnp.full_like(log_p, t), epsilon)
    return log_p, log_q, log_a


# The shares of probability mass that the contours of every density enclose.
_CONTOUR_MASSES = (0.95, 0.8, 0.5, 0.2)
# The axes show what matters of the funnel; the grid is wider, so that the masses come out right.
_SHOWN = 4.5
_GRID = np.linspace(-12.0, 12.0, 481)

# From the outermost to the innermost region of the target, light enough to show lines on top.
_TARGET_COLORS = ("#fee3c8", "#fdc692", "#fda55c", "#f5842f")
# So many that the map looks continuous.
_ACCEPTANCE_LEVELS = np.linspace(0.0, 1.0, 101)
_FIT_COLOR = "#1f4fbf"


def plot(fits: Iterable[Fit], path: str | PathLike[str]) -> None:
    """Draw Figure 1 and save it to ``path``.

    Parameters
    ----------
    fits
        One or more RVRS fits and the mean-field fit, in any order; they become the columns, by
        rising target acceptance.
    path
        Image file; its suffix tells the format.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    fits = sorted(fits, key=lambda fit: fit.target_acceptance)
    if len(fits) < 2 or fits[-1].target_acceptance != 1:
        raise ValueError(
            "fits must hold a mean-field fit (target_acceptance=1) and at least one other, got "
            f"target acceptances {[fit.target_acceptance for fit in fits]}."
        )
    on_grid = [densities(fit, _GRID) for fit in fits]
    figure = Figure(figsize=(3.7 * len(fits), 8.7), layout=ConstrainedLayoutEngine(h_pad=0.08))
    axes = figure.subplots(2, len(fits), sharex=True, sharey=True)

    for panel, fit, grid in zip(axes[0], fits, on_grid, strict=True):
        _fill_target(panel, grid.target)
        if fit.target_acceptance < 1:
            _outline(panel, grid.proposal, "black", linestyles="dashed", linewidths=0.8)
        _outline(panel, grid.fit, _FIT_COLOR, linewidths=1.5)
        panel.set_title(f"{_title(fit)}\nELBO = {_number(fit.elbo, 4)} ± {fit.elbo_error:.4f}")

    *acceptance_panels, target_panel = axes[1]
    colors = ScalarMappable(Normalize(0, 1), "viridis")
    for panel, fit, grid in zip(acceptance_panels, fits[:-1], on_grid[:-1], strict=True):
        panel.contourf(
            _GRID, _GRID, grid.acceptance, _ACCEPTANCE_LEVELS, norm=colors.norm, cmap=colors.cmap
        )
        panel.set_title(f"Acceptance $a(z)$, $T$ = {_number(fit.threshold, 2)}")
    figure.colorbar(
        colors,
        ax=acceptance_panels,
        location="bottom",
        label="acceptance probability $a(z)$",
        shrink=0.7,
        aspect=40,
        pad=0.03,
    )
    _fill_target(target_panel, on_grid[-1].target)
    target_panel.set_title("Target alone (best ELBO = 0)")

    for panel in axes.flat:
        panel.set(xlim=(-_SHOWN, _SHOWN), ylim=(-_SHOWN, _SHOWN), aspect="equal")
        panel.set(xlabel="$x$", ylabel="$y$")
        panel.label_outer()
    figure.suptitle("Figure 1 of the paper: RVRS sculpts a proposal towards a funnel", fontsize=15)
    masses = ", ".join(f"{100 * mass:.0f}" for mass in reversed(_CONTOUR_MASSES))
    figure.legend(
        handles=[
            Patch(color=_TARGET_COLORS[-1], label="target $p(z)$"),
            Line2D([], [], color=_FIT_COLOR, label="variational fit $r(z)$"),
            Line2D([], [], color="black", linestyle="dashed", label="proposal $q(z)$"),
        ],
        title=f"Contours enclose {masses} % of the probability mass",
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def _fill_target(panel: "Axes", target: np.ndarray) -> None:
    levels = [*_levels(target), target.max()]
    panel.contourf(_GRID, _GRID, target, levels, colors=_TARGET_COLORS)


def _outline(panel: "Axes", density: np.ndarray, color: str, **style: Any) -> None:
    panel.contour(_GRID, _GRID, density, _levels(density), colors=color, **style)


def _levels(density: np.ndarray) -> np.ndarray:
    """The densities above which the shares of the mass lie, from the outermost contour inwards."""
    cell = (_GRID[1] - _GRID[0]) ** 2
    descending = np.sort(density, axis=None)[::-1]
    mass = np.cumsum(descending) * cell
    return descending[np.searchsorted(mass, _CONTOUR_MASSES)]


def _title(fit: Fit) -> str:
    if fit.target_acceptance == 1:
        return "Mean-field"
    return rf"RVRS, $Z_{{\mathrm{{target}}}}$ = {fit.target_acceptance:g}"


def _number(value: float, digits: int) -> str:
    """A number with a typographic minus sign."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
