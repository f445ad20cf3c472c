"""Contestants that take training steps on the same work, and what their steps cost."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rvrs.bench.report import Figure, Row
from rvrs.bench.timing import Contestant, interleaved, median_ratio


class Entry(NamedTuple):
    """A contestant of a work."""

    contestant: Contestant
    num_steps: int
    """Steps that it takes in a turn."""
    over: Mapping[str, str]
    """By the heading of a column: the contestant whose steps its own are compared with. Of the
    first of them, the quartiles are told as well."""
    proposals: float | None = None
    """Proposals per step and target."""
    draws: float | None = None
    """Draws per step and target that these are for, if it is always the same number."""


def contest(work: str, entries: Mapping[str, Entry], *, repeats: int) -> list[Row]:
    """A row for every contestant: ratios of the time of its step to the steps of others."""
    times = interleaved(
        {name: entry.contestant for name, entry in entries.items()}, repeats=repeats
    )
    steps = {
        name: [seconds / entry.num_steps for seconds in times[name]]
        for name, entry in entries.items()
    }
    rows = []
    for name, entry in entries.items():
        figures: dict[str, Figure] = {}
        for heading, other in entry.over.items():
            ratio = median_ratio(steps[name], steps[other])
            quartiles = {"lower quartile": ratio.low, "upper quartile": ratio.high}
            figures |= {heading: ratio.value} | (quartiles if not figures else {})
        figures["proposals per step"] = entry.proposals
        figures["proposals per draw"] = (
            None
            if entry.proposals is None or entry.draws is None
            else entry.proposals / entry.draws
        )
        figures["µs per step"] = float(np.median(steps[name]) * 1e6)
        rows.append(Row(work, name, figures))
    return rows
