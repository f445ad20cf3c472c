"""``rvrs compare``: several methods on one model, to see which of them suits it."""

import json
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import init_to_uniform

from rvrs import baselines, comparison_report, files, fit_command, model_file, terminal
from rvrs.comparison_report import Moments, Options, Outcome, Trained

if TYPE_CHECKING:
    from rich.console import Console

# Draws of every method that its means and standard deviations are from: all that NUTS makes.
_NUM_DRAWS = 4_000
_WIDTH = 80


class Sites(NamedTuple):
    """Names of what a model has besides data."""

    latent: list[str]
    params: list[str]


def run(options: Options, show_traceback: bool) -> None:
    """Try all methods, print a table and write it; leave with code 1 if none of them works."""
    names = list(dict.fromkeys(options.methods))
    try:
        for name in names:
            comparison_report.check(name)
    except ValueError as error:
        sys.exit(f"rvrs compare: {error}")
    with terminal.results_in("rvrs compare", options.out):
        _run(options, names, show_traceback)


def _run(options: Options, names: Sequence[str], show_traceback: bool) -> None:
    from rich.console import Console

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
    console.print(comparison_report.table(outcomes))
    for note in comparison_report.notes(outcomes):
        terminal.say(console, textwrap.fill(note, _WIDTH, subsequent_indent="  "))
    terminal.say(console, "")
    findings = comparison_report.findings(outcomes)
    findings += [f"WARNING: {message}" for message in messages]
    for line in findings:
        terminal.say(console, line)
    content = json.dumps(comparison_report.as_json(options, outcomes), indent=2, allow_nan=False)
    with files.together(options.out) as folder:
        files.write_text(folder / "comparison.json", f"{content}\n")
        page = comparison_report.as_markdown(options, outcomes, findings)
        files.write_text(folder / "comparison.md", page)
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
    is_reference = comparison_report.kind(name) == "nuts"
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
