"""What an experiment is: units of work, the sizes they come in, and what is made of their results.

An experiment is a grid of data sets, methods and seeds. Each point of it is a :class:`Unit`, which
is computed by itself (:mod:`rvrs.experiments.runner`) and stored by itself
(:mod:`rvrs.experiments.store`). Figures and tables are made from what is stored, by
:mod:`rvrs.experiments.report`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rvrs.baselines.task import DivergedError as DivergedError
from rvrs.baselines.task import Report as Report

PresetName = Literal["quick", "cpu", "paper"]
"""``quick`` shows that it runs; ``cpu`` takes minutes to hours on two cores and has the paper's
conclusions in reach; ``paper`` has the full counts."""


class Unit(NamedTuple):
    """One computation, whose result is stored by itself."""

    experiment: str
    dataset: str
    method: str
    seed: int


class Outcome(NamedTuple):
    """What a unit has found."""

    figures: dict[str, Any]
    """Numbers, words, and lists of them: what JSON can hold. NaN and infinities are not allowed."""
    arrays: Mapping[str, np.ndarray] = {}
    """What other units need of this one (see :attr:`Experiment.reference`)."""


class Result(NamedTuple):
    """A unit's result, as it is stored."""

    unit: Unit
    figures: dict[str, Any]
    """Those of the outcome; empty if the unit failed."""
    failure: str | None
    """Why the unit failed, if it did."""
    seconds: float
    """Wall time of the whole unit."""


class Claim(NamedTuple):
    """A statement of the paper beside what was measured."""

    statement: str
    measured: str
    holds: bool | None
    """None if the stored results do not tell."""


@dataclass(frozen=True)
class Preset:
    """The size of an experiment."""

    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    num_seeds: int
    settings: Mapping[str, Any]
    """What JSON can hold; every unit is given them, and they are stored with its result."""


@dataclass(frozen=True)
class Experiment:
    """A figure or a table of the paper."""

    name: str
    """As users write it: ``rvrs reproduce NAME``."""
    title: str
    """With the number of the figure or table of the paper."""
    datasets: tuple[str, ...]
    """All that it can be asked for."""
    methods: tuple[str, ...]
    """All that it can be asked for."""
    presets: Mapping[str, Preset]
    run: Callable[..., Outcome]
    """``(unit, settings, arrays of the reference, report) -> outcome``. Pure but for the report:
    the same unit and settings give the same outcome, up to times. Also ``checkpoint=``, a file, if
    the experiment ``checkpoints``."""
    plot: Callable[[Sequence[Result], Path], list[Path]]
    """``(results, folder) -> files``: draws what the results allow to be drawn."""
    tables: Callable[[Sequence[Result]], str]
    """Markdown: the figures with their errors."""
    claims: Callable[[Sequence[Result]], list[Claim]]
    reference: str | None = None
    """A method that all others of the same data set are compared with: its seed 0 runs first, and
    they are given its arrays."""
    checkpoints: bool = False
    """Whether ``run`` stores what it has so far in a file, and goes on from it if it is there. The
    file is deleted when the unit's result is stored."""
    revision: int = field(default=1)
    """Raised when a change of the code makes earlier results incomparable."""
