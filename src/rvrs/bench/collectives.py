"""Bytes that devices send each other in a step, read off the compiled program."""

import math
import re
from typing import Any

import jax
import numpy as np

from rvrs import semi_training
from rvrs.semi_training import SemiTrainState, Trainer

# Of an operation in two halves the second one has the result; the first has operands besides it.
_COLLECTIVE = re.compile(
    r"= (?P<shapes>\([^)]*\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-done)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")


def moved(program: str) -> dict[str, int]:
    """Bytes of the results of all collective operations, each counted once, by their kind.

    In a loop over steps that is what one step moves; what its inner loops do is counted for one
    round of them.
    """
    found: dict[str, int] = {}
    for match in _COLLECTIVE.finditer(program):
        size = sum(
            math.prod(int(n) for n in array["shape"].split(",") if n) * int(array["bits"] or 8) // 8
            for array in _ARRAY.finditer(match["shapes"])
        )
        found[match["kind"]] = found.get(match["kind"], 0) + size
    return found


def program_of(trainer: Trainer, state: SemiTrainState, rng_key: jax.Array) -> str:
    """The compiled training steps of a trainer whose data are spread over devices."""
    assert trainer.spread is not None
    index = trainer.data.indices(0, 1)
    put = trainer.spread.put
    rows = (put(index, 1), put(trainer.data.places(index), 1))
    counts = put(np.array([0, 1, 1], np.int32), -1)
    static: Any = (semi_training._Static(trainer), "training", 1, trainer.data.row_leaves)
    arguments = trainer._put(trainer.data.take(index))
    key = jax.random.wrap_key_data(put(np.asarray(jax.random.key_data(rng_key)), -1))
    run = jax.jit(semi_training._run_chunk, static_argnums=(0, 1, 2, 3))
    lowered = run.lower(*static, key, trainer.place(state), *rows, counts, arguments)
    return lowered.compile().as_text() or ""
