"""The tables, notes and files that ``rvrs compare`` makes of what its methods have come to."""

import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rvrs import baselines
from rvrs.baselines.task import Proposal

if TYPE_CHECKING:
    from rich.table import Table

# From here on, and with any divergence, NUTS is a doubtful reference.
_RHAT_LIMIT = 1.05

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


def check(method: str) -> None:
    """Refuse a name that is unknown, or that a model in a file cannot be given."""
    if kind(method) not in _BOUNDS:
        raise ValueError(
            f"{method} needs a model in two parts, with its local latents apart, which "
            f"rvrs.baselines.fit takes. Choose from {', '.join(baselines.KINDS)}."
        )


def kind(method: str) -> str:
    """That of a method, by its name."""
    return baselines.parse(method).kind


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
        if outcome.trained is not None and kind(outcome.method) == "nuts":
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


def table(outcomes: Sequence[Outcome]) -> "Table":
    """One line for every method, for a terminal of 80 characters."""
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


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """How to read the table."""
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(_BOUNDS[kind(outcome.method)], []).append(outcome.method)
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


def findings(outcomes: Sequence[Outcome]) -> list[str]:
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
        if kind(outcome.method) == "nuts":
            rhat, divergences = details["largest_rhat"], details["num_divergences"]
            if not rhat < _RHAT_LIMIT or divergences:
                lines.append(
                    f"Doubtful: {outcome.method}: R-hat up to {rhat:.2f}, {divergences} "
                    "divergences; it may be no good reference"
                )
    return lines


def as_json(options: Options, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that was found, with what it was asked for."""
    reference = _reference(outcomes)
    return {
        "format": "rvrs-comparison",
        "version": 1,
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


def as_markdown(options: Options, outcomes: Sequence[Outcome], findings: Sequence[str]) -> str:
    """A page with the table, what was found, and how to read it."""
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
            *(f"- {note}" for note in notes(outcomes)),
            "",
        ]
    )
