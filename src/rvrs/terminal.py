"""What the commands share: messages, progress bars, and the check of where results go."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


def check_writable(command: str, directory: Path) -> None:
    """Make the directory and leave with one line if files cannot be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        sys.exit(f"{command}: --out {directory} is a file; name a directory.")
    except OSError as error:
        sys.exit(f"{command}: cannot write to --out {directory}: {error.strerror}.")


def say(console: "Console", text: str) -> None:
    """Print text that is to be copied, such as paths: neither wrapped nor coloured."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress(console: "Console") -> Iterator["Progress"]:
    """Bars with the time that has passed and a status."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def reporter(progress: "Progress", task: "TaskID", num_steps: int) -> Callable[[int, Any], None]:
    """A callback of ``rvrs.fit`` that moves a bar."""

    def report(steps: int, info: Any) -> None:
        ending = "  evaluating" if steps == num_steps else ""
        progress.update(task, completed=steps, status=status(info) + ending)

    return report


def status(info: Any) -> str:
    """ELBO and acceptance as means over the latest steps, and the latest T."""
    import numpy as np

    elbo = np.asarray(info.elbo, float)
    # A step that was skipped has none.
    elbo = elbo[np.isfinite(elbo)]
    mean = f"{elbo.mean():.3f}" if elbo.size else "unknown"
    accept, threshold = float(info.acceptance.mean()), float(info.threshold[-1])
    return f"ELBO {mean}  accept {accept:.3f}  T {threshold:.2f}"
