"""An experiment that does nothing but write: most moments to be killed in are those of a write."""

import time

import numpy as np

from rvrs import storage
from rvrs.experiments.experiment import Experiment, Outcome, Preset

NUM_STEPS = 20
SECONDS_PER_STEP = 0.002
# Kilobytes, so that a write takes time and a small disk is full.
LENGTH = 4000


def run(unit, settings, arrays, report, *, checkpoint):
    """A random walk, which starts from the reference, and goes on from its checkpoint."""
    place, first = np.array(arrays.get("place", np.zeros(LENGTH))), 0
    if checkpoint.is_file():
        stored = storage.read(checkpoint)
        storage.refuse_differences(checkpoint, stored.header, {"unit": list(unit)})
        place, first = stored.arrays["place"], stored.header["step"]
    for step in range(first, NUM_STEPS):
        place = place + np.random.default_rng([unit.seed, step]).normal(size=LENGTH)
        time.sleep(SECONDS_PER_STEP)
        header = {"unit": list(unit), "step": step + 1}
        storage.write(checkpoint, storage.Checkpoint(header, {"place": place}))
        report(step / NUM_STEPS, "walking")
    figures = {"mean": place.mean(), "first": place[:10].tolist()}
    return Outcome(figures, {"place": place} if unit.method == "truth" else {})


EXPERIMENT = Experiment(
    name="counting",
    title="Figure 0: steps",
    datasets=("one", "two", "three"),
    methods=("truth", "walk"),
    presets={"quick": Preset(("one", "two"), ("truth", "walk"), 3, {"number": 1.5})},
    run=run,
    plot=lambda _results, _folder: [],
    tables=lambda _results: "",
    claims=lambda _results: [],
    reference="truth",
    checkpoints=True,
)
