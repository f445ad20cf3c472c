"""Models and data in a user's files, for ``rvrs fit``.

A model is a function in a Python file; data are the columns of a CSV file or the arrays of an
``.npz`` file. They meet by name, see :func:`arguments`.
"""

import array
import csv
import inspect
import io
import math
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rvrs import files
from rvrs.core.arguments import shown

ALL_COLUMNS = "data"
"""A parameter of this name gets a dict of all columns, unless a column has that name."""

# Whole numbers beyond this have no place in JAX's 32-bit integers: they become floats.
_LARGEST_INTEGER = 2**31 - 1
_MODULE = "rvrs_user_model"


class UserFileError(Exception):
    """Something is wrong with a user's file; the message is one line that says what and where."""


def load_model(path: Path, name: str = "model") -> Callable[..., Any]:
    """Run a Python file and return its function ``name``.

    Modules beside the file can be imported by it, as if it were run by ``python``.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserFileError(f"cannot read {path}: {error.strerror}.") from error
    module = types.ModuleType(_MODULE)
    module.__file__ = str(path)
    # Where e.g. dataclasses look for the module of a class.
    sys.modules[_MODULE] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        place = f"{error.filename or path}, line {error.lineno}"
        raise UserFileError(f"{place}: {_one_line(error.msg)}.") from error
    # A file can end in whatever way it likes, sys.exit included.
    except (Exception, SystemExit) as error:
        raise UserFileError(f"{describe(error, path)}.") from error
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise UserFileError(f"{path}: {name!r} is not a function but {type(function).__name__}.")
    functions = [
        key for key, value in vars(module).items() if getattr(value, "__module__", "") == _MODULE
    ]
    known = f"it has {', '.join(functions)}; name one with --model" if functions else "it has none"
    raise UserFileError(f"{path} has no function {name!r}: {known}.")


def describe(error: BaseException, path: Path) -> str:
    """An exception in one line, with the line of the user's file that it came from."""
    line = line_of(error, path)
    place = str(path) if line is None else f"{path}, line {line}"
    message = _one_line(str(error))
    return f"{place}: {type(error).__name__}{': ' if message else ''}{message}".rstrip(".")


def line_of(error: BaseException, path: Path) -> int | None:
    """The line of the user's file where an exception came from; None if from elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def _one_line(text: str) -> str:
    """The first line that says anything; JAX adds pages of advice."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def read_data(path: Path) -> dict[str, np.ndarray]:
    """The columns of a ``.csv`` file, or the arrays of an ``.npz`` file, by name.

    A CSV file is comma-separated UTF-8 with the names of its columns in the first line and finite
    numbers in all others. A column of whole numbers becomes an array of integers, so that it can
    be used as an index. Arrays must be finite numbers too; those without axes become numbers.
    """
    readers = {".csv": _read_csv, ".npz": _read_npz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserFileError(f"{path} is neither a .csv nor an .npz file.")
    try:
        return reader(path)
    except OSError as error:
        raise UserFileError(f"cannot read {path}: {error.strerror or error}.") from error


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    # With the mark that spreadsheets put in front of UTF-8, if there is one.
    with io.TextIOWrapper(
        io.BufferedReader(files.open_to_read(path)), encoding="utf-8-sig", newline=""
    ) as file:
        reader = csv.reader(file, strict=True)
        try:
            return _read_table(path, ((reader.line_num, row) for row in reader))
        except csv.Error as error:
            raise UserFileError(f"{path}, line {reader.line_num}: {error}.") from error
        except UnicodeDecodeError as error:
            raise UserFileError(f"{path} is not UTF-8 text; store it as CSV in UTF-8.") from error


def _read_table(path: Path, lines: Iterator[tuple[int, list[str]]]) -> dict[str, np.ndarray]:
    lines = _without_empty_end(lines)
    _, header = next(lines, (1, None))
    if header is None:
        raise UserFileError(f"{path} is empty; its first line must hold the names of the columns.")
    names = _column_names(path, header)
    # Eight bytes for every number while the table is read: cells of text would take ten times that.
    columns = [array.array("d") for _ in names]
    whole = [True] * len(names)
    line = 0
    for line, row in lines:
        if len(row) != len(names):
            raise UserFileError(
                f"{path}, line {line}: {len(row)} values instead of {len(names)}, the number of "
                "columns."
            )
        for index, (name, cell) in enumerate(zip(names, row, strict=True)):
            try:
                value, is_whole = _parse(cell)
            except ValueError as error:
                place = f"{path}, line {line}, column {name!r}"
                raise UserFileError(f"{place}: {error}.") from None
            columns[index].append(value)
            whole[index] &= is_whole
    if not line:
        raise UserFileError(f"{path} has names of columns but no rows.")
    return {
        name: np.array(column, np.int32 if integers else np.float64)
        for name, column, integers in zip(names, columns, whole, strict=True)
    }


def _without_empty_end(
    lines: Iterator[tuple[int, list[str]]],
) -> Iterator[tuple[int, list[str]]]:
    """All but the empty lines at the end; of several in between, only the first is needed."""
    empty = None
    for line, row in lines:
        if any(cell.strip() for cell in row):
            if empty is not None:
                yield empty
            empty = None
            yield line, row
        elif empty is None:
            empty = line, row


def _column_names(path: Path, header: list[str]) -> list[str]:
    names = [cell.strip() for cell in header]
    if len(names) == 1 and any(separator in names[0] for separator in ";\t"):
        raise UserFileError(
            f"{path} has a single column {shown(names[0])}; separate columns by commas."
        )
    if not names:
        raise UserFileError(f"{path}, line 1 is empty; it must hold the names of the columns.")
    known = set()
    for position, name in enumerate(names, start=1):
        if not name:
            raise UserFileError(f"{path}, line 1: column {position} has no name.")
        if _is_number(name):
            raise UserFileError(
                f"{path}, line 1: {shown(name)} is a number; the first line must hold the names of "
                "the columns."
            )
        if name in known:
            raise UserFileError(f"{path}, line 1: two columns are called {shown(name)}.")
        known.add(name)
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse(cell: str) -> tuple[float, bool]:
    """The number in a cell, and whether it is written as a whole number."""
    text = cell.strip()
    if not text:
        raise ValueError("the value is missing")
    # Python reads 1_000 as a number, which is more likely to be a mistake in a table.
    if not _is_number(text) or "_" in text:
        raise ValueError(f"{shown(text)} is not a number")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is not a finite number")
    return value, text.lstrip("+-").isdecimal() and abs(value) <= _LARGEST_INTEGER


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        arrays = files.read_arrays(path, compressed=True)
    except files.DamagedError as error:
        raise UserFileError(
            f"{path} is not an .npz file of plain arrays, or is damaged ({error})."
        ) from error
    if not arrays:
        raise UserFileError(f"{path} holds no arrays.")
    for name, found in arrays.items():
        if found.dtype.kind not in "biuf":
            raise UserFileError(
                f"{path}: array {shown(name)} holds {found.dtype} instead of real numbers."
            )
        if not np.isfinite(found).all():
            raise UserFileError(f"{path}: array {shown(name)} has values that are not finite.")
    # Numbers are mostly sizes, which have to be known when a model is compiled. JAX takes no
    # arrays of another machine's byte order.
    return {
        name: found.item()
        if found.ndim == 0
        else found.astype(found.dtype.newbyteorder("="), copy=False)
        for name, found in arrays.items()
    }


class ModelArguments(NamedTuple):
    """The arguments that a model is called with, and how they came about."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: tuple[str, ...]
    """Parameters that get data."""
    defaulted: tuple[str, ...]
    """Parameters that keep their defaults."""
    unused: tuple[str, ...]
    """Columns that no parameter takes."""


def arguments(
    model: Callable[..., Any], columns: Mapping[str, Any] | None, source: str
) -> ModelArguments:
    """Match the parameters of a model with columns.

    - A parameter that is named like a column gets that column, as an array.
    - A parameter ``data`` gets a dict of all columns, unless a column is called so.
    - Any other parameter keeps its default; without one that is an error.

    Parameters
    ----------
    columns
        Columns by name, or None where there is no data file.
    source
        What the columns are from, for messages.
    """
    taken = {name: _as_argument(name, value) for name, value in (columns or {}).items()}
    args, kwargs, given, defaulted = [], {}, [], []
    for parameter in _parameters(model):
        name = parameter.name
        if name in taken:
            value = taken[name]
        elif name == ALL_COLUMNS and columns is not None:
            value = dict(taken)
        elif parameter.default is not parameter.empty:
            defaulted.append(name)
            continue
        elif columns is None:
            raise UserFileError(f"the model's parameter {name!r} needs data; pass --data FILE.")
        else:
            raise UserFileError(
                f"the model's parameter {name!r} is no column of {source}, which has "
                f"{', '.join(columns)}; rename it, give it a default, or call it {ALL_COLUMNS!r} "
                "to get a dict of all columns."
            )
        given.append(name)
        if parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(value)
        else:
            kwargs[name] = value
    if columns is not None and not given:
        raise UserFileError(
            f"the model takes nothing from {source}: none of its parameters "
            f"({', '.join(defaulted) or 'it has none'}) is one of the columns {', '.join(columns)}."
        )
    unused = [name for name in taken if name not in given and ALL_COLUMNS not in given]
    return ModelArguments(tuple(args), kwargs, tuple(given), tuple(defaulted), tuple(unused))


def _parameters(model: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(model).parameters.values():
        # Further arguments, *args and **kwargs, get nothing.
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield parameter


def _as_argument(name: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    # JAX's precision, 32 bits unless the user's file asked for more.
    kind = jax.dtypes.canonicalize_dtype(value.dtype)
    if kind.kind in "iu" and np.any(value != value.astype(kind)):
        value, kind = value.astype(np.float64), jax.dtypes.canonicalize_dtype(np.float64)
    with np.errstate(over="ignore"):
        converted = value.astype(kind)
    if not np.isfinite(converted).all():
        raise UserFileError(
            f"array {shown(name)} has values that are too large for {kind}; scale them."
        )
    return jnp.asarray(converted)
