"""What a benchmark has found: rows of figures, as a table and as JSON."""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rvrs import storage

if TYPE_CHECKING:
    from rich.console import Console

Figure = float | int | str | None


class Row(NamedTuple):
    """What was found about one contestant at one work."""

    work: str
    contestant: str
    figures: dict[str, Figure]
    """By name; None if there is none."""


class Suite(NamedTuple):
    """The result of a suite of benchmarks."""

    name: str
    title: str
    notes: str
    """What the figures mean, and what was left out."""
    rows: list[Row]


def show(console: "Console", suite: Suite) -> None:
    """Print tables of all rows, with a column for every figure, and the notes.

    Works that have other figures than those before them begin another table.
    """
    from rich.table import Table

    table, before = None, None
    for work, group in groupby(suite.rows, lambda row: row.work):
        rows = list(group)
        names = list(dict.fromkeys(name for row in rows for name in row.figures))
        if table is None or names != before:
            if table is not None:
                console.print(table)
            table = Table(title=suite.title)
            table.add_column("work", max_width=20)
            table.add_column("contestant", max_width=24)
            for name in names:
                table.add_column(name, justify="right")
        before = names
        for number, row in enumerate(rows):
            figures = [_formatted(row.figures.get(name)) for name in names]
            table.add_row("" if number else work, row.contestant, *figures)
        table.add_section()
    if table is not None:
        console.print(table)
    if suite.notes:
        console.print(suite.notes, highlight=False, markup=False)


# Beyond these, a number is easier to read in powers of ten.
_LARGEST, _SMALLEST = 1e6, 1e-3


def _formatted(figure: Figure) -> str:
    if figure is None:
        return ""
    if isinstance(figure, str):
        return figure
    if isinstance(figure, int):
        return f"{figure:,}"
    if not math.isfinite(figure):
        return str(figure)
    if figure and not _SMALLEST <= abs(figure) < _LARGEST:
        return f"{figure:.2e}"
    # Three digits, but no fewer than a whole number has.
    digits = 2 if not figure else max(0, 2 - math.floor(math.log10(abs(figure))))
    return f"{figure:,.{min(digits, 4)}f}"


def write(path: str | PathLike[str], suites: Sequence[Suite]) -> None:
    """Write all suites to a JSON file, with what they ran on; the file is whole at any time."""
    path = Path(path)
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": storage.versions(),
        "cores": os.cpu_count(),
        "suites": [
            suite._asdict() | {"rows": [_plain(row) for row in suite.rows]} for suite in suites
        ],
    }
    text = json.dumps(found, indent=1, allow_nan=False)
    storage.check_writable(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(path)


def _plain(row: Row) -> dict[str, Any]:
    """A row as JSON can hold it, which has no infinite numbers."""
    figures = {
        name: str(figure) if isinstance(figure, float) and not math.isfinite(figure) else figure
        for name, figure in row.figures.items()
    }
    return row._asdict() | {"figures": figures}
