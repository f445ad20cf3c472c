"""``rvrs fit``: a model and data in files become a fit, a summary, draws and a figure."""

import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rvrs import files, terminal

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from rvrs import result
    from rvrs.model_file import ModelArguments

RESULT, CHECKPOINT = "fit.npz", "fit.checkpoint.npz"
# As many as Fit.summary takes, so that one compiled program serves both.
_DRAWS_AT_ONCE = 10_000


class Options(NamedTuple):
    """What ``rvrs fit`` was asked for."""

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


def run(options: Options, show_traceback: bool) -> None:
    """Fit and write the results; everything that can be checked is checked before the long work.

    Results of an earlier fit stay until all of the new ones are there. What a fit has so far is in
    a checkpoint, which is deleted last: where there is one, there is something to go on with.
    """
    with terminal.results_in("rvrs fit", options.out, CHECKPOINT):
        _run(options, show_traceback)


def _run(options: Options, show_traceback: bool) -> None:
    checkpoint = options.out / CHECKPOINT
    resumed = _resumed(options) if options.resume else None

    from rich.console import Console

    from rvrs import model_file, storage

    console = Console()
    model, arguments = load(
        "rvrs fit", options.model_file, options.data, options.model, show_traceback
    )
    terminal.say(console, describe_call(options.model_file, options.model, arguments))
    try:
        with collected_warnings() as messages:
            if resumed is None:
                # That of another fit; --resume is not to take it for one of this fit.
                checkpoint.unlink(missing_ok=True)
            else:
                _check_seed(resumed, options.seed)
            fit = _run_fit(console, options, model, arguments, checkpoint, resumed)
            summary = fit.summary()
            draws = _posterior_draws(fit, options.seed, options.draws)
            figure = fit.plot()
            with files.together(options.out) as folder:
                fit.save(folder / RESULT)
                files.write_text(folder / "summary.txt", f"{summary}\n")
                files.write_arrays(folder / "posterior.npz", draws)
                figure.savefig(folder / "fit.png", dpi=150)
            checkpoint.unlink(missing_ok=True)
    except KeyboardInterrupt:
        advice = "; go on with --resume" if checkpoint.is_file() else ""
        sys.exit(f"rvrs fit: interrupted{advice}.")
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
            sys.exit("rvrs fit: failed, see above.")
        own = not model_file.line_of(error, options.model_file)
        if own and isinstance(error, storage.CheckpointError):
            # Not all of them name the file.
            place = "" if str(resumed) in str(error) else f" The file is {resumed}."
            sys.exit(f"rvrs fit: {error}{place}")
        if own and isinstance(error, ValueError):
            # Of rvrs itself, which says what to do.
            sys.exit(f"rvrs fit: {error}")
        if own and isinstance(error, OSError):
            advice = "; then go on with --resume" if checkpoint.is_file() else ""
            sys.exit(f"rvrs fit: {terminal.explain(error)}{advice}.")
        sys.exit(
            f"rvrs fit: {model_file.describe(error, options.model_file)}; --traceback shows where."
        )
    terminal.say(console, f"\n{summary}\n")
    # The fit's own warnings are in its summary.
    for message in messages:
        if message not in fit.warnings:
            terminal.say(console, f"WARNING: {message}")
    names = "fit.npz, summary.txt, posterior.npz, fit.png"
    terminal.say(console, f"Results in {options.out}: {names}")


def _resumed(options: Options) -> Path:
    """The file to go on with: of a finished fit, other results may be missing."""
    for name in (CHECKPOINT, RESULT):
        if (options.out / name).is_file():
            return options.out / name
    sys.exit(
        f"rvrs fit: there is nothing to resume: no {CHECKPOINT} or {RESULT} in {options.out}; "
        "leave out --resume."
    )


def _check_seed(resumed: Path, seed: int) -> None:
    """Refuse another seed: the fit would go on with its own, and the draws be of the other."""
    import jax
    import numpy as np

    from rvrs import storage

    # The last of the keys that a run derives from its own is stored.
    expected = jax.random.key_data(jax.random.split(jax.random.key(seed), 4)[-1])
    found = storage.read(resumed).arrays.get("keys[0]")
    if found is not None and not np.array_equal(found, expected):
        raise ValueError(
            f"{resumed} was made with another seed than {seed}; pass the --seed of that fit."
        )


def load(
    command: str, path: Path, data: Path | None, name: str, show_traceback: bool
) -> "tuple[Callable[..., Any], ModelArguments]":
    """The model of a file and its arguments; leaves with one line if either file is wrong."""
    from rvrs import model_file

    try:
        columns = None if data is None else model_file.read_data(data)
        model = model_file.load_model(path, name)
        return model, model_file.arguments(model, columns, str(data))
    except model_file.UserFileError as error:
        if show_traceback:
            traceback.print_exc()
        sys.exit(f"{command}: {error}")


def describe_call(path: Path, name: str, arguments: "ModelArguments") -> str:
    """Which parameter gets what, as a mistake in a name can be silent."""
    parts = [f"{path}: {name}({', '.join(arguments.given)})"]
    if arguments.defaulted:
        parts.append(f"defaults of {', '.join(arguments.defaulted)}")
    if arguments.unused:
        parts.append(f"columns not used: {', '.join(arguments.unused)}")
    return "; ".join(parts)


def _run_fit(
    console: "Console",
    options: Options,
    model: Callable[..., Any],
    arguments: "ModelArguments",
    checkpoint: Path,
    resumed: Path | None,
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
            checkpoint=checkpoint,
            resume=resumed,
        )


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
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
