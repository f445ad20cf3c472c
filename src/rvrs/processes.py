"""Checkpoints of a run in several processes: each of them stores its own part.

A process may be killed after another one has stored the latest steps and before it has done so
itself. None can be further ahead than that, so that with the file before the latest one there are
always files of the same step.
"""

import glob
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from rvrs import storage
from rvrs.storage import Checkpoint

Store = Callable[[Checkpoint], None]


def own_file(path: Path) -> Path:
    """The file of this process; with one process the path itself."""
    if jax.process_count() == 1:
        return path
    part = f"process-{jax.process_index()}-of-{jax.process_count()}"
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Store the part of this process."""
    own = own_file(path)
    if own != path and own.exists():
        own.replace(_previous(own))
    storage.write(own, checkpoint)


def read(path: Path) -> Checkpoint:
    """The latest part of this process that all others have, too."""
    own = own_file(path)
    files = [file for file in (own, _previous(own)) if file.exists()]
    if not files:
        _refuse_other_count(path)
    if own == path:
        return storage.read(path)
    # The latest last: an earlier run may have left a file of the same step.
    found = {stored.header["steps_done"]: stored for stored in map(storage.read, files[::-1])}
    steps = np.array([*found, -1, -1][:2])
    everywhere = np.reshape(multihost_utils.process_allgather(steps), (-1, 2)).tolist()
    common = set.intersection(*map(set, everywhere)) - {-1}
    if not common:
        raise ValueError(
            f"resume: the processes have no files of the same step beside {path} (steps of each: "
            f"{everywhere}); pass the files that one run has stored."
        )
    return found[max(common)]


def _refuse_other_count(path: Path) -> None:
    pattern = f"{glob.escape(path.stem)}.process-*-of-*{path.suffix}"
    others = {file.stem.split("-of-")[-1].split(".")[0] for file in path.parent.glob(pattern)}
    # With those of as many processes, this one has been killed before it stored anything.
    if str(jax.process_count()) in others or not (others or path.exists()):
        return
    stored = " or ".join(sorted(others)) or "1"
    raise ValueError(
        f"resume: {path} was stored by {stored} process(es), but this run has "
        f"{jax.process_count()}; start as many as then, with as many devices."
    )
