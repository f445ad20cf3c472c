"""Times of contestants that take turns, and ratios of them.

On a shared machine a time of its own means little: whatever else runs slows a contestant down by
more than what is to be measured. Within a turn it slows all of them down alike, so that the ratio
of two times of the same turn means something, and the median of these ratios more.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rvrs.core.arguments import check_count

Contestant = Callable[[jax.Array], Any]
"""Takes a random key, does its whole work and returns the arrays that are its result."""


class Ratio(NamedTuple):
    """The ratio of two contestants' times."""

    value: float
    """The median of the ratios of all turns."""
    low: float
    """Their lower quartile."""
    high: float
    """Their upper quartile."""


def interleaved(contestants: Mapping[str, Contestant], *, repeats: int) -> dict[str, list[float]]:
    """Seconds that each contestant takes in each of ``repeats`` turns.

    A turn before the first one, which compiles, does not count. Every turn begins with another
    contestant, so that none of them always comes after the same one.
    """
    check_count("repeats", repeats)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for turn in range(repeats + 1):
        key = jax.random.key(turn)
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(contestants[name](key))
            if turn:
                times[name].append(time.perf_counter() - start)
        order = [*order[1:], *order[:1]]
    return times


def median_ratio(times: Sequence[float], reference_times: Sequence[float]) -> Ratio:
    """The ratio of times to those of a reference in the same turns."""
    if len(times) != len(reference_times) or not len(times):
        raise ValueError(
            f"times and reference_times must be of the same turns, at least one; got {len(times)} "
            f"and {len(reference_times)} of them."
        )
    low, value, high = np.quantile(np.divide(times, reference_times), [0.25, 0.5, 0.75])
    return Ratio(float(value), float(low), float(high))
