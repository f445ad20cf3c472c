"""The drawing of Figure 1, apart from what is drawn: :mod:`rvrs.experiments.funnel`."""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    # For their names only: the module imports this one.
    from rvrs.experiments.funnel import Densities, Fit

# The shares of probability mass that the contours of every density enclose.
_CONTOUR_MASSES = (0.95, 0.8, 0.5, 0.2)
# The axes show what matters of the funnel; the grid is wider, so that the masses come out right.
_SHOWN = 4.5
GRID = np.linspace(-12.0, 12.0, 481)
"""Both axes of the grid that densities are drawn from."""

# From the outermost to the innermost region of the target, light enough to show lines on top.
_TARGET_COLORS = ("#fee3c8", "#fdc692", "#fda55c", "#f5842f")
# So many that the map looks continuous.
_ACCEPTANCE_LEVELS = np.linspace(0.0, 1.0, 101)
_FIT_COLOR = "#1f4fbf"


def draw(fits: "Sequence[Fit]", on_grid: "Sequence[Densities]", path: str | PathLike[str]) -> None:
    """Draw a column for each fit, the last of which is the mean-field one.

    Parameters
    ----------
    fits
        By rising target acceptance.
    on_grid
        The densities of each fit on the square of :data:`GRID`.
    path
        Image file; its suffix tells the format.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

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
            GRID, GRID, grid.acceptance, _ACCEPTANCE_LEVELS, norm=colors.norm, cmap=colors.cmap
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
    panel.contourf(GRID, GRID, target, levels, colors=_TARGET_COLORS)


def _outline(panel: "Axes", density: np.ndarray, color: str, **style: Any) -> None:
    panel.contour(GRID, GRID, density, _levels(density), colors=color, **style)


def _levels(density: np.ndarray) -> np.ndarray:
    """The densities above which the shares of the mass lie, from the outermost contour inwards."""
    cell = (GRID[1] - GRID[0]) ** 2
    descending = np.sort(density, axis=None)[::-1]
    mass = np.cumsum(descending) * cell
    return descending[np.searchsorted(mass, _CONTOUR_MASSES)]


def _title(fit: "Fit") -> str:
    if fit.target_acceptance == 1:
        return "Mean-field"
    return rf"RVRS, $Z_{{\mathrm{{target}}}}$ = {fit.target_acceptance:g}"


def _number(value: float, digits: int) -> str:
    """A number with a typographic minus sign."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
