"""Several processes, played by threads that wait for each other where processes would."""

import threading

import jax
import numpy as np
from jax.experimental import multihost_utils


class LostError(Exception):
    """Of a process that waits for one that has ended."""


def processes(monkeypatch, count, function):
    """What ``function(number)`` gives in every process, or the error that it ends in."""
    local, changed = threading.local(), threading.Condition()
    sent, found = [], {}

    def gather(tree):
        with changed:
            if len(sent) == local.gathered:
                sent.append({})
            trees = sent[local.gathered]
            local.gathered += 1
            trees[local.number] = jax.tree.map(np.asarray, tree)
            changed.notify_all()
            changed.wait_for(lambda: len(trees) == count or found.keys() - trees.keys())
            if len(trees) < count:
                raise LostError(*(found.keys() - trees.keys()))
        trees = [trees[number] for number in range(count)]
        shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in trees]
        assert all(shape == shapes[0] for shape in shapes), shapes
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def run(number):
        local.number, local.gathered = number, 0
        try:
            result = function(number)
        except Exception as error:
            result = error
        with changed:
            found[number] = result
            changed.notify_all()

    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: count)
        patch.setattr(jax, "process_index", lambda: local.number)
        patch.setattr(multihost_utils, "process_allgather", gather)
        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [found[number] for number in range(count)]
