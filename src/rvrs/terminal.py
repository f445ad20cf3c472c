"""What the commands share: messages, progress bars, and the folder that results go to."""

import errno
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rvrs import files

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


@contextmanager
def results_in(command: str, directory: Path, *names: str) -> Iterator[None]:
    """Make the directory, and keep other processes from writing there.

    Leaves with one line if that fails, or later a file in it. ``names`` are those of files that are
    written by themselves, see :func:`rvrs.files.locked`.
    """
    check_writable(command, directory)
    try:
        with files.locked(directory, *names):
            yield
    except files.LockedError as error:
        sys.exit(f"{command}: {error}")
    except OSError as error:
        sys.exit(f"{command}: {explain(error)}.")


# What can be done about errors of the system.
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "make it writable, or choose another --out"
    ),
}


def explain(error: OSError) -> str:
    """Which file an error of the system is about, and what to do; without a full stop."""
    if error.strerror is None or error.filename is None:
        # One of rvrs itself, which says that already.
        return str(error).rstrip(".")
    advice = _ADVICE.get(error.errno or 0)
    return f"{error.filename}: {error.strerror}" + (f"; {advice}" if advice else "")


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
