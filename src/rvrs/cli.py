"""The ``rvrs`` command: ``rvrs fit``, ``rvrs demo`` and ``rvrs bench``.

What the extra ``rvrs[cli]`` installs is imported inside the commands, after a check that it is
there.
"""

import math
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from rvrs import terminal

if TYPE_CHECKING:
    import numpy as np
    import typer
    from rich.console import Console

    from rvrs import result
    from rvrs.model_file import ModelArguments

# What the extra ``rvrs[cli]`` installs.
_NEEDED = ("matplotlib", "rich", "typer")

# JAX takes seeds of 32 bits on every platform.
_LARGEST_SEED = 2**32 - 1

# As many as Fit.summary takes, so that one compiled program serves both.
_DRAWS_AT_ONCE = 10_000


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

        Writes fit.npz (for rvrs.load), summary.txt, posterior.npz (draws by site) and fit.png.
        """
        _fit(
            _FitOptions(
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

        terminal.check_writable("rvrs demo", out)
        if example == "funnel":
            demonstrations.run_funnel(out, seed, steps)
        else:
            demonstrations.run_breast_cancer(out, seed, steps)

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

    return application


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


class _FitOptions(NamedTuple):
    model_file: Path
    data: Path | None
    model: str
    target_acceptance: float
    proposal: str
    steps: int | None
    seed: int
    out: Path
    draws: int
    resume: bool


def _fit(options: _FitOptions, show_traceback: bool) -> None:
    """Everything that can be checked is checked before the long work."""
    terminal.check_writable("rvrs fit", options.out)
    stored = options.out / "fit.npz"
    if options.resume and not stored.is_file():
        sys.exit(f"rvrs fit: there is nothing to resume: no {stored}; leave out --resume.")

    from rich.console import Console

    from rvrs import model_file

    console = Console()
    try:
        columns = None if options.data is None else model_file.read_data(options.data)
        model = model_file.load_model(options.model_file, options.model)
        arguments = model_file.arguments(model, columns, str(options.data))
    except model_file.UserFileError as error:
        if show_traceback:
            traceback.print_exc()
        sys.exit(f"rvrs fit: {error}")
    terminal.say(console, _describe_call(options, arguments))
    try:
        with _collected_warnings() as messages:
            fit = _run_fit(console, options, model, arguments, stored)
            fit.save(stored)
            summary = fit.summary()
            draws = _posterior_draws(fit, options.seed, options.draws)
            figure = fit.plot()
    except KeyboardInterrupt:
        advice = "; go on with --resume" if stored.is_file() else ""
        sys.exit(f"rvrs fit: interrupted{advice}.")
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
            sys.exit("rvrs fit: failed, see above.")
        if isinstance(error, ValueError) and not model_file.line_of(error, options.model_file):
            # Of rvrs itself, which says what to do.
            sys.exit(f"rvrs fit: {error}")
        sys.exit(
            f"rvrs fit: {model_file.describe(error, options.model_file)}; --traceback shows where."
        )
    terminal.say(console, f"\n{summary}\n")
    # The fit's own warnings are in its summary.
    for message in messages:
        if message not in fit.warnings:
            terminal.say(console, f"WARNING: {message}")
    (options.out / "summary.txt").write_text(f"{summary}\n", encoding="utf-8")
    _write_arrays(options.out / "posterior.npz", draws)
    figure.savefig(options.out / "fit.png", dpi=150)
    names = "fit.npz, summary.txt, posterior.npz, fit.png"
    terminal.say(console, f"Results in {options.out}: {names}")


def _describe_call(options: _FitOptions, arguments: "ModelArguments") -> str:
    """Which parameter gets what, as a mistake in a name can be silent."""
    parts = [f"{options.model_file}: {options.model}({', '.join(arguments.given)})"]
    if arguments.defaulted:
        parts.append(f"defaults of {', '.join(arguments.defaulted)}")
    if arguments.unused:
        parts.append(f"columns not used: {', '.join(arguments.unused)}")
    return "; ".join(parts)


def _run_fit(
    console: "Console",
    options: _FitOptions,
    model: Callable[..., Any],
    arguments: "ModelArguments",
    stored: Path,
) -> "result.Fit":
    import jax

    from rvrs import fitting

    num_steps = fitting.NUM_STEPS if options.steps is None else options.steps
    with terminal.progress(console) as progress:
        task = progress.add_task("RVRS", total=num_steps, status="compiling and warming up")
        return fitting.fit(
            jax.random.key(options.seed),
            model,
            *arguments.args,
            model_kwargs=arguments.kwargs,
            proposal=options.proposal,
            target_acceptance=options.target_acceptance,
            num_steps=num_steps,
            progress=False,
            callback=terminal.reporter(progress, task, num_steps),
            checkpoint=stored,
            resume=stored if options.resume else None,
        )


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """The texts of warnings for users, each once, instead of Python's way to print them."""
    messages: list[str] = []

    def collect(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if not issubclass(category, UserWarning):
            show(message, category, *rest)
        elif str(message) not in messages:
            messages.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show, warnings.showwarning = warnings.showwarning, collect
        yield messages


def _posterior_draws(fit: "result.Fit", seed: int, number: int) -> dict[str, "np.ndarray"]:
    """Draws of all sites, in parts of a size whose program is there already."""
    import jax
    import numpy as np

    # Not the keys that the fit itself derives from the seed.
    key = jax.random.fold_in(jax.random.key(seed), number)
    parts = [
        fit.sample(part_key, _DRAWS_AT_ONCE)
        for part_key in jax.random.split(key, math.ceil(number / _DRAWS_AT_ONCE))
    ]
    return {
        name: np.concatenate([np.asarray(part[name]) for part in parts])[:number]
        for name in parts[0]
    }


def _write_arrays(path: Path, arrays: dict[str, "np.ndarray"]) -> None:
    """What ``numpy.savez`` does, which refuses some names that sites may have, as ``file``."""
    import numpy as np

    part = path.with_name(f"{path.name}.part")
    with zipfile.ZipFile(part, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    part.replace(path)
