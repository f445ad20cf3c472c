r"""Figure 2 of the paper: the variance of VRS gradients over that of RVRS gradients.

Both estimate the gradient of the same ELBO at the same proposal and the same, fixed T, with S = 2
accepted draws that are centred by each other. The proposal is a mean-field normal that was trained
without rejection for 1000 steps, T is minus its ELBO, and the posterior is that of a logistic
regression whose number of columns D varies.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from rvrs.experiments import _gradients, _seeds, logistic_model
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

_PARTS: tuple[_gradients.Part, ...] = get_args(_gradients.Part)


def run(
    unit: Unit, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], report: Report
) -> Outcome:
    """Both variances at one D; the seed is that of the columns and of all randomness."""
    dimension = _dimension(unit.method)
    data = logistic_model.load(
        unit.dataset, num_rows=settings["num_rows"], dimension=dimension, seed=unit.seed
    )
    train_key, elbo_key, gradient_key = jax.random.split(jax.random.key(unit.seed), 3)
    report(0.0, "mean-field")
    num_samples, epsilon = settings["num_samples"], settings["epsilon"]
    proposal = _gradients.mean_field(
        train_key, data, num_steps=settings["num_steps"], num_samples=num_samples
    )
    evidence = logistic_model.evaluate(
        elbo_key,
        data,
        proposal,
        math.inf,
        num_proposals=settings["num_evaluation_proposals"],
        epsilon=0.0,
    )
    elbo = float(evidence.elbo)
    if not math.isfinite(elbo):
        raise DivergedError(f"the mean-field ELBO is {elbo}")
    gradients = _gradients.sample(
        gradient_key,
        data,
        proposal,
        -elbo,
        num_gradients=settings["num_gradients"],
        num_samples=num_samples,
        epsilon=epsilon,
        report=lambda share, words: report(0.1 + 0.9 * share, words),
    )
    figures = {
        "elbo": elbo,
        "threshold": -elbo,
        "acceptance": gradients.acceptance,
        "scale": float(jnp.exp(jnp.mean(proposal.log_scale))),
    }
    for part in _PARTS:
        found = _gradients.variances(gradients, part)
        figures |= {
            f"{part}_variance_vrs": found.vrs,
            f"{part}_variance_rvrs": found.rvrs,
            f"{part}_ratio": found.ratio,
            f"{part}_ratio_error": found.ratio_error,
        }
    rounded = {name: _seeds.significant(value, 7) for name, value in figures.items()}
    return Outcome({"dimension": dimension} | rounded)


def _dimension(method: str) -> int:
    return int(method.removeprefix("D-"))


def _curve(results: Sequence[Result], dataset: str) -> dict[int, list[Result]]:
    """The results of every D, in its order."""
    methods = {result.unit.method for result in results}
    found = {_dimension(name): _seeds.succeeded(results, dataset, name) for name in methods}
    return {dimension: found[dimension] for dimension in sorted(found) if found[dimension]}


def _ratio(group: Sequence[Result], part: _gradients.Part) -> _seeds.Estimate:
    return _seeds.estimate(group, f"{part}_ratio", f"{part}_ratio_error")


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the ratio over D, one figure for each data set."""
    from matplotlib.figure import Figure

    paths = []
    for dataset in _seeds.datasets(results):
        curve = _curve(results, dataset)
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        panel = figure.subplots()
        for part, color, marker in zip(_PARTS, ("#1f4fbf", "#f5842f"), ("o", "s"), strict=True):
            estimates = [_ratio(found, part) for found in curve.values()]
            panel.errorbar(
                list(curve),
                [each.mean for each in estimates],
                [each.error or 0.0 for each in estimates],
                color=color,
                marker=marker,
                capsize=3,
                label=f"{part}s of the proposal",
            )
        panel.axhline(1.0, color="black", linestyle="dashed", linewidth=1, label="equal")
        panel.set(xlabel="latent dimension $D$", ylabel="variance of VRS / variance of RVRS")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        title = f"Figure 2 of the paper: variance of gradients, {dataset}"
        panel.set_title(f"{title}\n({_seeds.bars(curve.values())})", fontsize=11)
        panel.legend()
        paths.append(folder / f"gradient-variance-{dataset}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def tables(results: Sequence[Result]) -> str:
    """The ratios, the variances that they are made of, and the acceptance."""
    lines = []
    for dataset in _seeds.datasets(results):
        lines += [
            f"Data set {dataset}. Variances are summed over coordinates; means over seeds with "
            "their standard errors (of a single seed: Monte Carlo errors).",
            "",
            "| D | seeds | ratio, means | ratio, scales | error of one ratio | "
            "RVRS, means | VRS, means | RVRS, scales | VRS, scales | Z | ELBO |",
            "| ---: |" + " --- |" * 10,
        ]
        for dimension, found in _curve(results, dataset).items():
            ratios = [_ratio(found, part).text(2) for part in _PARTS]
            single = max(_seeds.estimate(found, f"{part}_ratio_error").mean for part in _PARTS)
            spreads = [
                f"{_seeds.estimate(found, f'{part}_variance_{name}').mean:.4g}"
                for part in _PARTS
                for name in ("rvrs", "vrs")
            ]
            rest = [_seeds.estimate(found, name).text(3) for name in ("acceptance", "elbo")]
            cells = [str(dimension), str(len(found)), *ratios, f"{single:.2f}", *spreads, *rest]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines) + _seeds.failures(results)


def claims(results: Sequence[Result]) -> list[Claim]:
    """That VRS is always noisier, ever more so, and by how much in the end."""
    found = []
    for dataset in _seeds.datasets(results):
        curve = _curve(results, dataset)
        ratios = {part: [_ratio(group, part) for group in curve.values()] for part in _PARTS}
        dimensions = list(curve)
        lowest = {part: min(each.mean for each in ratios[part]) for part in _PARTS}
        found.append(
            Claim(
                "The variance of VRS gradients is always larger than that of RVRS",
                f"{dataset}: smallest ratio over D = {dimensions}: "
                + ", ".join(f"{lowest[part]:.2f} ({part}s)" for part in _PARTS),
                all(value > 1 for value in lowest.values()),
            )
        )
        falls = [
            f"{part}s, D = {dimensions[i]} to {dimensions[i + 1]}"
            for part in _PARTS
            for i in range(len(dimensions) - 1)
            if _falls(ratios[part][i], ratios[part][i + 1])
        ]
        ends = ", ".join(
            f"{ratios[part][0].mean:.1f} to {ratios[part][-1].mean:.1f} ({part}s)"
            for part in _PARTS
        )
        rises = all(ratios[part][-1].mean > ratios[part][0].mean for part in _PARTS)
        found.append(
            Claim(
                "The ratio increases as the dimension increases",
                f"{dataset}: from {ends}; "
                + (
                    f"falls by more than two standard errors: {'; '.join(falls)}"
                    if falls
                    else "no fall by more than two standard errors"
                ),
                rises and not falls if len(dimensions) > 1 else None,
            )
        )
        if _PAPER_DIMENSION in curve:
            index = dimensions.index(_PAPER_DIMENSION)
            found.append(
                Claim(
                    f"The ratio is about 15 at D = {_PAPER_DIMENSION} (here: within a factor of 2)",
                    f"{dataset}: "
                    + ", ".join(f"{ratios[part][index].text(1)} ({part}s)" for part in _PARTS),
                    # The paper's rows and columns are not known.
                    all(15 / 2 < ratios[part][index].mean < 15 * 2 for part in _PARTS),
                )
            )
    return found


_PAPER_DIMENSION = 62


def _falls(first: _seeds.Estimate, second: _seeds.Estimate) -> bool:
    error = math.hypot(first.error or 0.0, second.error or 0.0)
    return second.mean < first.mean - 2 * error


_METHODS = tuple(f"D-{dimension}" for dimension in (2, 5, 10, 20, 30, 40, 51, 62))
_PAPER = {
    "num_rows": 100,
    "num_steps": 1000,
    "num_samples": 2,
    "epsilon": 1e-4,
    "num_evaluation_proposals": 100_000,
    "num_gradients": 500_000,
}

EXPERIMENT = Experiment(
    name="gradient-variance",
    title="Figure 2: variance of VRS and RVRS gradients as the latent dimension grows",
    datasets=("miniboone", "breast_cancer"),
    methods=_METHODS,
    presets={
        "quick": Preset(
            ("breast_cancer",), ("D-2", "D-10", "D-40"), 1, _PAPER | {"num_gradients": 25_000}
        ),
        "cpu": Preset(("miniboone",), _METHODS, 5, _PAPER),
        "paper": Preset(("miniboone",), _METHODS, 5, _PAPER),
    },
    run=run,
    plot=plot,
    tables=tables,
    claims=claims,
)
