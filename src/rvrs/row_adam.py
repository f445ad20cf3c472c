"""Adam for tables with one row of parameters per data point, at the cost of the rows of a batch.

Plain Adam changes every row at every step: of a million data points a step on a few thousand would
spend its time on the others. Here a row, and what is remembered of its gradients, changes when its
point is in the batch. It then does at once what plain Adam does until the next visit.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_FIRST_DECAY = 0.9
_EPSILON = 1e-8
# Squares of gradients are averaged over the latest fifth of all visits, since large gradients of a
# bad start make every step small for as long as they are remembered; but over not fewer and not
# more than so many: the average over a few follows single gradients, so that skewed ones would be
# biased.
SECOND_MOMENT_SHARE = 0.2
SECOND_MOMENT_STEPS = 10, 1000


class Moments(NamedTuple):
    """What is remembered of the gradients of some rows; leaves have one row per data point."""

    mean: jax.Array
    square: jax.Array
    visits: jax.Array


def init(table: jax.Array) -> Moments:
    """Of a table whose rows have not been visited."""
    nothing = jnp.zeros_like(table)
    return Moments(nothing, nothing, jnp.zeros(len(table), jnp.int32))


def update(gradient: jax.Array, moments: Moments, steps_between: float) -> tuple[Any, Moments]:
    """The steps of the visited rows at a rate of 1, and their moments after it.

    A row is visited every ``steps_between`` steps on average, G. Plain Adam averages squares over
    steps, at only one in G of which there is a gradient, so that in all it moves a row by
    ``sqrt(G)`` as much per visit as one that has a gradient at every step. So does this.
    """
    visits = moments.visits + 1
    count = visits.reshape(-1, *[1] * (gradient.ndim - 1)).astype(gradient.dtype)
    decay = _FIRST_DECAY**steps_between
    mean = decay * moments.mean + (1 - decay) * gradient
    window = jnp.minimum(count, jnp.clip(SECOND_MOMENT_SHARE * count, *SECOND_MOMENT_STEPS))
    square = moments.square + (gradient**2 - moments.square) / window
    step = mean / (1 - decay**count) / (jnp.sqrt(square) + _EPSILON)
    return math.sqrt(steps_between) * step, Moments(mean, square, visits)
