"""Figure 3 of the paper and its companion: what the target acceptance does.

A logistic regression with few rows is fitted by a mean-field normal proposal at target acceptances
from 0.004 to 0.4, and without rejection. The smaller the target, the higher the ELBO and the wider
the proposal. The companion figure shows T, and how well it was adapted: the acceptance at the T
that training ended with, not at one that was solved for afterwards.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rvrs import fitting
from rvrs.experiments import _seeds, logistic_model
from rvrs.experiments._seeds import Estimate
from rvrs.experiments.experiment import (
    Claim,
    DivergedError,
    Experiment,
    Outcome,
    Preset,
    Report,
    Result,
    Unit,
)
from rvrs.proposals import DiagonalNormal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEAN_FIELD = "mean-field"
"""The method without rejection."""

# T at the end is the mean over this share of the last steps, as it goes up and down a little with
# the acceptance of single steps; the acceptance while training is the mean over the other.
_THRESHOLD_SHARE, _ACCEPTANCE_SHARE = 0.01, 0.1
# Draws of the fit's own evaluation, which is not used: the ELBO is estimated from more proposals.
_FEW_DRAWS = 1_000
# What the achieved acceptance may be off, relative to its target.
_TOLERANCE = 0.05
_COLORS = ("#1f4fbf", "#f5842f")


def target_acceptance(method: str) -> float:
    """Z_target of a method, 1 for mean-field."""
    return 1.0 if method == MEAN_FIELD else float(method.removeprefix("rvrs-"))


def run(
    unit: Unit, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], report: Report
) -> Outcome:
    """Fit at one target acceptance; the seed is that of training, the data are always the same."""
    data = logistic_model.load(unit.dataset, num_rows=settings["num_rows"])
    target = target_acceptance(unit.method)
    num_steps = settings["num_steps"]
    fit_key, evaluate_key = jax.random.split(jax.random.key(unit.seed))
    report(0.0, "start and warm-up")
    with warnings.catch_warnings():
        # Fits warn of weights with heavy tails, which this experiment does not use.
        warnings.simplefilter("ignore", UserWarning)
        fit = fitting.fit(
            fit_key,
            logistic_model.logistic_model,
            *data,
            proposal="diagonal",
            target_acceptance=target,
            num_steps=num_steps,
            num_evaluation_draws=_FEW_DRAWS,
            progress=False,
            callback=lambda done, _: report(0.9 * done / num_steps, f"step {done} of {num_steps}"),
        )
    proposal = DiagonalNormal(fit.params["auto_loc"], fit.params["auto_log_scale"])
    last = slice(-max(1, round(_THRESHOLD_SHARE * num_steps)), None)
    threshold = float(np.mean(fit.thresholds[last], dtype=float))
    evidence = logistic_model.evaluate(
        evaluate_key,
        data,
        proposal,
        threshold,
        num_proposals=settings["num_evaluation_proposals"],
        epsilon=fit.guide.settings.epsilon,
    )
    acceptance = math.exp(evidence.log_normalizer)
    last = slice(-max(1, round(_ACCEPTANCE_SHARE * num_steps)), None)
    figures = {
        "target_acceptance": target,
        "elbo": float(evidence.elbo),
        "elbo_error": float(evidence.elbo_error),
        "acceptance": acceptance,
        "acceptance_error": acceptance * float(evidence.log_normalizer_error),
        # Weighted by proposals: a step goes on until it has its draws, so that steps with few
        # proposals are those that were lucky. By Wald's identity this mean is not biased.
        "acceptance_while_training": float(
            np.average(fit.acceptances[last], weights=fit.proposals_per_draw[last])
        ),
        "scale": float(jnp.exp(jnp.mean(proposal.log_scale))),
    }
    if target < 1:
        figures["threshold"] = threshold
    if not all(math.isfinite(value) for value in figures.values()):
        raise DivergedError(f"the fit came to an ELBO of {fit.elbo}")
    return Outcome({name: _seeds.significant(value, 7) for name, value in figures.items()})


class _Point(NamedTuple):
    """The fits of all seeds at one target."""

    target: float
    fits: list[Result]

    def estimate(self, name: str, error_name: str | None = None) -> Estimate:
        """The mean of a figure, as :func:`rvrs.experiments._seeds.estimate`."""
        return _seeds.estimate(self.fits, name, error_name)

    @property
    def elbo(self) -> Estimate:
        return self.estimate("elbo", "elbo_error")

    @property
    def deviation(self) -> float:
        """How far the worst fit's acceptance is off its target, relative to it."""
        values = [fit.figures["acceptance"] / self.target - 1 for fit in self.fits]
        return max(values, key=abs)


def _points(results: Sequence[Result], dataset: str) -> tuple[list[_Point], _Point | None]:
    """The points with rejection by rising target, and the one without."""
    methods = {result.unit.method for result in results}
    points = [
        _Point(target_acceptance(name), _seeds.succeeded(results, dataset, name))
        for name in methods
    ]
    points = sorted((point for point in points if point.fits), key=lambda point: point.target)
    if points and points[-1].target == 1:
        return points[:-1], points[-1]
    return points, None


def _gain(point: _Point, mean_field: _Point) -> Estimate:
    elbo, base = point.elbo, mean_field.elbo
    error = math.hypot(elbo.error or 0.0, base.error or 0.0)
    return Estimate(elbo.mean - base.mean, error, min(elbo.num_seeds, base.num_seeds))


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw Figure 3 and its companion for each data set."""
    from matplotlib.figure import Figure

    paths = []
    for dataset in _seeds.datasets(results):
        points, mean_field = _points(results, dataset)
        if not points:
            continue
        seeds = f"({_seeds.bars([point.fits for point in points])})"
        targets = [point.target for point in points]

        figure = Figure(figsize=(6.8, 4.6), layout="constrained")
        panel = figure.subplots()
        if mean_field:
            gains = [_gain(point, mean_field) for point in points]
            _draw(panel, targets, gains, _COLORS[0], "ELBO gain")
        panel.set(ylabel="ELBO gain over mean-field")
        panel.yaxis.label.set_color(_COLORS[0])
        other = panel.twinx()
        scales = [point.estimate("scale") for point in points]
        _draw(other, targets, scales, _COLORS[1], "scale of the proposal")
        if mean_field:
            base = mean_field.estimate("scale").mean
            other.axhline(
                base, color=_COLORS[1], linestyle="dashed", label=f"scale of mean-field, {base:.2f}"
            )
        other.set(ylabel="geometric mean of the proposal's scales")
        other.yaxis.label.set_color(_COLORS[1])
        _finish(panel, f"Figure 3 of the paper: {dataset}\n{seeds}")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        paths.append(folder / f"acceptance-{dataset}.png")
        figure.savefig(paths[-1], dpi=150)

        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        achieved = [point.estimate("acceptance", "acceptance_error") for point in points]
        relative = [
            Estimate(each.mean / target, (each.error or 0.0) / target, each.num_seeds)
            for each, target in zip(achieved, targets, strict=True)
        ]
        _draw(left, targets, relative, _COLORS[0], "achieved")
        left.axhline(1.0, color="black", linestyle="dashed", label="target")
        within = f"within {100 * _TOLERANCE:.0f} %"
        left.axhspan(1 - _TOLERANCE, 1 + _TOLERANCE, color="gray", alpha=0.2, label=within)
        left.set(ylabel=r"achieved $Z$ / $Z_\mathrm{target}$")
        thresholds = [point.estimate("threshold") for point in points]
        _draw(right, targets, thresholds, _COLORS[1], "threshold")
        right.set(ylabel="threshold $T$ at the end of training")
        for each in (left, right):
            _finish(each)
            each.legend()
        figure.suptitle(f"Companion of Figure 3 of the paper (fitZ): {dataset} {seeds}")
        paths.append(folder / f"acceptance-threshold-{dataset}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def _draw(
    panel: "Axes", targets: list[float], values: list[Estimate], color: str, label: str
) -> None:
    panel.errorbar(
        targets,
        [each.mean for each in values],
        [each.error or 0.0 for each in values],
        color=color,
        marker="o",
        capsize=3,
        label=label,
    )


def _finish(panel: "Axes", title: str = "") -> None:
    panel.set(xscale="log", xlabel=r"target acceptance $Z_\mathrm{target}$")
    panel.set_title(title, fontsize=11)
    panel.grid(alpha=0.3)


def tables(results: Sequence[Result]) -> str:
    """ELBO, scale, T and acceptance at every target."""
    lines = []
    for dataset in _seeds.datasets(results):
        points, mean_field = _points(results, dataset)
        lines += [
            f"Data set {dataset}; means over seeds with their standard errors (of a single seed: "
            "Monte Carlo errors).",
            "",
            "| Z target | seeds | ELBO | gain over mean-field | scale | T | Z at the last T | "
            "worst deviation | Z while training |",
            "| ---: |" + " --- |" * 8,
        ]
        for point in [*points, *([mean_field] if mean_field else [])]:
            below = point.target < 1
            cells = [
                f"{point.target:g}" if below else "mean-field",
                str(len(point.fits)),
                point.elbo.text(),
                _gain(point, mean_field).text() if below and mean_field else "",
                point.estimate("scale").text(4),
                point.estimate("threshold").text(2) if below else "",
                point.estimate("acceptance", "acceptance_error").text(5) if below else "1",
                f"{100 * point.deviation:+.1f} %" if below else "",
                point.estimate("acceptance_while_training").text(5) if below else "1",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines) + _seeds.failures(results)


def claims(results: Sequence[Result]) -> list[Claim]:
    """That ELBO and width grow as the target falls, and that the target is met."""
    found = []
    for dataset in _seeds.datasets(results):
        points, mean_field = _points(results, dataset)
        if not points:
            continue
        ends = [point.elbo.mean for point in (points[0], points[-1])]
        # From the smallest target to the largest, mean-field last.
        order = [*points, *([mean_field] if mean_field else [])]
        rises = _rises([point.elbo for point in order])
        found.append(
            Claim(
                "The ELBO increases monotonically as Z_target decreases",
                f"{dataset}: ELBO {ends[1]:.2f} at Z_target = {points[-1].target:g}, {ends[0]:.2f} "
                f"at {points[0].target:g}"
                + (f", {mean_field.elbo.mean:.2f} without rejection" if mean_field else "")
                + f"; out of order by more than two standard errors: {len(rises)}",
                not rises if len(order) > 1 else None,
            )
        )
        scales = [point.estimate("scale") for point in order]
        rises = _rises(scales)
        found.append(
            Claim(
                "The proposal becomes broader as Z_target decreases, compared to mean-field "
                "(paper: 0.70)",
                f"{dataset}: geometric mean of the scales {scales[0].mean:.3f} at Z_target = "
                f"{points[0].target:g}, {scales[len(points) - 1].mean:.3f} at "
                f"{points[-1].target:g}"
                + (f", {scales[-1].mean:.3f} without rejection" if mean_field else ""),
                not rises if mean_field else None,
            )
        )
        worst = max(points, key=lambda point: abs(point.deviation))
        found.append(
            Claim(
                f"T adaptation meets Z_target (here: every fit within {100 * _TOLERANCE:.0f} %)",
                f"{dataset}: largest deviation {100 * worst.deviation:+.1f} %, at Z_target = "
                f"{worst.target:g}",
                abs(worst.deviation) <= _TOLERANCE,
            )
        )
    return found


def _rises(values: Sequence[Estimate]) -> list[int]:
    """Where a value exceeds its predecessor by more than two standard errors."""
    return [
        index
        for index, (first, second) in enumerate(pairwise(values))
        if second.mean > first.mean + 2 * math.hypot(first.error or 0.0, second.error or 0.0)
    ]


_TARGETS = (0.004, 0.008, 0.015, 0.03, 0.06, 0.1, 0.2, 0.4)
_METHODS = (MEAN_FIELD, *(f"rvrs-{target:g}" for target in _TARGETS))

EXPERIMENT = Experiment(
    name="acceptance",
    title="Figure 3 and its companion: ELBO, width of the proposal and T over Z_target",
    datasets=("miniboone", "breast_cancer"),
    methods=_METHODS,
    presets={
        "quick": Preset(
            ("breast_cancer",),
            (MEAN_FIELD, "rvrs-0.03", "rvrs-0.2"),
            1,
            {"num_rows": 100, "num_steps": 3_000, "num_evaluation_proposals": 200_000},
        ),
        # Two seeds each, at 1, 0.4, 0.05 and 0.004: between 20,000 and 50,000 steps the ELBO
        # changed by less than 0.02, at 0.004 by 0.04, where its Monte Carlo error was 0.02.
        "cpu": Preset(
            ("miniboone",),
            _METHODS,
            5,
            {"num_rows": 100, "num_steps": 50_000, "num_evaluation_proposals": 4_000_000},
        ),
        "paper": Preset(
            ("miniboone",),
            _METHODS,
            5,
            {"num_rows": 100, "num_steps": 2_400_000, "num_evaluation_proposals": 20_000_000},
        ),
    },
    run=run,
    plot=plot,
    tables=tables,
    claims=claims,
)
