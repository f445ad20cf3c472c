"""Fits in files: one ``.npz`` of plain arrays and a JSON header, nothing that could run.

The header says what the file is, which versions and settings made it, and which model and data it
belongs to. A digest over everything tells a damaged or changed file. The format is described in
docs/formats.md.
"""

import hashlib
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rvrs import files
from rvrs.core.arguments import shown
from rvrs.core.problem import PyTree

_FORMAT = "rvrs-fit"
_VERSION = 1
_HEADER = "header"
_PACKAGES = ("rvrs", "jax", "numpyro", "numpy", "optax")


class CheckpointError(ValueError):
    """A file that cannot be gone on with: damaged, or of something else."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A fit, finished or not, as it is stored."""

    header: dict[str, Any]
    """Settings, identity of model and data, and once finished the figures; JSON."""
    arrays: dict[str, np.ndarray]


def versions() -> dict[str, str]:
    """Versions of Python and the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree without installation
            found[package] = "unknown"
    return found


def write(path: str | PathLike[str], checkpoint: Checkpoint) -> None:
    """Store a checkpoint; the file is whole at any time, the old one or the new one."""
    path = Path(path)
    header = {"format": _FORMAT, "version": _VERSION} | checkpoint.header
    header["digest"] = _digest(header, checkpoint.arrays)
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    arrays = {_HEADER: text} | checkpoint.arrays
    try:
        files.write_arrays(path, arrays)
    except FileNotFoundError:
        raise _no_folder(path) from None


def check_writable(path: str | PathLike[str]) -> None:
    """Refuse a path that :func:`write` could not write to."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise _no_folder(path)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise type(error)(f"cannot write {path}: {error.strerror}.") from None


def _no_folder(path: Path) -> FileNotFoundError:
    return FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist.")


def read(path: str | PathLike[str]) -> Checkpoint:
    """Read a checkpoint; nothing in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; check the path.")
    try:
        arrays = files.read_arrays(path)
    except files.DamagedError as error:
        raise _damaged(path) from error
    if _HEADER not in arrays:
        raise _not_ours(path)
    try:
        header = files.parse_json(arrays.pop(_HEADER).tobytes())
    except files.DamagedError as error:
        raise _damaged(path) from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise _not_ours(path)
    if header.get("version") != _VERSION:
        versions = header.get("versions")
        wrote = versions.get("rvrs", "") if isinstance(versions, dict) else ""
        raise CheckpointError(
            f"{path} has version {shown(header.get('version'))} of the format, this is version "
            f"{_VERSION}; use the rvrs {wrote} that wrote it."
        )
    digest = header.pop("digest", None)
    if digest != _digest(header, arrays):
        raise _damaged(path)
    # Whoever means harm computes the digest anew.
    wrong = _wrong_fields(header, arrays)
    if wrong:
        raise CheckpointError(
            f"{path} lacks what a file of rvrs has, or has something else in its place: "
            f"{', '.join(wrong)}; fit again or use a copy."
        )
    return Checkpoint(header, arrays)


def _wrong_fields(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[str]:
    """Names of fields that are not as docs/formats.md says; others than those may be there."""
    wrong = _wrong("", header, {name: _FIELDS[name] for name in _FIELDS.keys() & header.keys()})
    if wrong:
        return wrong
    required: set[str] = set()
    if "num_steps" in header or header.get("kind") == "vae":  # a run, finished or not
        required |= {"steps_done"}
    if "figures" in header:
        semi = header.get("guide") == "AutoSemiRVRS"
        required |= {"steps_done", "settings"}
        required |= {"batch_size", "learning_rate"} if semi else {"proposal"}
        figures = _SEMI_FIGURES if semi else _FIGURES
        wrong += _wrong("figures: ", header["figures"], figures)
        wrong += [f"figures: {name}" for name in header["figures"].keys() - figures.keys()]
        if not semi:
            settings = {"target_acceptance": _is_number}
            wrong += _wrong("settings: ", header.get("settings", {}), settings)
    steps = header.get("steps_done")
    # No more is made of what a file says than there is in it.
    if steps is not None and not any(array.shape == (steps,) for array in arrays.values()):
        wrong.append("steps_done")
    return sorted(set(wrong) | (required - header.keys()))


def _wrong(
    prefix: str, entries: dict[str, Any], fields: dict[str, Callable[[Any], bool]]
) -> list[str]:
    return sorted(
        f"{prefix}{name}"
        for name, right in fields.items()
        if name not in entries or not right(entries[name])
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_two_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("proposal", "guide", "kind"), _is_text),
    **dict.fromkeys(("num_steps", "steps_done", "batch_size"), _is_count),
    **dict.fromkeys(("settings", "versions", "figures"), _is_object),
    "learning_rate": lambda value: value is None or _is_number(value),
}
_FIGURES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("elbo", "elbo_error", "log_evidence", "log_evidence_error"), _is_number),
    **dict.fromkeys(("acceptance", "threshold", "khat", "ess", "seconds"), _is_number),
    "num_draws": _is_count,
    "warnings": _are_texts,
}
_SEMI_FIGURES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("elbo", "elbo_error", "elbo_bias"), _is_number),
    **dict.fromkeys(("marginal_elbo", "marginal_elbo_error"), _is_number),
    **dict.fromkeys(("acceptance", "seconds"), _is_number),
    "acceptance_range": _are_two_numbers,
    "warnings": _are_texts,
}


def _not_ours(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a file of rvrs; pass what Fit.save or checkpoint= wrote."
    )


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated, damaged or was changed, or is not a file of rvrs; fit again or "
        "use a copy."
    )


def _digest(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(fingerprint(arrays[name]).encode())
    return digest.hexdigest()


def fingerprint(array: np.ndarray) -> str:
    """A digest of an array's type, shape and content."""
    array = np.ascontiguousarray(array)
    content = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    if array.size:
        # Not copied: it may be a memory map of more than fits into memory.
        content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def describe_arguments(arguments: Any) -> dict[str, str]:
    """What identifies a model's arguments, by their place."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        place = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array | np.ndarray):
            array = np.asarray(leaf)
            # Two models in x32 and x64 may be given the same data.
            described[place] = f"{array.dtype} {array.shape} {fingerprint(array)}"
        elif isinstance(leaf, bool | int | float | complex | str):
            described[place] = repr(leaf)
        else:
            described[place] = type(leaf).__qualname__
    return described


def differences(stored: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """The entries in which two descriptions differ."""
    names = sorted(set(stored) | set(present))
    return [name for name in names if stored.get(name) != present.get(name)]


def refuse_differences(
    path: str | PathLike[str], stored: dict[str, Any], present: dict[str, Any]
) -> None:
    """Refuse a file that was made with something else than what is present now."""
    found = []
    for part, description in present.items():
        was = stored.get(part)
        if isinstance(description, dict) and isinstance(was, dict):
            found += [f"{part}: {name}" for name in differences(was, description)]
        elif was != description:
            found.append(f"{part} ({shown(was)} there, {shown(description)} here)")
    if found:
        raise CheckpointError(
            f"{path} was made with something else; these differ: {'; '.join(found)}. Pass what the "
            "fit was made with."
        )


def to_arrays(prefix: str, tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves of a tree by names that start with ``prefix``."""
    return {
        f"{prefix}{jax.tree_util.keystr(path)}": np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def from_arrays(prefix: str, arrays: dict[str, np.ndarray], like: PyTree) -> PyTree:
    """The tree with the structure of ``like`` whose leaves were stored."""

    def leaf(path: Any, shape: Any) -> jax.Array:
        name = f"{prefix}{jax.tree_util.keystr(path)}"
        found = arrays.get(name)
        if found is None or found.shape != shape.shape or found.dtype != shape.dtype:
            raise CheckpointError(
                f"the file's {name} does not fit: "
                f"{'missing' if found is None else f'{found.dtype} {found.shape}'} instead of "
                f"{shape.dtype} {shape.shape}; was it made with another model or precision?"
            )
        return jax.numpy.asarray(found)

    return jax.tree_util.tree_map_with_path(leaf, like)
