"""Files that are whole at any time: a reader finds the old one or the new one, never a part."""

import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


def write(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace a file by what ``fill`` writes; if it fails, the old file stays."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        # Temporary files are private; a result is as readable as the user's other files.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8."""
    write(path, lambda file: file.write(text.encode()))


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace an ``.npz`` file.

    ``numpy.savez`` refuses some names that sites may have, as ``file``.
    """

    def fill(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as container:
            for name, array in arrays.items():
                with container.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)

    write(path, fill)
