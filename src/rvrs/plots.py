"""Figures of a fit, and of marginals of several methods."""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MAX_PANELS = 12
"""Marginals that a figure shows at most: three rows that still fit on a screen."""

_COLUMNS = 4
# Inches of a panel. A figure is as wide as a full row even if it has fewer panels.
_PANEL_WIDTH, _PANEL_HEIGHT = 3.0, 2.3
_DPI = 150

_BINS = 40
# Points of a smoothed curve.
_GRID_SIZE = 200
# Shares of the draws beyond the ends of an axis, where single draws would only stretch it.
_TAIL = 0.005
# What a trace shows at least; the lowest share belongs to the first steps and to outliers.
_TRACE_QUANTILES = (0.01, 0.999)
# The running mean is over this share of all steps: 1 / sqrt of it is what it takes off the noise.
_WINDOW_SHARE = 0.02

_NOISE_COLOR = "#c3cfe6"
_FIT_COLOR = "#1f4fbf"
_PROPOSAL_COLOR = "#f5842f"
_REFERENCE_COLOR = "#c9c9c9"
# For methods, in their order; told apart by most colour-blind readers, and by their dashes.
_METHOD_STYLES = (
    ("#d6453d", "solid"),
    ("#2f8f5b", "dashed"),
    ("#7aa6e8", "solid"),
    ("#1f4fbf", "solid"),
    ("#8a4fbf", "dashdot"),
    ("black", "dotted"),
)


def plot_fit(
    *,
    losses: np.ndarray,
    acceptances: np.ndarray,
    target_acceptance: float,
    elbo: float,
    proposal: Mapping[str, np.ndarray],
    fitted: Mapping[str, np.ndarray],
    path: str | PathLike[str] | None = None,
) -> "Figure":
    """Draw how a fit was trained and what came of it.

    Traces of ELBO and acceptance on top; below, the marginals of the first ``MAX_PANELS`` latent
    scalars, before and after rejection.

    Parameters
    ----------
    losses
        Minus an estimate of the ELBO, for every training step; NaN for a skipped one.
    acceptances
        Acceptance, for every training step.
    target_acceptance
        What the acceptance was adapted to.
    elbo
        The final ELBO.
    proposal, fitted
        Draws of the proposal and of the fit: latent sites by name, draws along the first axis.
    path
        Image file to save the figure to; its suffix tells the format.
    """
    scalars, proposed = _scalars(fitted), _scalars(proposal)
    shown = list(scalars)[:MAX_PANELS]
    rows = math.ceil(len(shown) / _COLUMNS)
    traces_height = 1.3 * _PANEL_HEIGHT
    # Room for title and legend.
    marginals_height = rows * _PANEL_HEIGHT + 0.7
    figure = _figure(_COLUMNS * _PANEL_WIDTH, traces_height + marginals_height)
    ratios = (traces_height, marginals_height)
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios).flat

    _traces(top.subplots(1, 2), losses, acceptances, target_acceptance, elbo)

    number = f"the first {len(shown)} of {len(scalars)}" if len(scalars) > len(shown) else "all"
    bottom.suptitle(f"Marginals of {number} latent scalars" if len(scalars) > 1 else "Marginal")
    panels = _panels(bottom, shown)
    for panel, name in zip(panels, shown, strict=True):
        edges = _edges(scalars[name], [proposed[name]])
        _stairs(panel, proposed[name], edges, label="proposal $q$", color=_PROPOSAL_COLOR)
        _stairs(panel, scalars[name], edges, label="fit $r$", color=_FIT_COLOR, linewidth=1.8)
    _shared_legend(bottom, panels)
    return _saved(figure, path)


def plot_semi_fit(
    *,
    losses: np.ndarray,
    acceptances: np.ndarray,
    target_acceptance: float,
    dropped: np.ndarray,
    elbo: float,
    path: str | PathLike[str] | None = None,
) -> "Figure":
    """Draw how a fit with local latents was trained.

    Parameters
    ----------
    losses, acceptances, target_acceptance, elbo, path
        As for :func:`plot_fit`.
    dropped
        Share of the batch's data points that did not get their draws, for every training step.
    """
    figure = _figure(_COLUMNS * _PANEL_WIDTH, 1.4 * _PANEL_HEIGHT)
    *traces, last = figure.subplots(1, 3)
    _traces(traces, losses, acceptances, target_acceptance, elbo)
    _trace(last, 100 * np.asarray(dropped, float), 0.0, "none")
    last.set(title="Dropped data points", xlabel="step", ylabel="share of the batch (%)")
    last.legend(loc="upper right")
    return _saved(figure, path)


def plot_marginals(
    methods: Mapping[str, Mapping[str, np.ndarray]],
    reference: Mapping[str, np.ndarray],
    *,
    reference_name: str = "NUTS",
    title: str = "Marginals",
    path: str | PathLike[str] | None = None,
) -> "Figure":
    """Draw the marginals of several methods in shared panels, on top of a reference.

    Parameters
    ----------
    methods
        Draws of every method by its name: sites by name, draws along the first axis.
    reference
        Draws of the reference, which becomes a filled area. Its scalars are the panels, of which
        the first ``MAX_PANELS`` are shown.
    path
        Image file to save the figure to; its suffix tells the format.

    Notes
    -----
    Curves are smoothed, so that several can be told apart. Sharp ends of a distribution, as at 0,
    are rounded off; histograms as in :func:`plot_fit` show them.
    """
    if len(methods) > len(_METHOD_STYLES):
        raise ValueError(f"methods must be at most {len(_METHOD_STYLES)}, got {len(methods)}.")
    scalars = _scalars(reference)
    by_method = {name: _scalars(draws) for name, draws in methods.items()}
    for method, draws in by_method.items():
        missing = [name for name in scalars if name not in draws]
        if missing:
            raise ValueError(f"methods: {method!r} lacks {', '.join(missing)}.")
    shown = list(scalars)[:MAX_PANELS]
    if len(scalars) > len(shown):
        title += f" (the first {len(shown)} of {len(scalars)} scalars)"
    rows = math.ceil(len(shown) / _COLUMNS)
    figure = _figure(_COLUMNS * _PANEL_WIDTH, rows * _PANEL_HEIGHT + 1.0)
    figure.suptitle(title)
    panels = _panels(figure, shown)
    for panel, name in zip(panels, shown, strict=True):
        edges = _edges(scalars[name], [draws[name] for draws in by_method.values()])
        grid = np.linspace(edges[0], edges[-1], _GRID_SIZE)
        density = _smooth_density(scalars[name], grid)
        panel.fill_between(grid, density, color=_REFERENCE_COLOR, label=reference_name)
        for (method, draws), (color, dashes) in zip(
            by_method.items(), _METHOD_STYLES, strict=False
        ):
            density = _smooth_density(draws[name], grid)
            panel.plot(grid, density, label=method, color=color, linestyle=dashes)
        panel.set_xlim(edges[0], edges[-1])
        panel.set_ylim(bottom=0)
    _shared_legend(figure, panels)
    return _saved(figure, path)


def _figure(width: float, height: float) -> "Figure":
    """A figure that is no part of pyplot's state, so that a program's own plots stay untouched."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib, which is not installed; run: pip install 'rvrs[cli]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _saved(figure: "Figure", path: str | PathLike[str] | None) -> "Figure":
    if path is not None:
        figure.savefig(path, dpi=_DPI)
    return figure


def _scalars(sites: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Draws of every scalar by its name, as ``theta[1,2]``."""
    found = {}
    for name, value in sites.items():
        value = np.asarray(value, float)
        for index in np.ndindex(value.shape[1:]):
            position = ",".join(str(i) for i in index)
            found[f"{name}[{position}]" if index else name] = value[(slice(None), *index)]
    return found


def _panels(figure: "Figure | SubFigure", names: list[str]) -> list["Axes"]:
    """One panel for each name, in rows."""
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    grid = figure.subplots(rows, columns, squeeze=False)
    panels = list(grid.flat)
    for panel in panels[len(names) :]:
        panel.remove()
    for index, (panel, name) in enumerate(zip(panels, names, strict=False)):
        panel.set(xlabel=name, yticks=[])
        # Densities are compared by shape: their scale is in the horizontal axis.
        panel.set_ylabel("density" if index % columns == 0 else "")
    return panels[: len(names)]


def _shared_legend(figure: "Figure | SubFigure", panels: list["Axes"]) -> None:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _traces(
    panels: "Sequence[Axes] | np.ndarray",
    losses: np.ndarray,
    acceptances: np.ndarray,
    target_acceptance: float,
    elbo: float,
) -> None:
    """ELBO and acceptance while training, in two panels."""
    elbo_panel, acceptance_panel = panels
    _trace(elbo_panel, -np.asarray(losses, float), elbo, f"final ELBO {_number(elbo, 3)}")
    elbo_panel.set(title="ELBO while training", xlabel="step", ylabel="ELBO")
    elbo_panel.legend(loc="lower right")
    label = f"target {target_acceptance:g}"
    _trace(acceptance_panel, np.asarray(acceptances, float), target_acceptance, label)
    acceptance_panel.set(title="Acceptance while training", xlabel="step", ylabel="acceptance $Z$")
    acceptance_panel.set_ylim(bottom=0)
    acceptance_panel.legend(loc="lower right")


def _trace(panel: "Axes", values: np.ndarray, level: float, label: str) -> None:
    """The noisy values of all steps, their running mean, and the level they should come to."""
    steps = np.arange(1, len(values) + 1)
    panel.plot(steps, values, color=_NOISE_COLOR, linewidth=0.5, label="every step")
    window = max(1, round(_WINDOW_SHARE * len(values)))
    if window > 1:
        mean = _running_mean(values, window)
        label_mean = f"mean over {window} steps"
        panel.plot(steps, mean, color=_FIT_COLOR, linewidth=1.5, label=label_mean)
    panel.axhline(level, color="black", linestyle="dashed", linewidth=1, label=label)
    known = values[np.isfinite(values)]
    if known.size:
        low, high = np.quantile(known, _TRACE_QUANTILES)
        low, high = min(low, level), max(high, level)
        margin = 0.05 * (high - low) or 0.05
        panel.set_ylim(low - margin, high + margin)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Means over the latest ``window`` finite values, fewer at the beginning; NaN without any."""
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known).astype(float)
    for total in (sums, counts):
        total[window:] -= total[:-window].copy()
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _edges(main: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Edges of the bins: where ``main`` is, and the others too unless they are far away."""
    low, high = _range(main)
    width = (high - low) or 1.0
    ranges = [_range(other) for other in others if np.isfinite(other).any()]
    # Far wider ones would make a single bin of the main curve.
    left = max(min([low, *(start for start, _ in ranges)]), low - width)
    right = min(max([high, *(end for _, end in ranges)]), high + width)
    if left == right:
        left, right = left - width / 2, right + width / 2
    return np.linspace(left, right, _BINS + 1)


def _range(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    if not known.size:
        return 0.0, 0.0
    low, high = np.quantile(known, (_TAIL, 1 - _TAIL))
    return float(low), float(high)


def _stairs(panel: "Axes", values: np.ndarray, edges: np.ndarray, **style: object) -> None:
    """A histogram as an outline, normalised over all draws, also those beyond the edges."""
    known = values[np.isfinite(values)]
    counts, _ = np.histogram(known, edges)
    density = counts / (max(1, known.size) * (edges[1] - edges[0]))
    panel.stairs(density, edges, **style)  # pyright: ignore[reportArgumentType]
    panel.set_xlim(edges[0], edges[-1])


def _smooth_density(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Kernel density estimate on an even grid, from counts per cell of the grid."""
    known = values[np.isfinite(values)]
    step = grid[1] - grid[0]
    if known.size < 2:
        return np.zeros_like(grid)
    low, high = np.quantile(known, (0.25, 0.75))
    # Silverman's rule of thumb; the quartiles of a normal are 1.34 standard deviations apart.
    spread = min(known.std(), (high - low) / 1.34) or known.std()
    bandwidth = max(0.9 * spread * known.size**-0.2, step)
    # Cells beyond the ends too, as they reach in by their kernels.
    beyond = min(math.ceil(4 * bandwidth / step), 10 * grid.size)
    edges = grid[0] + step * (np.arange(-beyond, grid.size + beyond + 1) - 0.5)
    counts, _ = np.histogram(known, edges)
    offsets = step * np.arange(-beyond, beyond + 1)
    kernel = np.exp(-0.5 * (offsets / bandwidth) ** 2)
    return np.convolve(counts, kernel / kernel.sum(), mode="valid") / (known.size * step)


def _number(value: float, digits: int) -> str:
    """A number with a typographic minus sign."""
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
