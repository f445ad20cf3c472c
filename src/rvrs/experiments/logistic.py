"""Figure 4 of the paper: nine methods on five logistic regressions, beside NUTS.

100 rows leave posteriors that are far from normal, of 17 to 58 dimensions. Methods are compared by
the gain of their bound over that of a mean-field normal, by the time of a training step, and by
the max-sliced Wasserstein distance of their draws from those of NUTS. All but NUTS and the flow
have, or refine, a mean-field normal (``mvn``: one with full covariance).

A method's name with ``@paper`` behind is the same method trained as the paper does: small rates of
Adam, divided by ten twice, which want hundreds of thousands of steps.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rvrs import baselines, diagnostics
from rvrs.baselines import Fitted, Task
from rvrs.experiments import _seeds, logistic_model
from rvrs.experiments._seeds import Estimate
from rvrs.experiments.experiment import Claim, Experiment, Outcome, Preset, Report, Result, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_ROWS = 100
BASE, REFERENCE = "mf", "nuts"
COMPARED = (
    *("mvn", "flow", "iwae-8", "iwae-24", "uha-8", "uha-24"),
    *("rvrs-0.3", "rvrs-0.1", "rvrs-0.05"),
)
"""The paper's nine methods."""
DATASETS = ("adult", "bank", "mushroom", "spambase", "thyroid")

# Kinds of methods whose draws are compared with those of NUTS.
_DRAWN = ("mf", "mvn", "uha", "rvrs")
# Standard errors of a difference that may be chance.
_CHANCE = 2.0


def task(dataset: str) -> Task:
    """The regression on the rows of a data set that all methods and seeds share."""
    data = logistic_model.load(dataset, num_rows=NUM_ROWS)
    return Task(dataset, lambda: logistic_model.logistic_model(*data))


def run(
    unit: Unit, settings: Mapping[str, Any], arrays: Mapping[str, np.ndarray], report: Report
) -> Outcome:
    """Train and judge one method; the arrays are draws of NUTS."""
    method = baselines.parse(unit.method)
    fit_key, draw_key = jax.random.split(jax.random.key(unit.seed))
    steps = settings["paper_steps" if method.schedule == "paper" else "steps"]
    if method.kind == "flow":
        # The paper has a third of the steps too, "due to its computational cost".
        steps //= 3
    if method.kind == "nuts":
        steps = settings["nuts_draws"]
    fitted = baselines.fit(
        fit_key,
        unit.method,
        task(unit.dataset),
        num_steps=steps,
        num_evaluation_draws=settings["evaluation_draws"],
        num_warmup=settings["nuts_warmup"],
        thinning=settings["nuts_thinning"],
        report=report,
    )
    figures: dict[str, Any] = {"seconds_per_step": fitted.seconds_per_step, **fitted.details}
    if method.kind == "nuts":
        return _reference_outcome(fitted, draw_key, settings, figures)
    figures |= {"elbo": fitted.elbo, "elbo_error": fitted.elbo_error}
    if method.kind in _DRAWN and arrays:
        report(1.0, "Wasserstein distance")
        figures |= _distance(_draws(fitted, draw_key, settings), arrays["draws"], settings)
    return Outcome(figures)


def _draws(fitted: Fitted, rng_key: jax.Array, settings: Mapping[str, Any]) -> np.ndarray:
    draws = fitted.sample(rng_key, settings["wasserstein_draws"])
    return np.asarray(draws[logistic_model.SITE])


def _reference_outcome(
    fitted: Fitted, rng_key: jax.Array, settings: Mapping[str, Any], figures: dict[str, Any]
) -> Outcome:
    """The draws of NUTS, and how far two sets of them are apart."""
    count = settings["wasserstein_draws"]
    both = np.asarray(fitted.sample(rng_key, 2 * count)[logistic_model.SITE])
    figures |= _distance(both[:count], both[count:], settings)
    return Outcome(figures, {"draws": both[:count]})


def _distance(
    draws: np.ndarray, reference: np.ndarray, settings: Mapping[str, Any]
) -> dict[str, float]:
    found = diagnostics.max_sliced_wasserstein(
        draws, reference, num_projections=settings["projections"]
    )
    return {"wasserstein": found.mean, "wasserstein_sd": found.sd}


def gain(results: Sequence[Result], dataset: str, method: str) -> Estimate | None:
    """ELBO above that of mean-field, over seeds; None without results of both."""
    own = _seeds.succeeded(results, dataset, method)
    base = _seeds.succeeded(results, dataset, BASE + ("@paper" if "@" in method else ""))
    base = base or _seeds.succeeded(results, dataset, BASE)
    if not own or not base:
        return None
    found = _seeds.estimate(own, "elbo", "elbo_error")
    ground = _seeds.estimate(base, "elbo", "elbo_error")
    error = math.hypot(found.error or 0.0, ground.error or 0.0)
    return Estimate(found.mean - ground.mean, error, found.num_seeds)


def tables(results: Sequence[Result]) -> str:
    """Gains, step times and distances."""
    names = _seeds.datasets(results)
    methods = [m for m in METHODS if any(_seeds.succeeded(results, d, m) for d in names)]
    methods = [method for method in methods if not method.startswith(BASE)]

    def gains(dataset: str, method: str) -> str:
        found = gain(results, dataset, method)
        return "" if found is None else found.text(3)

    def times(dataset: str, method: str) -> str:
        found = _seeds.succeeded(results, dataset, method)
        seconds = [result.figures["seconds_per_step"] for result in found]
        return f"{1e6 * float(np.median(seconds)):.0f}" if seconds else ""

    def distances(dataset: str, method: str) -> str:
        found = _distances(results, dataset, method)
        return "" if found is None else found.text(3)

    without = [method for method in methods if not method.startswith(REFERENCE)]
    parts = [
        ("Nats above mean-field, mean over seeds ± standard error.", without, gains),
        ("Microseconds per training step, median over seeds.", [BASE, *without], times),
        (
            "Max-sliced Wasserstein distance to NUTS, mean over seeds ± standard error; the row of "
            "NUTS is the distance of two sets of its own draws.",
            [m for m in (BASE, *methods) if baselines.parse(m).kind in (*_DRAWN, "nuts")],
            distances,
        ),
    ]
    texts = []
    for caption, rows, cell in parts:
        lines = [
            caption,
            "",
            f"| method | {' | '.join(names)} |",
            "| --- |" + " ---: |" * len(names),
        ]
        lines += [f"| {m} | {' | '.join(cell(d, m) for d in names)} |" for m in rows]
        texts.append("\n".join([*lines, ""]))
    return "\n".join(texts) + _seeds.failures(results)


def _distances(results: Sequence[Result], dataset: str, method: str) -> Estimate | None:
    found = _seeds.succeeded(results, dataset, method)
    found = [result for result in found if "wasserstein" in result.figures]
    return _seeds.estimate(found, "wasserstein", "wasserstein_sd") if found else None


def claims(results: Sequence[Result]) -> list[Claim]:
    """What the paper says of Figure 4."""
    subject = "rvrs-0.1"
    return [
        _claim(
            results,
            "RVRS-0.1 matches or exceeds IWAE-24 on 5 of 5",
            lambda dataset: _lead(results, dataset, subject, "iwae-24"),
        ),
        _claim(
            results,
            "RVRS-0.1 outperforms the flow on 4 of 5",
            lambda dataset: _lead(results, dataset, subject, "flow"),
            allowed=1,
        ),
        _claim(
            results,
            "RVRS-0.1 exceeds UHA-24 on 5 of 5",
            lambda dataset: _lead(results, dataset, subject, "uha-24"),
        ),
        _claim(
            results,
            "max-sliced Wasserstein distance of RVRS-0.1 about that of UHA-24 (here: no worse)",
            lambda dataset: _closer(results, dataset, subject, "uha-24"),
        ),
        _claim(
            results,
            "max-sliced Wasserstein distance of RVRS-0.3 about that of UHA-8 (here: no worse)",
            lambda dataset: _closer(results, dataset, "rvrs-0.3", "uha-8"),
        ),
    ]


def _lead(results: Sequence[Result], dataset: str, one: str, other: str) -> Estimate | None:
    """Nats that one method is ahead of another."""
    first, second = gain(results, dataset, one), gain(results, dataset, other)
    return None if first is None or second is None else _difference(first, second)


def _closer(results: Sequence[Result], dataset: str, one: str, other: str) -> Estimate | None:
    """How much closer the draws of one method are to those of NUTS."""
    first, second = _distances(results, dataset, one), _distances(results, dataset, other)
    return None if first is None or second is None else _difference(second, first)


def _difference(first: Estimate, second: Estimate) -> Estimate:
    error = math.hypot(first.error or 0.0, second.error or 0.0)
    return Estimate(first.mean - second.mean, error, min(first.num_seeds, second.num_seeds))


def _claim(results: Sequence[Result], statement: str, lead: Any, *, allowed: int = 0) -> Claim:
    """Whether a lead is there on all but ``allowed`` data sets, up to chance."""
    leads = {dataset: lead(dataset) for dataset in _seeds.datasets(results)}
    known = {dataset: found for dataset, found in leads.items() if found is not None}
    if not known:
        return Claim(statement, "not measured", None)
    behind = [d for d, found in known.items() if found.mean < -_CHANCE * (found.error or 0.0)]
    numbers = ", ".join(f"{d} {found.mean:+.3f} ± {found.error:.3f}" for d, found in known.items())
    held = f"{len(known) - len(behind)} of {len(known)}"
    return Claim(statement, f"{held}: {numbers}", len(behind) <= allowed)


_COLORS = {"mvn": "#555555", "flow": "#8a4fbf", "iwae": "#2f8f5b", "uha": "#d6453d"}
_COLORS |= {"rvrs": "#1f4fbf", "mf": "#999999"}


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Gains, step times and distances, each in a figure."""
    from matplotlib.figure import Figure

    names = _seeds.datasets(results)
    panels = {
        "gains": ("ELBO above mean-field (nats)", COMPARED, gain),
        "times": ("time of a training step (µs)", (BASE, *COMPARED), _time),
        "wasserstein": (
            "max-sliced Wasserstein distance to NUTS",
            [m for m in (BASE, *COMPARED) if baselines.parse(m).kind in _DRAWN],
            _distances,
        ),
    }
    paths = []
    for name, (label, methods, value) in panels.items():
        found = {d: {m: value(results, d, m) for m in methods} for d in names}
        if not any(v is not None for row in found.values() for v in row.values()):
            continue
        figure = Figure(figsize=(2.6 * max(2, len(names)), 4.2), layout="constrained")
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        for panel, dataset in zip(axes, names, strict=True):
            _points(panel, found[dataset])
            panel.set_title(dataset)
            if name == "times":
                panel.set_yscale("log")
            if name == "wasserstein":
                floor = _distances(results, dataset, REFERENCE)
                if floor is not None:
                    panel.axhline(floor.mean, color="black", linewidth=0.8, linestyle="dotted")
        axes[0].set_ylabel(label)
        note = "; dotted: two sets of draws of NUTS" if name == "wasserstein" else ""
        bars = "median over seeds" if name == "times" else "bars: two standard errors over seeds"
        title = f"Figure 4 of the paper: logistic regression, N = {NUM_ROWS}"
        figure.suptitle(f"{title}\n({bars}{note})")
        paths.append(folder / f"logistic-{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def _time(results: Sequence[Result], dataset: str, method: str) -> Estimate | None:
    found = _seeds.succeeded(results, dataset, method)
    if not found:
        return None
    seconds = [result.figures["seconds_per_step"] for result in found]
    return Estimate(1e6 * float(np.median(seconds)), None, len(found))


def _points(panel: "Axes", values: Mapping[str, Estimate | None]) -> None:
    """A point for every method: circles for parametric ones, squares for the others."""
    for place, (method, found) in enumerate(values.items()):
        if found is None:
            continue
        kind = baselines.parse(method).kind
        panel.errorbar(
            place,
            found.mean,
            yerr=2 * (found.error or 0.0),
            fmt="o" if kind in ("mf", "mvn", "flow") else "s",
            color=_COLORS[kind],
            capsize=3,
        )
    panel.set_xticks(range(len(values)), list(values), rotation=90)
    panel.grid(axis="y", alpha=0.3)


METHODS = tuple(f"{method}{way}" for way in ("", "@paper") for method in (BASE, *COMPARED))
METHODS = (*METHODS, REFERENCE)

_SETTINGS = {"projections": 1000, "nuts_thinning": 2, "nuts_warmup": 1000}

EXPERIMENT = Experiment(
    name="logistic",
    title="Figure 4: nine methods on five logistic regressions",
    datasets=(*DATASETS, "breast_cancer"),
    methods=METHODS,
    presets={
        "quick": Preset(
            ("breast_cancer",),
            (BASE, "mvn", "iwae-8", "uha-8", "rvrs-0.1", REFERENCE),
            1,
            _SETTINGS
            | {"steps": 2_000, "paper_steps": 2_000, "evaluation_draws": 10_000}
            | {"nuts_draws": 4_000, "nuts_warmup": 300, "wasserstein_draws": 1_000},
        ),
        "cpu": Preset(
            DATASETS,
            (
                REFERENCE,
                BASE,
                *COMPARED,
                "mf@paper",
                "iwae-24@paper",
                "uha-24@paper",
                "rvrs-0.1@paper",
            ),
            5,
            _SETTINGS
            # The paper's way gets a ninth of the paper's steps.
            | {"steps": 20_000, "paper_steps": 100_000, "evaluation_draws": 100_000}
            | {"nuts_draws": 20_000, "wasserstein_draws": 4_000},
        ),
        "paper": Preset(
            DATASETS,
            (REFERENCE, *METHODS[:-1]),
            5,
            _SETTINGS
            | {"steps": 900_000, "paper_steps": 900_000, "evaluation_draws": 100_000}
            | {"nuts_draws": 500_000, "nuts_thinning": 5, "nuts_warmup": 10_000}
            # Two sets of them make up all that NUTS has kept.
            | {"wasserstein_draws": 50_000},
        ),
    },
    run=run,
    plot=plot,
    tables=tables,
    claims=claims,
    reference=REFERENCE,
)
