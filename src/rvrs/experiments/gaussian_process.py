r"""Figure 5 of the paper, and its companion of step times: Gaussian-process classification.

The labels of N = 256 rows are Bernoulli with logits :math:`f = L v`, where v is standard normal and
L the Cholesky factor of the kernel matrix

.. math::

    K_{ij} = \alpha^2 \exp\left(-\tfrac12 \sum_d (x_{id} - x_{jd})^2 / \ell_d^2\right).

The amplitude and the length scales are parameters of the model, learned with the posterior of v,
so that a method is judged by both. They start at 1 and at the root of the number of inputs: rows of
standardised covariates are then about :math:`\sqrt 2` length scales apart, whatever that number.

Everything is double precision, and every method has a full-rank normal as its proposal or base.

MVN is NumPyro's, with the ELBO's ordinary gradient. ``rvrs-1`` is the same distribution without any
rejection, trained as RVRS is: what RVRS gains over it is due to rejection, the rest to its
gradient, whose noise vanishes where a normal fits.

The unit ``gradient-bias`` is not in the paper: it measures what the paper leaves out of the
gradient of the kernel's parameters (:mod:`rvrs.core.objectives`).
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rvrs import baselines, fitting, training, warmstart
from rvrs.core.problem import PRNGKey
from rvrs.experiments import _seeds, process_model
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
from rvrs.experiments.process_model import ACCEPTANCE, Data

_BASELINE = "mvn"
_BIAS = "gradient-bias"
_LABELS = {
    "mvn": "MVN",
    "rvrs-1": "MVN, as\nRVRS trains",
    "rvrs-0.3": "RVRS-0.3",
    "rvrs-0.1": "RVRS-0.1",
    "rvrs-0.1-truncated": "RVRS-0.1,\ntruncated",
    "iwae-8": "IWAE-8",
    "iwae-128": "IWAE-128",
    "uha-3": "UHA-3",
    "uha-6": "UHA-6",
}
_STATES = {"start": "start", "trained": "after training"}
# Columns of the gradients.
_GROUPS = {"amplitude": slice(0, 1), "length_scales": slice(1, None)}


def gradient_bias(
    rng_key: PRNGKey, data: Data, *, num_steps: int, num_gradients: int, report: Report
) -> dict[str, float]:
    """How far the truncated gradient is off, where training starts and where it ends.

    The start has the kernel's initial parameters and the normal approximation at the mode of the
    posterior that they give.
    """
    fit_key, mode_key, *keys = jax.random.split(rng_key, 4)
    report(0.0, "training")
    with warnings.catch_warnings():
        # A short training may deserve a warning; what counts here is where it ends.
        warnings.simplefilter("ignore")
        fit = fitting.fit(
            fit_key,
            process_model.gaussian_process(data),
            proposal="mvn",
            target_acceptance=ACCEPTANCE,
            num_steps=num_steps,
            num_evaluation_draws=1000,
            progress=False,
        )
    guide, initial = fit.guide, process_model.initial_parameters(data.inputs.shape[1])

    def call(function: Callable, static: tuple, dynamic: tuple) -> Any:
        return guide.with_log_density(function, static, dynamic, initial, ((), {}))

    mode = warmstart.find_start(mode_key, call, guide.latent_dim, "triangular")
    start = training.first_trainable(guide, initial, mode.location, mode.scale)
    states = {"start": training.parameters(guide, *start), "trained": guide.split(fit.params)}
    figures = {}
    for key, (state, (proposal, parameters)) in zip(keys, states.items(), strict=True):
        report(0.7 if state == "start" else 0.85, f"gradients, {_STATES[state]}")
        found = process_model.model_gradients(key, data, proposal, parameters, num_gradients)
        for group, columns in _GROUPS.items():
            gradient = process_model.norm_of_mean(found.unbiased[:, columns])
            bias = process_model.norm_of_mean(found.covariance[:, columns])
            figures |= {
                f"{state}_{group}_gradient": gradient.value,
                f"{state}_{group}_gradient_error": gradient.error,
                f"{state}_{group}_bias": bias.value,
                f"{state}_{group}_bias_error": bias.error,
            }
    return figures


def run(
    unit: Unit, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], report: Report
) -> Outcome:
    """Train and judge one method, or measure the bias of the truncated gradient."""
    rng_key = jax.random.key(unit.seed)
    with jax.enable_x64(True):
        data = process_model.load(unit.dataset, settings["num_rows"])
        if unit.method == _BIAS:
            figures: dict[str, Any] = gradient_bias(
                rng_key,
                data,
                num_steps=settings["num_bias_steps"],
                num_gradients=settings["num_gradients"],
                report=report,
            )
            return Outcome({name: _seeds.significant(value) for name, value in figures.items()})
        # Of any type, as bounds may be None elsewhere; every method here has one.
        fitted: Any = baselines.fit(
            rng_key,
            f"{unit.method}@{settings['schedule']}",
            baselines.Task(unit.dataset, process_model.gaussian_process(data)),
            num_steps=settings["num_steps"],
            proposal="mvn",
            num_evaluation_draws=settings["num_evaluation_draws"],
            report=report,
        )
        length_scales = np.asarray(fitted.params["length_scales"], float)
        figures = {
            "elbo": float(fitted.elbo),
            "elbo_error": float(fitted.elbo_error),
            "seconds_per_step": float(fitted.seconds_per_step),
            "amplitude": float(fitted.params["amplitude"]),
            "shortest_length_scale": float(length_scales.min()),
            "longest_length_scale": float(length_scales.max()),
        }
    broken = [name for name, value in figures.items() if not math.isfinite(value)]
    if broken:
        raise DivergedError(f"{unit.method}: {', '.join(broken)} not finite")
    return Outcome(figures)


def _gain(
    results: Sequence[Result], dataset: str, method: str, other: str
) -> _seeds.Estimate | None:
    """The mean ELBO of a method above that of another; None if either is missing.

    Its error is over seeds, or that of the estimated ELBOs where a seed is alone.
    """
    pair = [_seeds.succeeded(results, dataset, name) for name in (method, other)]
    if not all(pair):
        return None
    elbos = [_seeds.estimate(found, "elbo") for found in pair]
    errors = [
        _seeds.estimate(found, "elbo_error").mean if elbo.error is None else elbo.error
        for elbo, found in zip(elbos, pair, strict=True)
    ]
    seeds = min(elbo.num_seeds for elbo in elbos)
    return _seeds.Estimate(elbos[0].mean - elbos[1].mean, math.hypot(*errors), seeds)


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the gains above MVN, and the step times; a panel for each data set."""
    from matplotlib.figure import Figure

    trained = [result for result in results if result.unit.method != _BIAS]
    names = _seeds.datasets(trained)
    if not names:
        return []
    gains = Figure(figsize=(4.4 * len(names) + 0.6, 4.6), layout="constrained")
    times = Figure(figsize=(4.4 * len(names) + 0.6, 4.6), layout="constrained")
    panels = zip(
        names,
        gains.subplots(1, len(names), squeeze=False)[0],
        times.subplots(1, len(names), squeeze=False, sharey=True)[0],
        strict=True,
    )
    for name, gain_panel, time_panel in panels:
        by_method = {method: _seeds.succeeded(trained, name, method) for method in _LABELS}
        by_method = {method: found for method, found in by_method.items() if found}
        baseline = by_method.get(_BASELINE)
        for place, (method, found) in enumerate(by_method.items()):
            color = "#1f4fbf" if method.startswith("rvrs-0") else "#f5842f"
            style: dict[str, Any] = {"color": color, "fmt": "o", "capsize": 4}
            if baseline:
                elbos = np.array([result.figures["elbo"] for result in found])
                several = len(found) > 1
                spread = elbos.std(ddof=1) if several else found[0].figures["elbo_error"]
                above = elbos.mean() - _seeds.estimate(baseline, "elbo").mean
                gain_panel.errorbar(place, above, 2 * spread, **style)
            milliseconds = [1e3 * result.figures["seconds_per_step"] for result in found]
            time_panel.errorbar(place, np.mean(milliseconds), 2 * np.std(milliseconds), **style)
        for panel in (gain_panel, time_panel):
            panel.set_xticks(range(len(by_method)), [_LABELS[method] for method in by_method])
            panel.tick_params(axis="x", rotation=60)
            panel.set(title=name, xlabel="method")
            panel.grid(axis="y", alpha=0.3)
        gain_panel.axhline(0.0, color="black", linewidth=0.8, linestyle="dashed")
        gain_panel.set_ylabel("ELBO above the mean of MVN (nats)")
        time_panel.set_ylabel("time per step (milliseconds)")
        time_panel.label_outer()
    # Not before all panels, which share it, have their points.
    times.axes[0].set_ylim(bottom=0.0)
    seeds = max(len(_seeds.succeeded(trained, name, m)) for name in names for m in _LABELS)
    bars = "two standard deviations over seeds" if seeds > 1 else "two Monte Carlo errors, one seed"
    gains.suptitle(f"Figure 5 of the paper: Gaussian-process classification\n(bars: {bars})")
    times.suptitle("Companion of Figure 5 of the paper: step times")
    paths = [folder / "gaussian-process-elbo.png", folder / "gaussian-process-times.png"]
    for figure, path in zip((gains, times), paths, strict=True):
        figure.savefig(path, dpi=150)
    return paths


def tables(results: Sequence[Result]) -> str:
    """ELBOs and step times by method; the bias of the truncated gradient."""
    lines = []
    for name in _seeds.datasets(results):
        lines += [
            f"Data set {name}. Means over seeds with their standard errors.",
            "",
            "| method | seeds | ELBO | above MVN | ms per step | amplitude | length scales |",
            "| --- |" + " ---: |" * 6,
        ]
        for method, label in _LABELS.items():
            found = _seeds.succeeded(results, name, method)
            if not found:
                continue
            gain = _gain(results, name, method, _BASELINE)
            ends = [f"{end}_length_scale" for end in ("shortest", "longest")]
            cells = [
                label.replace("\n", " "),
                str(len(found)),
                _seeds.estimate(found, "elbo").text(),
                "" if gain is None or method == _BASELINE else gain.text(),
                f"{1e3 * _seeds.estimate(found, 'seconds_per_step').mean:.2f}",
                _seeds.estimate(found, "amplitude").text(2),
                " to ".join(f"{_seeds.estimate(found, end).mean:.2f}" for end in ends),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for result in _seeds.succeeded(results, name, _BIAS):
            lines += [
                f"Norms of gradients by the logarithms of the kernel's parameters, data set {name},"
                f" seed {result.unit.seed}; the bias is that of the truncated gradient.",
                "",
                "| where | parameters | unbiased gradient | bias | bias / gradient |",
                "| --- | --- | ---: | ---: | ---: |",
                *_bias_rows(result.figures),
                "",
            ]
    return "\n".join(lines) + _seeds.failures(results)


def _bias_rows(figures: Mapping[str, float]) -> list[str]:
    rows = []
    for state, where in _STATES.items():
        for group in _GROUPS:
            start = f"{state}_{group}"
            gradient, bias = (
                f"{figures[f'{start}_{part}']:.3g} ± {figures[f'{start}_{part}_error']:.2g}"
                for part in ("gradient", "bias")
            )
            relative = figures[f"{start}_bias"] / figures[f"{start}_gradient"]
            words = group.replace("_", " ")
            rows.append(f"| {where} | {words} | {gradient} | {bias} | {100 * relative:.2g} % |")
    return rows


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper says of the figure, and what leaving out a covariance does."""
    found = []
    for name in _seeds.datasets(results):
        others = [method for method in _LABELS if not method.startswith("rvrs-0")]
        gains = {other: _gain(results, name, "rvrs-0.1", other) for other in others}
        known = {other: gain for other, gain in gains.items() if gain is not None}
        if known:
            found.append(
                Claim(
                    "RVRS matches or exceeds the ELBO of the other methods, even of IWAE-128",
                    f"{name}: RVRS-0.1 above "
                    + ", ".join(
                        f"{_LABELS[other]}: {gain.text()}" for other, gain in known.items()
                    ),
                    all(gain.mean > -2 * (gain.error or 0.0) for gain in known.values()),
                )
            )
        longer, gained = (_gain(results, name, "uha-6", "uha-3"), gains["uha-3"])
        whole = _gain(results, name, "rvrs-0.1", _BASELINE)
        if longer and gained and whole:
            # "About": within the errors, or a fifth of what the best method gains.
            about = max(2 * (longer.error or 0.0), 0.2 * abs(whole.mean))
            found.append(
                Claim(
                    "UHA-6 does about the same as UHA-3",
                    f"{name}: UHA-6 above UHA-3: {longer.text()}",
                    abs(longer.mean) < about,
                )
            )
        found += _truncation_claims(results, name)
    return found


def _truncation_claims(results: Sequence[Result], name: str) -> list[Claim]:
    statement = "The truncated gradient of the kernel's parameters is good enough (by its use)"
    lost = _gain(results, name, "rvrs-0.1-truncated", "rvrs-0.1")
    biases = [result.figures for result in _seeds.succeeded(results, name, _BIAS)]
    measured = []
    if lost is not None:
        measured.append(f"ELBO of truncated above unbiased: {lost.text()}")
    if biases:
        shares = [
            np.mean([each[f"start_{g}_bias"] / each[f"start_{g}_gradient"] for each in biases])
            for g in _GROUPS
        ]
        measured.append(
            "bias at the start: "
            + ", ".join(
                f"{100 * share:.2g} % ({group.replace('_', ' ')})"
                for group, share in zip(_GROUPS, shares, strict=True)
            )
        )
    if not measured:
        return []
    holds = None if lost is None else lost.mean > -2 * (lost.error or 0.0)
    return [Claim(statement, f"{name}: {'; '.join(measured)}", holds)]


_METHODS = (*_LABELS, _BIAS)
_PAPER = ("susy", "higgs", "miniboone")

EXPERIMENT = Experiment(
    name="gaussian-process",
    title="Figure 5: Gaussian-process classification, ELBO above MVN and step times",
    datasets=(*_PAPER, "breast_cancer"),
    methods=_METHODS,
    presets={
        "quick": Preset(
            datasets=("breast_cancer",),
            methods=("mvn", "rvrs-0.1", "iwae-8", "uha-3", _BIAS),
            num_seeds=1,
            settings={
                "num_rows": 32,
                "num_steps": 1000,
                "num_bias_steps": 500,
                "schedule": "own",
                "num_evaluation_draws": 5000,
                "num_gradients": 100,
            },
        ),
        "cpu": Preset(
            datasets=_PAPER,
            methods=_METHODS,
            num_seeds=2,
            settings={
                "num_rows": 256,
                "num_steps": 5000,
                "num_bias_steps": 5000,
                "schedule": "own",
                "num_evaluation_draws": 20_000,
                "num_gradients": 500,
            },
        ),
        "paper": Preset(
            datasets=_PAPER,
            methods=_METHODS,
            num_seeds=5,
            settings={
                "num_rows": 256,
                "num_steps": 600_000,
                "num_bias_steps": 20_000,
                "schedule": "paper",
                "num_evaluation_draws": 20_000,
                "num_gradients": 10_000,
            },
        ),
    },
    run=run,
    plot=plot,
    tables=tables,
    claims=claims,
    # 2: rvrs.fit learns the kernel's parameters at a rate of their own, and other methods take
    # smaller steps.
    revision=2,
)
