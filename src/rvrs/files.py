"""Files that are whole at any time: a reader finds the old one or the new one, never a part.

Folders can be held (:func:`locked`), so that two processes do not write the same results.

What is read may be damaged or hostile: nothing in it is executed, memory is allocated for nothing
that a file only claims to hold, and nobody waits for what is no file. The formats are described in
docs/formats.md.
"""

import errno
import io
import json
import math
import os
import platform
import re
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

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


class DamagedError(ValueError):
    """A file that is not what it should be, or not any more."""


def open_to_read(path: Path) -> "_Reader":
    """Open a file; what is none, as a pipe or a device, is an OSError at once."""
    return _Reader(path, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    # A pipe is opened without waiting for somebody to write to it. Windows has none of that kind.
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # It may have no end.
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


class _Reader(io.FileIO):
    """A file that gives only so much at once: a container's directory is read as a whole."""

    def read(self, size: int | None = -1, /) -> Any:
        if size is not None and size > _AT_ONCE:
            raise DamagedError("its directory is too large")
        return super().read(size)


# Beyond any directory of a container, which takes about 100 bytes for every array.
_AT_ONCE = 4 * 2**20


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    with open_to_read(path) as file:
        return file.readall()


def parse_json(content: bytes) -> Any:
    """What a text says that is JSON in UTF-8, or Python's extension of it by NaN and Infinity.

    Raises
    ------
    DamagedError
        If it is none; also where one name stands for two entries, of which other readers may take
        the other one, and for what is nested deeper than anything that rvrs writes.
    """
    try:
        found = json.loads(content.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise DamagedError("the text is not JSON, or is damaged.") from error
    level = [found]
    for _ in range(_DEEPEST):
        level = [entry for value in level for entry in _entries(value)]
        if not level:
            return found
    raise DamagedError("the text is nested too deeply.")


# Far from where Python's recursion ends, whatever is done with what was read.
_DEEPEST = 100


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("one name stands for two entries.")
    return found


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Replace an ``.npz`` file.

    ``numpy.savez`` refuses some names that sites may have, as ``file``.
    """

    def fill(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as container:
            for name, array in arrays.items():
                array = np.asarray(array)
                # NumPy refuses objects; of other types, read_arrays would.
                if not array.dtype.hasobject and not _TYPE.fullmatch(array.dtype.str.encode()):
                    raise ValueError(f"{name}: arrays of {array.dtype} cannot be stored.")
                with container.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    write(path, fill)


def read_arrays(path: Path, *, compressed: bool = False) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file: numbers, truth values and strings.

    Parameters
    ----------
    compressed
        Whether they may be compressed, as in files that others made; :func:`write_arrays` never
        does so. Then they may take up to :data:`UNPACKED` times the bytes of the file, or
        :data:`UNPACKED_ANYWAY`. Otherwise they take no more bytes than the file has.

    Raises
    ------
    DamagedError
        If the file is not one of that kind, or not any more.
    OSError
        If it cannot be opened.
    """
    with open_to_read(path) as file:
        try:
            with zipfile.ZipFile(file) as container:
                members = container.infolist()
                _check_claims(members, os.fstat(file.fileno()).st_size, compressed)
                names = [member.filename.removesuffix(".npy") for member in members]
                if len(set(names)) < len(names):
                    raise DamagedError("it has one name for two arrays")
                arrays = [_read_member(container, member) for member in members]
                return dict(zip(names, arrays, strict=True))
        except _UNREADABLE as error:
            raise DamagedError(
                f"{path} is not a file of arrays, or is damaged: {error or type(error).__name__}."
            ) from error


UNPACKED = 100
"""How many times its own size a compressed file of arrays may become."""
UNPACKED_ANYWAY = 16 * 2**20
"""How many bytes a compressed file of arrays may become, however small it is."""


def _check_claims(members: list[zipfile.ZipInfo], size: int, compressed: bool) -> None:
    """Refuse a container whose members cannot, or must not, be as large as it says."""
    kinds = {member.compress_type for member in members}
    if not kinds <= {zipfile.ZIP_STORED, *([zipfile.ZIP_DEFLATED] if compressed else [])}:
        raise DamagedError("it is compressed in a way that is not supported")
    packed = zipfile.ZIP_DEFLATED in kinds
    limit = max(UNPACKED * size, UNPACKED_ANYWAY) if packed else size
    claimed = sum(member.file_size for member in members)
    # Members that share their bytes would be unpacked more than once.
    if claimed > limit or sum(member.compress_size for member in members) > size:
        advice = "; store it without compression" if packed else ""
        raise DamagedError(f"it claims to hold {claimed} bytes of arrays{advice}")


def _read_member(container: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with container.open(member) as file:
        dtype, shape, fortran_order = _read_header(file)
        # Before memory is allocated.
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise DamagedError(f"{member.filename} has not the size of an array of shape {shape}")
        array = np.empty(shape[::-1] if fortran_order else shape, dtype)
        content = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(content), _PORTION):
            portion = content[start : start + _PORTION]
            # Fails unless the length is right.
            portion[:] = file.read(len(portion))
    _check_elements(member.filename, array)
    return array.T if fortran_order else array


def _read_header(file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], bool]:
    start = file.read(8)
    length_format = _HEADER_LENGTHS.get(start)
    if length_format is None:
        raise DamagedError("it holds something else than arrays of NumPy")
    (length,) = struct.unpack(length_format, file.read(struct.calcsize(length_format)))
    if length > _LONGEST_HEADER:
        raise DamagedError(f"the header of an array has {length} bytes")
    header = file.read(length)
    found = _HEADER.fullmatch(header)
    if found is None or None in found.groups():
        raise DamagedError(f"an array is described as {header[:_SHOWN]!r}")
    descr, order, shape = (group.decode() for group in found.groups())
    sizes = tuple(int(size) for size in shape.replace(" ", "").split(",") if size)
    return np.dtype(descr), sizes, order == "True"


# How many bytes are read from a member at once.
_PORTION = 2**20
_LONGEST_HEADER = 10_000
_SHOWN = 100
_HEADER_LENGTHS = {b"\x93NUMPY\x01\x00": "<H", b"\x93NUMPY\x02\x00": "<I"}
# Those that have one size, not zero, on all machines, and are no references to objects.
_TYPE = re.compile(rb"[<>|=]?(?:b1|[iu][1248]|f[248]|c8|c16|U[1-9]\d{0,6})")
# NumPy evaluates this, which is a dict of Python. Here it is a text of a fixed form, so that there
# is nothing to evaluate. Nothing is tried twice ("+"), so that no header takes long.
_HEADER = re.compile(
    rb"\{ *+(?:(?:"
    rb"'descr': *+'(" + _TYPE.pattern + rb")'"
    rb"|'fortran_order': *+(True|False)"
    rb"|'shape': *+\(((?:\d{1,18} *+, *+)*+(?:\d{1,18} *+)?+)\)"
    rb") *+,?+ *+){3}\} *+\n?"
)


def _check_elements(name: str, array: np.ndarray) -> None:
    """Refuse bytes that are no values of their type, of which nobody knows what becomes."""
    if array.dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise DamagedError(f"{name} has truth values that are neither 0 nor 1")
    if array.dtype.kind == "U":
        codes = array.reshape(-1).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if np.any((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))):
            raise DamagedError(f"{name} has characters that are not Unicode")


# Whatever reading a container raises when bytes are wrong. Without MemoryError: of that much memory
# as a file has bytes, there really is not enough.
_UNREADABLE = (
    *(OSError, EOFError, KeyError, IndexError, TypeError, ValueError, NotImplementedError),
    *(RuntimeError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error),
)
