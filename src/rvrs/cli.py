"""The ``rvrs`` command: its subcommands, their options and help texts.

What the extra ``rvrs[cli]`` installs is imported inside the commands, after a check that it is
there.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rvrs import files, terminal

if TYPE_CHECKING:
    import typer

# What the extra ``rvrs[cli]`` installs.
_NEEDED = ("matplotlib", "rich", "typer")

# JAX takes seeds of 32 bits on every platform.
_LARGEST_SEED = 2**32 - 1


def main() -> None:
    """Entry point of the command."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"rvrs: {', '.join(missing)} not installed; run: pip install 'rvrs[cli]'")
    _application()()


def _application() -> "typer.Typer":
    """Options and help texts; the work is done in the functions below."""
    import typer

    application = typer.Typer(no_args_is_help=True, add_completion=False)

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"rvrs {version('rvrs')}")
            raise typer.Exit

    def check_acceptance(value: float) -> float:
        if not 0 < value <= 1:
            raise typer.BadParameter(f"{value:g} is not above 0 and at most 1.")
        return value

    @application.callback()
    def rvrs(
        _version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """Reparameterized variational rejection sampling."""

    @application.command()
    def fit(
        model_file: Annotated[
            Path, typer.Argument(metavar="MODEL.py", help="Python file with a NumPyro model.")
        ],
        data: Annotated[
            Path | None, typer.Option(help="Data: columns of a .csv, or arrays of an .npz file.")
        ] = None,
        model: Annotated[str, typer.Option(help="Name of the function in the file.")] = "model",
        target_acceptance: Annotated[
            float,
            typer.Option(
                callback=check_acceptance,
                help="1 is ordinary variational inference; less is closer to the posterior.",
            ),
        ] = 0.1,
        proposal: Annotated[
            Literal["auto", "diagonal", "mvn", "low_rank"],
            typer.Option(help="Family of the proposal."),
        ] = "auto",
        steps: Annotated[
            int | None,
            typer.Option(help="Training steps; by default as many as rvrs.fit takes.", min=1),
        ] = None,
        seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=_LARGEST_SEED)] = 0,
        out: Annotated[
            Path, typer.Option(help="Directory for the results; made if it does not exist.")
        ] = Path("rvrs-fit"),
        draws: Annotated[int, typer.Option(help="Posterior draws to store.", min=1)] = 1000,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with the interrupted fit in --out.")
        ] = False,
        show_traceback: Annotated[
            bool, typer.Option("--traceback", help="Show where an error came from.")
        ] = False,
    ) -> None:
        """Fit a NumPyro model in a Python file to data in a CSV file.

        A parameter of the model that is named like a column gets that column as an array. A
        parameter called data gets a dict of all columns. Other parameters keep their defaults.

        Writes fit.npz (for rvrs.load), summary.txt, posterior.npz (draws by site) and fit.png, all
        at the end. Until then fit.checkpoint.npz has what --resume goes on with.
        """
        from rvrs import fit_command

        fit_command.run(
            fit_command.Options(
                model_file,
                data,
                model,
                target_acceptance,
                proposal,
                steps,
                seed,
                out,
                draws,
                resume,
            ),
            show_traceback,
        )

    @application.command()
    def compare(
        model_file: Annotated[
            Path, typer.Argument(metavar="MODEL.py", help="Python file with a NumPyro model.")
        ],
        data: Annotated[
            Path | None, typer.Option(help="Data: columns of a .csv, or arrays of an .npz file.")
        ] = None,
        model: Annotated[str, typer.Option(help="Name of the function in the file.")] = "model",
        methods: Annotated[
            str, typer.Option(metavar="A,B", help="Methods, in the order of the table.")
        ] = "mf,mvn,iwae-24,uha-8,rvrs-0.3,rvrs-0.1,nuts",
        proposal: Annotated[
            Literal["diagonal", "mvn"],
            typer.Option(help="Normal distribution that IWAE, UHA, VRS and RVRS refine."),
        ] = "diagonal",
        steps: Annotated[
            int, typer.Option(help="Training steps of each method; NUTS draws 4000.", min=1)
        ] = 10_000,
        seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=_LARGEST_SEED)] = 0,
        out: Annotated[
            Path, typer.Option(help="Directory for the results; made if it does not exist.")
        ] = Path("rvrs-compare"),
        show_traceback: Annotated[
            bool, typer.Option("--traceback", help="Show where errors came from.")
        ] = False,
    ) -> None:
        """Compare methods on a NumPyro model in a Python file, to see which suits it.

        Model and data meet as in rvrs fit. Methods are mf, mvn, flow, iwae-K, uha-K, rvrs-Z,
        vrs-Z (K a whole number, Z an acceptance) and nuts, the reference for means and sds.

        Writes comparison.json and comparison.md.
        """
        from rvrs import comparison

        comparison.run(
            comparison.Options(
                model_file, data, model, _listed(methods), proposal, steps, seed, out
            ),
            show_traceback,
        )

    @application.command()
    def demo(
        example: Annotated[
            Literal["breast-cancer", "funnel"], typer.Option(help="What to show.")
        ] = "breast-cancer",
        out: Annotated[
            Path, typer.Option(help="Directory for the figure; made if it does not exist.")
        ] = Path("rvrs-demo"),
        seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=_LARGEST_SEED)] = 0,
        steps: Annotated[
            int | None,
            typer.Option(help="Training steps per fit; by default enough to converge.", min=1),
        ] = None,
    ) -> None:
        """Compare mean-field, MVN and RVRS with NUTS on a logistic regression.

        With --example funnel: fit a funnel with mean-field and RVRS, and draw Figure 1 of the
        paper.
        """
        from rvrs import demo as demonstrations

        demonstrations.run(example, out, seed, steps)

    @application.command()
    def bench(
        suites: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[SUITE]...",
                help="step, quality, sampling, growth, memory or compile; all if none is named.",
                show_default=False,
            ),
        ] = None,
        quick: Annotated[
            bool, typer.Option("--quick", help="Tiny sizes: to see that it runs, not to measure.")
        ] = False,
        out: Annotated[
            Path | None, typer.Option(metavar="FILE.json", help="Write the figures to a file.")
        ] = None,
    ) -> None:
        """Compare training and sampling with the work that they cannot avoid, and with peers.

        step: a training step. quality: time to a given quality. sampling: posterior draws. growth:
        a step at growing sizes. memory: the bytes of programs. compile: time to the first step.
        """
        _bench(suites or [], quick, out)

    @application.command()
    def reproduce(
        experiments: Annotated[
            list[str],
            typer.Argument(
                metavar="EXPERIMENT...", help="Names of experiments; all stands for all of them."
            ),
        ],
        preset: Annotated[
            Literal["quick", "cpu", "paper"],
            typer.Option(help="quick: to see that it runs; paper: the full counts."),
        ] = "quick",
        methods: Annotated[
            str | None, typer.Option(metavar="A,B", help="Only these methods.")
        ] = None,
        datasets: Annotated[
            str | None, typer.Option(metavar="A,B", help="Only these data sets.")
        ] = None,
        seeds: Annotated[
            int | None, typer.Option(help="Seeds per method; by default the preset's.", min=1)
        ] = None,
        jobs: Annotated[
            int | None, typer.Option(help="Processes; by default one per core.", min=1)
        ] = None,
        out: Annotated[
            Path, typer.Option(help="Directory for the results; made if it does not exist.")
        ] = Path("rvrs-results"),
        retry_failed: Annotated[
            bool, typer.Option("--retry-failed", help="Compute again what is stored as failed.")
        ] = False,
        scheduler: Annotated[
            str | None,
            typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers compute instead."),
        ] = None,
    ) -> None:
        """Compute the figures and tables of the paper.

        Every result is stored as soon as it is there, and the same command goes on with what is
        missing. rvrs report makes figures and tables of what is stored.
        """
        from rvrs import reproduction

        terminal.check_writable("rvrs reproduce", out)
        part = reproduction.Part(
            preset,
            None if methods is None else _listed(methods),
            None if datasets is None else _listed(datasets),
            seeds,
            retry_failed,
        )
        reproduction.run(experiments, part, out, jobs, scheduler)

    @application.command()
    def report(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of rvrs reproduce.")],
        out: Annotated[
            Path | None, typer.Option(metavar="FILE.md", help="The page; by default in DIR.")
        ] = None,
    ) -> None:
        """Make a page with figures and tables of what rvrs reproduce has stored."""
        _report(folder, out)

    return application


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _report(folder: Path, out: Path | None) -> None:
    from rich.console import Console

    if not folder.is_dir():
        sys.exit(f"rvrs report: there is no folder {folder}; rvrs reproduce makes one.")

    from rvrs.experiments import report

    try:
        page = report.write(folder, page=out)
    except (ValueError, files.LockedError) as error:
        sys.exit(f"rvrs report: {error}")
    except OSError as error:
        sys.exit(f"rvrs report: {terminal.explain(error)}.")
    except KeyboardInterrupt:
        sys.exit("rvrs report: interrupted.")
    terminal.say(Console(), f"Report: {page}")


def _bench(suites: list[str], quick: bool, out: Path | None) -> None:
    from rich.console import Console

    from rvrs import bench

    try:
        bench.check(suites, out)
    except (ValueError, OSError) as error:
        sys.exit(f"rvrs bench: {error}")
    try:
        bench.run(suites, quick, out, Console())
    except KeyboardInterrupt:
        sys.exit("rvrs bench: interrupted.")
