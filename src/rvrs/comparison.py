"""``rvrs compare``: several methods on one model, to see which of them suits it."""

import json
import math
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import init_to_uniform

from rvrs import baselines, fit_command, model_file, terminal
from rvrs.baselines.task import Proposal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Draws of every method that its means and standard deviations are from: all that NUTS makes.
_NUM_DRAWS = 4_000
# From here on, and with any divergence, NUTS is a doubtful reference.
_RHAT_LIMIT = 1.05
_WIDTH = 80

_HEADINGS = ("bound", "std.\nerror", "µs per\nstep", "sec-\nonds")
_REFERENCE_HEADINGS = ("mean\nerror", "sd\nratio")

# What the bound of a method is, by its kind.
_BOUNDS = {
    "mf": "ELBO of a normal distribution",
    "mvn": "ELBO of a normal distribution",
    "flow": "ELBO of a normalizing flow",
    "iwae": "bound of K weighted draws of the proposal",
    "uha": "ELBO of K annealing steps from the proposal",
    "rvrs": "ELBO of the proposal after rejection",
    "vrs": "ELBO of the proposal after rejection",
    "nuts": "none; the reference",
}


class Options(NamedTuple):
    """What ``rvrs compare`` was asked for."""

    model_file: Path
    data: Path | None
    model: str
    methods: list[str]
    proposal: Proposal
    steps: int
    seed: int
    out: Path


class Moments(NamedTuple):
    """Of the posterior of one site, coordinate by coordinate."""

    mean: np.ndarray
    sd: np.ndarray


class Trained(NamedTuple):
    """What a method has come to."""

    bound: float | None
    bound_error: float | None
    seconds_per_step: float | None
    """Of training, compilation apart; None for NUTS, whose clock includes it. Not a number if a
    training was too short to tell."""
    sites: dict[str, Moments]
    """Of the latent sites."""
    details: dict[str, Any]


class Outcome(NamedTuple):
    """A method that was tried; either ``trained`` or ``failure`` is there."""

    method: str
    seconds: float
    """In all, with compilation, the estimate of the bound and draws."""
    trained: Trained | None
    failure: str | None


class Accuracy(NamedTuple):
    """How far posterior moments are from a reference's."""

    mean_error: float
    """Largest error of a mean, in the reference's standard deviations."""
    least_sd_ratio: float
    largest_sd_ratio: float


class Sites(NamedTuple):
    """Names of what a model has besides data."""

    latent: list[str]
    params: list[str]


def run(options: Options, show_traceback: bool) -> None:
    """Try all methods, print a table and write it; leave with code 1 if none of them works."""
    from rich.console import Console

    names = list(dict.fromkeys(options.methods))
    try:
        for name in names:
            baselines.parse(name)
    except ValueError as error:
        sys.exit(f"rvrs compare: {error}")
    terminal.check_writable("rvrs compare", options.out)
    model, arguments = fit_command.load(
        "rvrs compare", options.model_file, options.data, options.model, show_traceback
    )
    console = Console()
    terminal.say(console, fit_command.describe_call(options.model_file, options.model, arguments))
    task = baselines.Task(
        options.model_file.stem, lambda: model(*arguments.args, **arguments.kwargs)
    )
    try:
        with fit_command.collected_warnings() as messages:
            # A model that does not run at all is no matter of methods.
            sites = _sites(task, show_traceback, options.model_file)
            outcomes = _try_all(console, options, names, task, sites, show_traceback)
    except KeyboardInterrupt:
        sys.exit("rvrs compare: interrupted.")
    console.print(_table(outcomes))
    for note in _notes(outcomes):
        terminal.say(console, textwrap.fill(note, _WIDTH, subsequent_indent="  "))
    terminal.say(console, "")
    findings = [*_findings(outcomes), *(f"WARNING: {message}" for message in messages)]
    for line in findings:
        terminal.say(console, line)
    content = json.dumps(_as_json(options, outcomes), indent=2, allow_nan=False)
    _write(options.out / "comparison.json", f"{content}\n")
    _write(options.out / "comparison.md", _as_markdown(options, outcomes, findings))
    terminal.say(console, f"Results in {options.out}: comparison.json, comparison.md")
    if all(outcome.trained is None for outcome in outcomes):
        sys.exit("rvrs compare: no method has worked.")


def _sites(task: baselines.Task, show_traceback: bool, path: Path) -> Sites:
    """Run the model once; leaves with one line if it cannot."""
    seeded = handlers.seed(task.model, jax.random.key(0))
    try:
        # Values of sites come from their supports, as some priors cannot be drawn from.
        trace = handlers.trace(
            handlers.substitute(seeded, substitute_fn=init_to_uniform)
        ).get_trace()
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
            sys.exit("rvrs compare: failed, see above.")
        sys.exit(f"rvrs compare: {model_file.describe(error, path)}; --traceback shows where.")
    latent = [
        name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]
    ]
    if not latent:
        sys.exit(f"rvrs compare: the model in {path} has no latent sites.")
    return Sites(latent, [name for name, site in trace.items() if site["type"] == "param"])


def _try_all(
    console: "Console",
    options: Options,
    names: Sequence[str],
    task: baselines.Task,
    sites: Sites,
    show_traceback: bool,
) -> list[Outcome]:
    outcomes = []
    with terminal.progress(console) as progress:
        for name in names:
            bar = progress.add_task(name, total=100, status="compiling")

            def report(share: float, words: str, bar: Any = bar) -> None:
                progress.update(bar, completed=round(100 * share), status=words)

            begin = time.perf_counter()
            trained = failure = None
            try:
                trained = _try(options, name, task, sites, report)
            except Exception as error:
                if show_traceback:
                    traceback.print_exc()
                failure = _reason(error, options.model_file)
                progress.update(bar, status="failed")
            else:
                bound = "" if trained.bound is None else f"bound {trained.bound:.3f}"
                progress.update(bar, completed=100, status=bound)
            outcomes.append(Outcome(name, time.perf_counter() - begin, trained, failure))
    return outcomes


def _try(
    options: Options,
    name: str,
    task: baselines.Task,
    sites: Sites,
    report: Callable[[float, str], None],
) -> Trained:
    is_reference = _kind(name) == "nuts"
    if is_reference and sites.params:
        raise baselines.DivergedError(
            f"NUTS cannot learn the model's parameters {', '.join(sites.params)}; make them "
            "latent sites to compare with it"
        )
    # The same keys for all: what a method finds does not depend on what else is compared.
    fit_key, draw_key = jax.random.split(jax.random.key(options.seed))
    fitted = baselines.fit(
        fit_key,
        name,
        task,
        num_steps=_NUM_DRAWS if is_reference else options.steps,
        proposal=options.proposal,
        report=report,
    )
    report(1.0, "drawing")
    draws = fitted.sample(draw_key, _NUM_DRAWS)
    return Trained(
        fitted.elbo,
        fitted.elbo_error,
        None if is_reference else fitted.seconds_per_step,
        {site: _moments(draws[site]) for site in sites.latent},
        fitted.details,
    )


def _kind(method: str) -> str:
    return baselines.parse(method).kind


def _moments(draws: Any) -> Moments:
    values = np.asarray(draws, np.float64)
    mean, sd = values.mean(axis=0), values.std(axis=0)
    # Entries that are the same in all draws, as ones in a Cholesky factor, get no sd by rounding.
    return Moments(mean, np.where(np.ptp(values, axis=0) > 0, sd, 0.0))


def _reason(error: Exception, path: Path) -> str:
    """One line; with the type and place of an error only where it is not one of this library's."""
    own = isinstance(error, (baselines.DivergedError, ValueError))
    if own and str(error) and model_file.line_of(error, path) is None:
        return str(error).splitlines()[0].rstrip(".")
    return model_file.describe(error, path)


def accuracy(sites: dict[str, Moments], reference: dict[str, Moments]) -> Accuracy | None:
    """Compare moments with a reference's; None if no coordinate varies there."""
    mean, sd = _flat(sites)
    reference_mean, reference_sd = _flat(reference)
    varies = reference_sd > 0
    if not varies.any():
        return None
    error = np.abs(mean - reference_mean)[varies] / reference_sd[varies]
    ratio = sd[varies] / reference_sd[varies]
    return Accuracy(float(error.max()), float(ratio.min()), float(ratio.max()))


def _flat(sites: dict[str, Moments]) -> tuple[np.ndarray, np.ndarray]:
    means = np.concatenate([np.ravel(site.mean) for site in sites.values()])
    return means, np.concatenate([np.ravel(site.sd) for site in sites.values()])


def _reference(outcomes: Sequence[Outcome]) -> Outcome | None:
    for outcome in outcomes:
        if outcome.trained is not None and _kind(outcome.method) == "nuts":
            return outcome
    return None


def _accuracy(outcome: Outcome, reference: Outcome | None) -> Accuracy | None:
    if reference is None or reference.trained is None or outcome.trained is None:
        return None
    if outcome is reference:
        return None
    return accuracy(outcome.trained.sites, reference.trained.sites)


def _headings(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return _HEADINGS + (() if _reference(outcomes) is None else _REFERENCE_HEADINGS)


def _row(outcome: Outcome, reference: Outcome | None) -> list[str]:
    """Cells of the table for one method, below :func:`_headings`."""
    trained = outcome.trained
    if trained is None:
        cells = ["failed", "", ""]
    else:
        cells = [
            _figure(trained.bound, 3),
            _figure(trained.bound_error, 3),
            _figure(trained.seconds_per_step, 0, scale=1e6),
        ]
    cells.append(_figure(outcome.seconds, 1))
    if reference is not None:
        found = _accuracy(outcome, reference)
        cells += (
            ["", ""]
            if found is None
            else [
                f"{found.mean_error:.2f}",
                f"{found.least_sd_ratio:.2f}-{found.largest_sd_ratio:.2f}",
            ]
        )
    return cells


def _figure(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None or not math.isfinite(value) else f"{scale * value:.{digits}f}"


def _table(outcomes: Sequence[Outcome]) -> "Table":
    from rich import box
    from rich.table import Table

    # Without lines between the columns it fits into 80 characters.
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in _headings(outcomes):
        table.add_column(heading, justify="right", no_wrap=True)
    reference = _reference(outcomes)
    for outcome in outcomes:
        table.add_row(outcome.method, *_row(outcome, reference))
    return table


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    """How to read the table."""
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(_BOUNDS[_kind(outcome.method)], []).append(outcome.method)
    bounds = "; ".join(f"{', '.join(methods)}: {bound}" for bound, methods in groups.items())
    notes = [
        f"bound: lower bound on the log evidence, the higher the better. {bounds}.",
        "std. error: of the estimate of the bound; another seed may train to another one.",
        "µs per step: of training, without compilation. seconds: in all, with compilation.",
    ]
    reference = _reference(outcomes)
    if reference is not None and reference.trained is not None:
        noise = 3 / math.sqrt(max(reference.trained.details["least_ess"], 1.0))
        notes += [
            "mean error: largest error of a posterior mean of a latent site, in NUTS's standard "
            f"deviations; below {noise:.2f} it may be noise of NUTS.",
            "sd ratio: least and largest standard deviation over NUTS's; below 1 is overconfident.",
        ]
    return notes


def _findings(outcomes: Sequence[Outcome]) -> list[str]:
    """The best bound, and what has failed or is doubtful."""
    lines = []
    bounded = [
        (outcome.method, outcome.trained.bound, outcome.trained.bound_error or 0.0)
        for outcome in outcomes
        if outcome.trained is not None and outcome.trained.bound is not None
    ]
    if bounded:
        best, bound, error = max(bounded, key=lambda entry: entry[1])
        line = f"Best bound: {best}, {bound:.3f} ± {error:.3f}"
        # Two standard errors of a difference.
        ties = [
            method
            for method, other, other_error in bounded
            if method != best and bound - other <= 2 * math.hypot(error, other_error)
        ]
        lines.append(f"{line}; no worse within the errors: {', '.join(ties)}" if ties else line)
    for outcome in outcomes:
        if outcome.trained is None:
            lines.append(f"Failed: {outcome.method}: {outcome.failure}")
            continue
        details = outcome.trained.details
        # What is wrong; what to do about it is the table's message.
        lines += [
            f"Doubtful: {outcome.method}: {warning.split(':')[0]}"
            for warning in details.get("warnings", [])
        ]
        if _kind(outcome.method) == "nuts":
            rhat, divergences = details["largest_rhat"], details["num_divergences"]
            if not rhat < _RHAT_LIMIT or divergences:
                lines.append(
                    f"Doubtful: {outcome.method}: R-hat up to {rhat:.2f}, {divergences} "
                    "divergences; it may be no good reference"
                )
    return lines


def _as_json(options: Options, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    reference = _reference(outcomes)
    return {
        "rvrs": version("rvrs"),
        "model_file": str(options.model_file),
        "model": options.model,
        "data": None if options.data is None else str(options.data),
        "proposal": options.proposal,
        "steps": options.steps,
        "seed": options.seed,
        "reference": None if reference is None else reference.method,
        "methods": [_entry(outcome, reference) for outcome in outcomes],
    }


def _entry(outcome: Outcome, reference: Outcome | None) -> dict[str, Any]:
    entry = {"method": outcome.method, "failure": outcome.failure, "seconds": outcome.seconds}
    trained = outcome.trained
    if trained is not None:
        found = _accuracy(outcome, reference)
        entry |= trained._asdict()
        entry["sites"] = {name: moments._asdict() for name, moments in trained.sites.items()}
        entry["accuracy"] = None if found is None else found._asdict()
    return _plain(entry)


def _plain(value: Any) -> Any:
    """What JSON can hold; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    # Arrays and numbers of NumPy and JAX.
    return _plain(np.asarray(value).tolist())


def _as_markdown(options: Options, outcomes: Sequence[Outcome], findings: Sequence[str]) -> str:
    reference = _reference(outcomes)
    headings = [
        # A hyphen at the end of a line is one of the narrow table only.
        heading.replace("-\n", "").replace("\n", " ")
        for heading in ("method", *_headings(outcomes))
    ]
    rows = [headings, ["---"] + ["---:"] * (len(headings) - 1)]
    rows += [[outcome.method, *_row(outcome, reference)] for outcome in outcomes]
    data = "" if options.data is None else f" with {options.data.name}"
    return "\n".join(
        [
            f"# Methods for {options.model} of {options.model_file.name}{data}",
            "",
            f"{options.steps} steps, {options.proposal} proposal, seed {options.seed}, rvrs "
            f"{version('rvrs')}.",
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            *(f"- {line}" for line in findings),
            "",
            *(f"- {note}" for note in _notes(outcomes)),
            "",
        ]
    )


def _write(path: Path, text: str) -> None:
    """No other process ever reads half a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
