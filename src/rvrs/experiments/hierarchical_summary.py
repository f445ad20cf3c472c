"""What the results of Table 2 amount to over seeds, and their pictures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rvrs.experiments import _seeds
from rvrs.experiments._seeds import Estimate
from rvrs.experiments.experiment import Result
from rvrs.experiments.hierarchical_methods import BUDGETS, LEAPFROGS, METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASE, ORACLE = "mean-field", "oracle"
ORDER = (*(f"semi-dais-{k}" for k in LEAPFROGS), *(f"semi-rvrs-{z}" for z in BUDGETS))
"""The paper's methods, as they rise in its Table 2."""
PAPER_GAINS = {
    "pol": dict(zip((*ORDER, ORACLE), (37.8, 73.8, 99.8, 116.9, 140.2, 143.1), strict=True)),
    "bike": dict(zip((*ORDER, ORACLE), (49.5, 110.8, 155.8, 187.8, 223.5, 228.6), strict=True)),
}
"""Table 2 of the paper: nats above mean-field."""
TABLE = tuple(method for method in METHODS if "budget" not in method)
"""All that is compared with mean-field; the others are compared with Algorithm 2."""


def budget_method(target_acceptance: float, num_proposals: int) -> str:
    """The name of Algorithm 3 with so many proposals per data point."""
    return f"semi-rvrs-{target_acceptance}-budget-{num_proposals}"


def _elbo(results: Sequence[Result], dataset: str, method: str) -> Estimate | None:
    """The mean over seeds.

    Its error is that over seeds, which has the Monte Carlo errors in it, but at least what these
    explain: few seeds can be close to each other by chance.
    """
    found = _seeds.succeeded(results, dataset, method)
    if not found:
        return None
    monte_carlo = math.hypot(*(result.figures["elbo_error"] for result in found)) / len(found)
    elbo = _seeds.estimate(found, "elbo")
    return elbo._replace(error=max(elbo.error or 0.0, monte_carlo))


def lead(results: Sequence[Result], dataset: str, method: str, other: str) -> Estimate | None:
    """Nats that the ELBO of a method is above that of another; None without results of both."""
    first, second = (_elbo(results, dataset, name) for name in (method, other))
    if first is None or second is None:
        return None
    error = math.hypot(first.error or 0.0, second.error or 0.0)
    return Estimate(first.mean - second.mean, error, min(first.num_seeds, second.num_seeds))


def fraction(results: Sequence[Result], dataset: str, method: str) -> Estimate | None:
    """Per cent of the gap between mean-field and oracle that a method closes.

    None without results of all three, or without a gap.
    """
    own, base, best = (_elbo(results, dataset, name) for name in (method, BASE, ORACLE))
    if own is None or base is None or best is None or best.mean <= base.mean:
        return None
    gap = best.mean - base.mean
    share = (own.mean - base.mean) / gap
    # To first order: the derivatives by the three ELBOs, times the gap.
    slopes = ((own, 1.0), (base, share - 1), (best, -share))
    error = math.hypot(*(slope * (elbo.error or 0.0) for elbo, slope in slopes)) / gap
    return Estimate(100 * share, 100 * error, own.num_seeds)


def milliseconds(results: Sequence[Result], dataset: str, method: str) -> Estimate | None:
    """Time of a training step."""
    found = _seeds.succeeded(results, dataset, method)
    if not found:
        return None
    return _seeds.mean([1e3 * result.figures["seconds_per_step"] for result in found])


class Kept(NamedTuple):
    """Points of a batch that were not left out at the end of training."""

    share: float
    number: float


def kept(results: Sequence[Result], dataset: str, method: str) -> Kept | None:
    """The mean over seeds."""
    found = _seeds.succeeded(results, dataset, method)
    if not found:
        return None
    share = 1 - _seeds.estimate(found, "dropped").mean
    return Kept(share, share * found[0].figures["batch_size"])


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw gains, Algorithm 3 beside Algorithm 2, and step times, as far as there are any."""
    figures = {
        "gains": _plot_gains(results),
        "budget": _plot_budgets(results),
        "times": _plot_times(results),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            paths.append(folder / f"hierarchical-{name}.png")
            figure.savefig(paths[-1], dpi=150)
    return paths


# As in the paper's figures.
_RVRS, _OTHERS = "#1f4fbf", "#d6453d"


def _points(panel: "Axes", values: Mapping[str, Estimate]) -> None:
    """A point for every method, with a legend of their kinds."""
    kinds: dict[str, dict[str, Any]] = {
        "Semi-RVRS by Algorithm 3": {"fmt": "^", "color": _RVRS},
        "Semi-RVRS by Algorithm 2": {"fmt": "s", "color": _RVRS},
        "others": {"fmt": "o", "color": _OTHERS},
    }
    for label, style in kinds.items():
        chosen = {
            place: found
            for place, (method, found) in enumerate(values.items())
            if _kind(method) == label
        }
        if chosen:
            means = [found.mean for found in chosen.values()]
            errors = [2 * (found.error or 0.0) for found in chosen.values()]
            panel.errorbar(list(chosen), means, yerr=errors, capsize=3, label=label, **style)
    panel.set_xticks(range(len(values)), list(values), rotation=90)
    panel.set_xlabel("method")
    panel.grid(axis="y", alpha=0.3)


def _kind(method: str) -> str:
    if not method.startswith("semi-rvrs"):
        return "others"
    return f"Semi-RVRS by Algorithm {3 if 'budget' in method else 2}"


def _plot_gains(results: Sequence[Result]) -> "Figure | None":
    from matplotlib.figure import Figure

    gains = {
        dataset: {
            method: gain
            for method in TABLE
            if method != BASE and (gain := lead(results, dataset, method, BASE)) is not None
        }
        for dataset in _seeds.datasets(results)
    }
    gains = {dataset: found for dataset, found in gains.items() if found}
    if not gains:
        return None
    figure = Figure(figsize=(max(6.0, 4.4 * len(gains)), 5.2), layout="constrained")
    for panel, (dataset, found) in zip(
        figure.subplots(1, len(gains), squeeze=False)[0], gains.items(), strict=True
    ):
        _points(panel, found)
        paper = PAPER_GAINS.get(dataset, {})
        shared = [(place, paper[name]) for place, name in enumerate(found) if name in paper]
        if shared:
            style: dict[str, Any] = {"marker": "D", "facecolors": "none", "edgecolors": "black"}
            panel.scatter(*zip(*shared, strict=True), label="the paper's", **style)
        panel.legend(fontsize="small")
        panel.set(title=dataset, ylabel="ELBO above mean-field (nats)")
    figure.suptitle("Table 2 of the paper: hierarchical regression\n(bars: two standard errors)")
    return figure


def _plot_budgets(results: Sequence[Result]) -> "Figure | None":
    from matplotlib.figure import Figure

    names = [
        dataset
        for dataset in _seeds.datasets(results)
        if any(_budgets(results, dataset, z) for z in BUDGETS)
    ]
    if not names:
        return None
    targets = [z for z in BUDGETS if any(_budgets(results, dataset, z) for dataset in names)]
    size = (max(6.0, 4.6 * len(names)), 3.4 * len(targets) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(targets), len(names), squeeze=False)
    for row, z in zip(panels, targets, strict=True):
        for panel, dataset in zip(row, names, strict=True):
            _draw_budgets(panel, results, dataset, z)
            panel.set_title(f"{dataset}, Z = {z:g}")
    figure.suptitle(
        "Companion of Table 2 of the paper (biasedsemi)\n(bars and band: two standard errors)"
    )
    return figure


def _budgets(
    results: Sequence[Result], dataset: str, target_acceptance: float
) -> dict[int, tuple[Estimate, Kept]]:
    """Gains of Algorithm 3 over mean-field, and what it keeps, by S'."""
    found = {}
    for number in BUDGETS[target_acceptance]:
        method = budget_method(target_acceptance, number)
        gain, points = lead(results, dataset, method, BASE), kept(results, dataset, method)
        if gain is not None and points is not None:
            found[number] = gain, points
    return found


def _draw_budgets(
    panel: "Axes", results: Sequence[Result], dataset: str, target_acceptance: float
) -> None:
    found = _budgets(results, dataset, target_acceptance)
    gains = [gain for gain, _ in found.values()]
    panel.errorbar(
        list(found),
        [gain.mean for gain in gains],
        yerr=[2 * (gain.error or 0.0) for gain in gains],
        fmt="^-",
        color=_RVRS,
        capsize=3,
        label="Algorithm 3",
    )
    exact = lead(results, dataset, f"semi-rvrs-{target_acceptance}", BASE)
    if exact is not None:
        # The error of mean-field is in the bars and in the band: it moves both together.
        width = 2 * (exact.error or 0.0)
        panel.axhline(exact.mean, color=_OTHERS, label="Algorithm 2")
        panel.axhspan(exact.mean - width, exact.mean + width, color=_OTHERS, alpha=0.15)
    panel.set(xlabel="proposals per data point, S'", ylabel="ELBO above mean-field (nats)")
    panel.set_xticks(BUDGETS[target_acceptance])
    panel.grid(axis="y", alpha=0.3)
    sizes = panel.twinx()
    numbers = [points.number for _, points in found.values()]
    sizes.plot(list(found), numbers, "x:", color="gray", label="batch size")
    sizes.set_ylabel("mean effective batch size (points)")
    sizes.set_ylim(bottom=0.0)
    lines = [axes.get_legend_handles_labels() for axes in (panel, sizes)]
    handles, labels = ([*one, *other] for one, other in zip(*lines, strict=True))
    panel.legend(handles, labels, loc="lower right", fontsize="small")


def _plot_times(results: Sequence[Result]) -> "Figure | None":
    from matplotlib.figure import Figure

    # The optimum is not a method.
    names = [method for method in METHODS if not method.startswith("optimum")]
    for dataset in ("bike", *_seeds.datasets(results)):
        found = {name: milliseconds(results, dataset, name) for name in names}
        times = {name: time for name, time in found.items() if time is not None}
        if times:
            break
    else:
        return None
    figure = Figure(figsize=(max(6.0, 0.45 * len(times) + 1.5), 5.2), layout="constrained")
    panel = figure.subplots()
    _points(panel, times)
    panel.set(ylabel="time of a training step (milliseconds)", title=dataset)
    panel.set_ylim(bottom=0.0)
    panel.legend(fontsize="small")
    figure.suptitle(
        "Companion of Table 2 of the paper (biasedsemitimes)\n"
        "(bars: two standard errors; mean-field has several draws per step)"
    )
    return figure
