"""Figures and a Markdown page of what is stored: no experiment is run for it."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from rvrs import files
from rvrs.experiments import _seeds, catalogue
from rvrs.experiments.experiment import Claim, Experiment, Result
from rvrs.experiments.store import Record, Store, differences


class _Part(NamedTuple):
    """What the page says of one experiment."""

    experiment: Experiment
    records: list[Record]
    """At least one; all of the same origin."""
    claims: list[Claim]

    @property
    def results(self) -> list[Result]:
        return [record.result for record in self.records]


def write(folder: Path, *, page: Path | None = None) -> Path:
    """Draw the figures of all results in a folder, and write a page about them.

    Parameters
    ----------
    folder
        That of a :class:`~rvrs.experiments.store.Store`. The figures go into its ``figures``.
    page
        The Markdown file to write, by default ``report.md`` in the folder.

    Returns
    -------
    The page.

    Raises
    ------
    FileNotFoundError
        If the folder has no results.
    ValueError
        If a file is damaged, or the results of an experiment were not all made with the same
        settings and versions.
    """
    folder = Path(folder)
    page = folder / "report.md" if page is None else Path(page)
    # All are read before the first is drawn: a page is whole or not begun.
    parts = _parts(Store(folder))
    page.parent.mkdir(parents=True, exist_ok=True)
    blocks = ["# Experiments of the paper, and what was measured", *_summary(parts)]
    for part in parts:
        blocks += _section(part, folder / "figures", page)
    files.write_text(page, "\n\n".join(blocks) + "\n")
    return page


def _parts(store: Store) -> list[_Part]:
    """The experiments that have results, in the order of the paper."""
    found = {name: catalogue.get(name) for name in store.experiments()}
    if not found:
        raise FileNotFoundError(f"there are no results in {store.folder}; run an experiment.")
    parts = []
    for name in sorted(found, key=list(catalogue.NAMES).index):
        records = store.records(name)
        _check_same_origin(store, records)
        claims = found[name].claims([record.result for record in records])
        parts.append(_Part(found[name], records, claims))
    return parts


def _check_same_origin(store: Store, records: Sequence[Record]) -> None:
    # Not compared with what is installed here: a page may be made on another machine.
    first = records[0]
    for record in records[1:]:
        found = differences(first.origin, record.origin)
        if found:
            paths = (store.path(each.result.unit) for each in (first, record))
            raise ValueError(
                "{} and {} were made with different things (first -> second): {}. Results are not "
                "mixed: keep each kind in a folder of its own.".format(*paths, "; ".join(found))
            )


def _summary(parts: Sequence[_Part]) -> list[str]:
    rows = [[part.experiment.name, *_cells(claim)] for part in parts for claim in part.claims]
    verdicts = [row[-1] for row in rows]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in _VERDICTS.values())
    if not rows:
        return ["No claim of the paper can be compared with these results."]
    return [
        f"Claims of the paper, and whether they hold here: {counts}.",
        _table(["experiment", *_CLAIM_HEADINGS], rows),
    ]


_CLAIM_HEADINGS = ("the paper says", "measured", "holds")
_VERDICTS = {True: "yes", False: "NO", None: "cannot tell"}


def _cells(claim: Claim) -> list[str]:
    return [claim.statement, claim.measured, _VERDICTS[claim.holds]]


def _section(part: _Part, figures: Path, page: Path) -> list[str]:
    blocks = [f"## {part.experiment.title}", _how_it_was_run(part)]
    failures = _seeds.failures(part.results)
    if failures:
        blocks.append(failures.strip())
    if part.claims:
        blocks.append(_table(_CLAIM_HEADINGS, map(_cells, part.claims)))
    if not _seeds.datasets(part.results):
        return [*blocks, "No unit has succeeded: there is nothing to show."]
    # Tables may end with the failures, which are above.
    tables = part.experiment.tables(part.results).removesuffix(failures).strip()
    figures.mkdir(parents=True, exist_ok=True)
    with files.locked(figures), files.together(figures) as folder:
        names = [path.relative_to(folder) for path in part.experiment.plot(part.results, folder)]
    return [*blocks, *filter(None, [tables]), *(_link(figures / name, page) for name in names)]


def _how_it_was_run(part: _Part) -> str:
    origin, results = part.records[0].origin, part.results
    failed = sum(result.failure is not None for result in results)
    machines = sorted({_words(record.machine) for record in part.records})
    return "\n".join(
        [
            f"- Experiment: {part.experiment.name}, revision {origin.revision}",
            f"- Preset: {origin.preset}",
            f"- Settings: {_words(origin.settings)}",
            f"- Versions: {', '.join(f'{name} {was}' for name, was in origin.versions.items())}",
            f"- Machine: {'; '.join(machines)}",
            f"- Units: {len(results)}, of which {failed} failed",
            f"- Seconds, summed over units: {sum(result.seconds for result in results):.0f}",
        ]
    )


def _words(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} = {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Words that do not end their cell."""
    return " ".join(text.replace("|", r"\|").split())


def _link(figure: Path, page: Path) -> str:
    relative = Path(os.path.relpath(figure, page.parent)).as_posix()
    return f"![{figure.stem}]({quote(relative)})"
