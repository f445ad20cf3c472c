"""Results of experiments in files: one JSON file per unit, whole at any time.

The file of a unit is ``<folder>/<experiment>/<dataset>/<method>/seed-<k>.json``. It holds the
figures and what they were made with: preset, settings, revision of the experiment, versions and
machine. Arrays that other units need are in ``seed-<k>.npz`` beside it, which is written first;
``seed-<k>.checkpoint.npz`` is a unit under way.
"""

import json
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rvrs import files, storage
from rvrs.core.arguments import shown
from rvrs.experiments.experiment import Experiment, Result, Unit

_FORMAT = "rvrs-result"
_VERSION = 1
# Beyond those that every fit depends on; what is not installed is left out.
_PACKAGES = ("jaxlib", "scipy", "flowjax", "POT")
# Names become folders: none of these can lead out of the store, or hide.
_NAME = re.compile(r"[A-Za-z0-9_@-][A-Za-z0-9._@-]*")
_FILE = re.compile(r"seed-(0|[1-9][0-9]*)\.json")


class Origin(NamedTuple):
    """What a result was made with; results of different origins are not comparable."""

    preset: str
    settings: dict[str, Any]
    revision: int
    versions: dict[str, str]


class Record(NamedTuple):
    """A unit's file."""

    result: Result
    origin: Origin
    machine: dict[str, Any]
    finished: str
    """UTC, ISO 8601."""


def versions() -> dict[str, str]:
    """Versions of Python and the packages that an experiment's result depends on."""
    found = storage.versions()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Where this process runs."""
    return {"platform": platform.platform(), "cores": os.cpu_count()}


def origin(experiment: Experiment, preset: str, settings: Mapping[str, Any]) -> Origin:
    """What results are made with here and now."""
    # As it will be read: JSON has lists for tuples.
    plain = json.loads(json.dumps(dict(settings), allow_nan=False))
    return Origin(preset, plain, experiment.revision, versions())


def differences(there: Origin, here: Origin) -> list[str]:
    """``name: there -> here`` for everything in which two origins differ."""
    found = []
    for part, was, present in zip(Origin._fields, there, here, strict=True):
        if isinstance(was, dict) and isinstance(present, dict):
            found += [
                f"{name} of the {part}: {was.get(name)!r} -> {present.get(name)!r}"
                for name in storage.differences(was, present)
            ]
        elif was != present:
            found.append(f"{part}: {was!r} -> {present!r}")
    return found


class Store:
    """A folder of results."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, unit: Unit) -> Path:
        """The file of a unit, which need not exist."""
        for name in unit[:3]:
            _check_name(name)
        if not isinstance(unit.seed, int) or isinstance(unit.seed, bool) or unit.seed < 0:
            raise ValueError(f"a seed must be a whole number of at least 0, got {unit.seed!r}.")
        folder = self.folder / unit.experiment / unit.dataset / unit.method
        return folder / f"seed-{unit.seed}.json"

    def checkpoint(self, unit: Unit) -> Path:
        """Where a unit under way is stored, if its experiment does so."""
        return self.path(unit).with_suffix(".checkpoint.npz")

    def has(self, unit: Unit) -> bool:
        """Whether there is a result, be it a failure."""
        return self.path(unit).is_file()

    @contextmanager
    def held(self, experiment: str) -> Iterator[None]:
        """Keep other processes from storing results of an experiment.

        What killed ones have left is removed: parts of files, and checkpoints of units that were
        stored.
        """
        _check_name(experiment)
        folder = self.folder / experiment
        folder.mkdir(parents=True, exist_ok=True)
        with files.locked(folder, "*/*/seed-*"):
            for unit in self._units(experiment):
                spent = self.checkpoint(unit)
                if spent.is_file() and self.read(unit).result.failure is None:
                    spent.unlink()
            yield

    def read(self, unit: Unit) -> Record:
        """The file of one unit."""
        path = self.path(unit)
        try:
            content = files.parse_json(files.read_bytes(path))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no result {path}; run its experiment.") from None
        except files.DamagedError:
            raise _unusable(path, "is truncated, damaged or not JSON") from None
        if not _is_finite(content):
            raise _unusable(path, "has numbers that are not finite, so it is not JSON")
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise _unusable(path, "is not a result of rvrs")
        if content.get("version") != _VERSION:
            was = shown(content.get("version"))
            raise _unusable(path, f"has version {was} of the format, this is version {_VERSION}")
        try:
            record = _record(content)
        except (KeyError, TypeError):
            raise _unusable(path, "lacks what a result has") from None
        if record.result.unit != unit:
            was = shown(tuple(record.result.unit))
            raise _unusable(path, f"holds the result of another unit, {was}")
        return record

    def experiments(self) -> list[str]:
        """The names of the experiments that have results."""
        return sorted({path.parts[-4] for path in self.folder.glob("*/*/*/seed-*.json")})

    def records(self, experiment: str) -> list[Record]:
        """All files of an experiment, by data set, method and seed."""
        return [self.read(unit) for unit in self._units(experiment)]

    def load(self, experiment: str) -> list[Result]:
        """All results of an experiment, by data set, method and seed."""
        return [record.result for record in self.records(experiment)]

    def arrays(self, unit: Unit) -> dict[str, np.ndarray] | None:
        """The arrays of a unit; None if it is not stored, has failed, or they are not there."""
        path = self.path(unit).with_suffix(".npz")
        if not path.is_file() or not self.has(unit) or self.read(unit).result.failure is not None:
            return None
        try:
            return files.read_arrays(path)
        except files.DamagedError:
            raise _unusable(path, "is truncated or damaged") from None

    def check(self, experiment: Experiment, preset: str, settings: Mapping[str, Any]) -> None:
        """Refuse to add to results that were made with anything else: they are never mixed."""
        here = origin(experiment, preset, settings)
        for record in self.records(experiment.name):
            found = differences(record.origin, here)
            if found:
                raise ValueError(
                    f"{self.folder / experiment.name} has results that were made with something "
                    f"else (there -> here): {'; '.join(found)}. Results are not mixed: choose "
                    "another --out."
                )

    def write(
        self,
        result: Result,
        origin: Origin,
        *,
        arrays: Mapping[str, np.ndarray] | None = None,
        machine: Mapping[str, Any],
    ) -> Result:
        """Store a result, and return it as it is stored.

        One whose figures are not finite is stored as a failure.
        """
        result = _checked(result)
        path = self.path(result.unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = dict(arrays or {}) if result.failure is None else {}
        if kept:
            files.write_arrays(path.with_suffix(".npz"), kept)
        content = _content(result, origin, machine)
        text = json.dumps(content, indent=1, allow_nan=False)
        files.write_text(path, f"{text}\n")
        if not kept:
            # Of an earlier result of the same unit.
            path.with_suffix(".npz").unlink(missing_ok=True)
        return result

    def _units(self, experiment: str) -> Iterator[Unit]:
        _check_name(experiment)
        found = []
        for path in self.folder.glob(f"{experiment}/*/*/seed-*.json"):
            match = _FILE.fullmatch(path.name)
            if match is None:
                raise _unusable(path, "has a name that rvrs does not give")
            dataset, method = path.parts[-3:-1]
            found.append(Unit(experiment, dataset, method, int(match[1])))
        yield from sorted(found)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot be the name of an experiment, a data set or a method: use letters, "
            "digits, '.', '-', '_' and '@', not starting with '.'."
        )


def _content(result: Result, origin: Origin, machine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "unit": result.unit._asdict(),
        **origin._asdict(),
        "machine": dict(machine),
        "status": "done" if result.failure is None else "failed",
        "figures": result.figures,
        "failure": result.failure,
        "seconds": float(result.seconds),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _record(content: dict[str, Any]) -> Record:
    """What :func:`_content` made; anything else raises a KeyError or TypeError."""

    def field(name: str, *kinds: type) -> Any:
        if not isinstance(content[name], kinds):
            raise TypeError(name)
        return content[name]

    failure = field("failure", str, type(None))
    if field("status", str) != ("done" if failure is None else "failed"):
        raise TypeError("status")
    return Record(
        Result(
            Unit(**field("unit", dict)), field("figures", dict), failure, field("seconds", float)
        ),
        Origin(
            *(field("preset", str), field("settings", dict)),
            *(field("revision", int), field("versions", dict)),
        ),
        field("machine", dict),
        field("finished", str),
    )


def _checked(result: Result) -> Result:
    """The result with figures of plain Python; a failure if some are not finite."""
    if result.failure is not None:
        return result._replace(figures={})
    try:
        figures = json.loads(json.dumps(result.figures, default=_plain))
    except TypeError as error:
        return result._replace(figures={}, failure=f"TypeError: {error}")
    bad = [name for name, value in figures.items() if not _is_finite(value)]
    if bad:
        return result._replace(figures={}, failure=f"figures are not finite: {', '.join(bad)}")
    return result._replace(figures=figures)


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and JAX."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"figures must be numbers, words and lists of them, got {value!r}.")


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _unusable(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} {problem}; delete it and run its experiment again.")
