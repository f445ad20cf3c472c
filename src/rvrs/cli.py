"""The ``rvrs`` command: ``rvrs demo`` and ``rvrs bench``.

Everything heavy is imported inside the commands, so that ``rvrs --help`` is quick.
"""

import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import jax
    import typer
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from rvrs import vi
    from rvrs.experiments import funnel

# What the extra ``rvrs[cli]`` installs.
_NEEDED = ("matplotlib", "rich", "typer")


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
    def demo(
        out: Annotated[
            Path, typer.Option(help="Directory for the figure; made if it does not exist.")
        ] = Path("rvrs-demo"),
        # JAX takes seeds of 32 bits on every platform.
        seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=2**32 - 1)] = 0,
        steps: Annotated[
            int | None,
            typer.Option(help="Training steps per fit; by default enough to converge.", min=1),
        ] = None,
    ) -> None:
        """Fit a funnel with mean-field and RVRS, and draw Figure 1 of the paper."""
        _demo(out, seed, steps)

    @application.command()
    def bench() -> None:
        """Measure what a training step costs, compared with the work it cannot avoid."""
        from rvrs import bench

        bench.main()

    return application


def _demo(out: Path, seed: int, steps: int | None) -> None:
    _check_writable(out)

    import jax
    from rich.console import Console

    from rvrs.experiments import funnel

    console = Console()
    num_steps = funnel.NUM_STEPS if steps is None else steps
    fits = _fit_with_progress(console, jax.random.key(seed), num_steps)
    console.print(_table(fits))
    path = out / "funnel.png"
    funnel.plot(fits, path)
    # A path is to be copied: neither wrapped nor coloured.
    console.print(f"Figure 1: {path}", soft_wrap=True, highlight=False, markup=False)


def _check_writable(directory: Path) -> None:
    """Make the directory and leave with one line if files cannot be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        sys.exit(f"rvrs demo: --out {directory} is a file; name a directory.")
    except OSError as error:
        sys.exit(f"rvrs demo: cannot write to --out {directory}: {error.strerror}.")


def _fit_with_progress(
    console: "Console", rng_key: "jax.Array", num_steps: int
) -> list["funnel.Fit"]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from rvrs.experiments import funnel

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )
    fits = []
    with Progress(*columns, console=console) as progress:
        for target_acceptance in funnel.TARGET_ACCEPTANCES:
            task = progress.add_task(
                funnel.method_name(target_acceptance), total=num_steps, status="compiling"
            )

            def report(
                steps: int, _state: "vi.RVRSState", info: "vi.RVRSInfo", task: "TaskID" = task
            ) -> None:
                progress.update(task, completed=steps, status=_status(info))

            fits.append(
                funnel.fit(rng_key, target_acceptance, num_steps=num_steps, callback=report)
            )
    return fits


def _status(info: "vi.RVRSInfo") -> str:
    """ELBO and acceptance as means over the latest steps, and the latest T."""
    return (
        f"ELBO {float(info.elbo.mean()):.3f}  accept {float(info.acceptance.mean()):.3f}  "
        f"T {float(info.threshold[-1]):.2f}"
    )


def _table(fits: "list[funnel.Fit]") -> "Table":
    from rich.table import Table

    table = Table(title="Figure 1: funnel, best possible ELBO 0")
    table.add_column("method")
    for heading in ("ELBO", "std. error", "acceptance", "T", "seconds*"):
        table.add_column(heading, justify="right")
    table.caption = "* of training, including compilation"
    for fit in fits:
        table.add_row(
            fit.name,
            f"{fit.elbo:.4f}",
            f"{fit.elbo_error:.4f}",
            f"{fit.acceptance:.4f}",
            f"{fit.threshold:.2f}",
            f"{fit.seconds:.1f}",
        )
    return table
