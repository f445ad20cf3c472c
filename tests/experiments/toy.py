"""An experiment without numerics, for the tests of what runs experiments."""

import errno
import os
import signal
import time
from pathlib import Path

import numpy as np

from rvrs.experiments.experiment import DivergedError, Experiment, Outcome, Preset
from rvrs.storage import CheckpointError

VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "JAX_COMPILATION_CACHE_DIR")


def run(unit, settings, arrays, report, *, checkpoint=None):
    report(0.5, f"half of {unit.dataset}")
    # A file that a test makes, as processes share nothing else.
    trouble = Path(os.environ["TOY_TROUBLE"]) if "TOY_TROUBLE" in os.environ else None
    match unit.method:
        case "truth":
            if trouble and trouble.with_name("no-truth").exists():
                raise ValueError("no truth\nsecond line")
            return Outcome({"value": 1.0}, {"draws": np.arange(3.0) + len(unit.dataset)})
        case "diverging":
            raise DivergedError("the ELBO fell to -inf")
        case "nan":
            return Outcome({"value": 1.0, "curve": [1.0, float("nan")]})
        case "raising":
            raise KeyError
        case "checkpointing" if checkpoint is not None:
            had = checkpoint.exists()
            checkpoint.write_text("half")
            if not had:
                raise KeyboardInterrupt
            return Outcome({"resumed": had})
        case "damaged":
            raise CheckpointError("the file is damaged.")
        case "without-room" if trouble and trouble.exists():
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
        case "environment":
            return Outcome({name: os.environ.get(name, "") for name in VARIABLES})
        case "sleeping" if trouble and trouble.exists():
            time.sleep(60)
        case "interrupted" if trouble and trouble.exists() and unit.seed == 1:
            raise KeyboardInterrupt
        case "killed-once" if trouble and trouble.exists() and unit.seed == 1:
            trouble.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed" if trouble and trouble.exists() and unit.seed == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    value = settings["scale"] * unit.seed + float(sum(arrays.get("draws", [-1.0])))
    return Outcome({"value": value, "words": unit.method})


EXPERIMENT = Experiment(
    name="toy",
    title="Figure 0: a toy",
    datasets=("one", "three", "spambase"),
    methods=(
        *("truth", "plain", "diverging", "nan", "raising", "environment"),
        *("interrupted", "killed", "killed-once", "sleeping", "checkpointing"),
        *("damaged", "without-room"),
    ),
    presets={
        "quick": Preset(("one", "three"), ("truth", "plain"), 2, {"scale": 0.5, "sizes": (1, 2)}),
        "paper": Preset(("one", "three"), ("truth", "plain"), 3, {"scale": 2.0, "sizes": (1, 2)}),
    },
    run=run,
    plot=lambda _results, _folder: [],
    tables=lambda _results: "",
    claims=lambda _results: [],
    reference="truth",
)
