"""Files that are whole at any time: a reader finds the old one or the new one, never a part.

Folders can be held (:func:`locked`), so that two processes do not write the same results.
"""

import math
import os
import platform
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:
    # Windows. There nothing keeps two processes from the same folder: every file is still whole at
    # any time, but they may come from either.
    fcntl: Any = None

_LOCK = ".rvrs.lock"
# Hidden, as nobody is to take what is under way for a result.
_TEMPORARY = ".part"
_TEMPORARY_FOLDER = ".rvrs-"


def write(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """Replace a file by what ``fill`` writes; if it fails, the old file stays."""
    with _naming(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
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


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """A hidden folder for new files, which replace those of the same names in ``folder``.

    They do so at the end, when all are written. If anything fails before, all old files stay.
    """
    with (
        _naming(folder),
        tempfile.TemporaryDirectory(
            dir=folder, prefix=_TEMPORARY_FOLDER, suffix=_TEMPORARY
        ) as temporary,
    ):
        yield Path(temporary)
        made = sorted(Path(temporary).iterdir())
        for path in made:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        for path in made:
            path.replace(folder / path.name)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the system name what was to be written, not a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


class LockedError(RuntimeError):
    """Another process writes to the folder."""


@contextmanager
def locked(folder: Path, *names: str) -> Iterator[None]:
    """Hold a folder: no other process can, until the end of this one, however it ends.

    Then nobody else is writing there, so what killed processes have left of :func:`together`, and
    of :func:`write` to files with these names (relative, may have wildcards), is removed.

    Raises
    ------
    LockedError
        If another process holds the folder. Nobody waits for it.
    """
    path = folder / _LOCK
    with _naming(folder):
        handle = None if fcntl is None else _hold(path)
    if handle is None:
        yield
        return
    try:
        with _naming(folder):
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
            _remove_left_over(folder, names)
        yield
    finally:
        # While it is still held. Whoever has opened it by now finds out, see below.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _hold(path: Path) -> int | None:
    """The lock file, open and locked; None if its file system has no locks."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who held it before may have deleted it since it was opened: then it locks nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    return handle
        except BlockingIOError:
            holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise LockedError(
                f"{path.parent} is in use: {holder} writes its results there; wait until it has "
                "ended, or choose another folder."
            ) from None
        except OSError:
            # As on some network file systems; better no lock than no results.
            os.close(handle)
            path.unlink(missing_ok=True)
            return None
        os.close(handle)


def _remove_left_over(folder: Path, names: tuple[str, ...]) -> None:
    for path in folder.glob(f"{_TEMPORARY_FOLDER}*{_TEMPORARY}"):
        shutil.rmtree(path)
    for name in map(Path, names):
        for path in folder.glob(str(name.with_name(f".{name.name}.*{_TEMPORARY}"))):
            path.unlink(missing_ok=True)


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
