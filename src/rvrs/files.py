"""Files that are whole at any time: a reader finds the old one or the new one, never a part."""

import math
import os
import tempfile
import zipfile
import zlib
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


class DamagedError(ValueError):
    """A file that is not one of :func:`write_arrays`, or not any more."""


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file of :func:`write_arrays`; nothing in it is executed.

    Memory is allocated for nothing that the file only claims to hold: :func:`write_arrays` does not
    compress, so that arrays take no more bytes than the file has.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as container:
            members = container.infolist()
            claimed = sum(member.file_size for member in members)
            stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            names = [member.filename.removesuffix(".npy") for member in members]
            if not stored or claimed > path.stat().st_size or len(set(names)) < len(names):
                raise DamagedError(f"{path} does not hold what it claims to.")
            arrays = [_read_member(container, member) for member in members]
            return dict(zip(names, arrays, strict=True))
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except _UNREADABLE as error:
        raise DamagedError(f"{path} is not a file of arrays, or is damaged.") from error


def _read_member(container: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with container.open(member) as file:
        version = np.lib.format.read_magic(file)
        shape, _, dtype = _HEADER_READERS[version](file)
        # Objects would be unpickled; types without a size would make any shape possible.
        if dtype.kind not in "biufc":
            raise DamagedError(f"{member.filename} has elements of the type {dtype}.")
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise DamagedError(f"{member.filename} has not the size of an array of shape {shape}.")
    with container.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Whatever reading a container or an array raises when bytes are wrong.
_UNREADABLE = (
    *(OSError, EOFError, KeyError, IndexError, TypeError, ValueError, NotImplementedError),
    *(RuntimeError, MemoryError, OverflowError, SyntaxError, zipfile.BadZipFile, zlib.error),
)
