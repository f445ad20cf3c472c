"""``rvrs reproduce``: experiments of the paper, with progress and what came of them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rvrs import terminal
from rvrs.experiments import catalogue, runner, workers
from rvrs.experiments.experiment import Result, Unit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Part(NamedTuple):
    """The size of the experiments, and which part of them is wanted."""

    preset: str
    methods: list[str] | None
    datasets: list[str] | None
    num_seeds: int | None
    retry_failed: bool


def run(
    experiments: list[str], part: Part, out: Path, jobs: int | None, scheduler: str | None
) -> None:
    """Compute what is missing in ``out``; leave with code 1 if something is wrong or has failed."""
    from rich.console import Console

    console = Console()
    try:
        if scheduler is not None and jobs is not None:
            raise ValueError("--jobs has no meaning with --scheduler; leave one out.")
        # All experiments are checked before the first takes its time.
        plans = [_plan(name, part, out) for name in _names(experiments)]
        num_jobs = workers.cores() if jobs is None else jobs
        failed = [_execute(console, plan, num_jobs, scheduler).failures for plan in plans]
    except (ValueError, ImportError, RuntimeError) as error:
        sys.exit(f"rvrs reproduce: {error}")
    except OSError as error:
        goes_on = "" if error.errno is None else "; then the same command goes on"
        sys.exit(f"rvrs reproduce: {terminal.explain(error)}{goes_on}.")
    except KeyboardInterrupt:
        sys.exit("rvrs reproduce: interrupted; the same command goes on.")
    terminal.say(console, f"Figures and tables: rvrs report {out}")
    if any(failed):
        sys.exit(1)


def _names(experiments: list[str]) -> list[str]:
    named: dict[str, None] = {}
    for name in experiments:
        named |= dict.fromkeys(catalogue.NAMES if name == "all" else [name])
    return list(named)


def _plan(name: str, part: Part, out: Path) -> runner.Plan:
    return runner.plan(
        name,
        part.preset,
        methods=part.methods,
        datasets=part.datasets,
        num_seeds=part.num_seeds,
        out=out,
        retry_failed=part.retry_failed,
    )


def _execute(
    console: "Console", plan: runner.Plan, jobs: int, scheduler: str | None
) -> runner.Summary:
    terminal.say(console, plan.experiment.title)
    with terminal.progress(console) as progress:
        summary = runner.execute(plan, jobs=jobs, scheduler=scheduler, progress=_Bars(progress))
    _say_summary(console, summary)
    return summary


class _Bars(runner.Observer):
    """A bar of the units that have ended, and one for each that is under way, in per cent."""

    def __init__(self, progress: "Progress") -> None:
        self.progress = progress
        self.under_way: dict[Unit, TaskID] = {}
        self.failures = 0

    def planned(self, plan: runner.Plan) -> None:
        number = len(plan.first) + len(plan.missing)
        self.all = self.progress.add_task(plan.experiment.name, total=number, status="")

    def started(self, unit: Unit) -> None:
        self.under_way[unit] = self.progress.add_task(
            f"  {_describe(unit)}", total=100, status="starting"
        )

    def advanced(self, unit: Unit, share: float, words: str) -> None:
        # A report may be read after the end of its unit.
        if unit in self.under_way:
            self.progress.update(self.under_way[unit], completed=round(100 * share), status=words)

    def ended(self, result: Result) -> None:
        self.progress.remove_task(self.under_way.pop(result.unit))
        self.failures += result.failure is not None
        status = f"{self.failures} failed" if self.failures else ""
        self.progress.update(self.all, advance=1, status=status)


def _describe(unit: Unit) -> str:
    return f"{unit.dataset} {unit.method} seed {unit.seed}"


def _say_summary(console: "Console", summary: runner.Summary) -> None:
    terminal.say(
        console,
        f"{summary.experiment}: {summary.computed} computed, {summary.stored} already stored, "
        f"{len(summary.failures)} failed",
    )
    for result in summary.failures:
        terminal.say(console, f"  {_describe(result.unit)}: {result.failure}")
