"""One of several processes of a fit: ``python -m tests.scaling.worker FILE``, settings in JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import jax


def main(settings):
    count, number = settings["count"], settings["number"]
    jax.config.update("jax_num_cpu_devices", settings["devices"])
    if count > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{settings['port']}",
            count,
            number,
            initialization_timeout=settings.get("start_timeout", 120),
            heartbeat_timeout_seconds=settings.get("timeout", 100),
            shutdown_timeout_seconds=60,
        )
    import numpy as np

    import rvrs
    from tests.scaling import models

    x, y = models.data(settings["num_points"])
    # Every process reads its own part of the data, from a file that is not in memory.
    share = slice(number * len(x) // count, (number + 1) * len(x) // count)
    path = Path(settings["folder"]) / f"x-{number}-{count}.npy"
    np.save(path, x[share])

    def callback(step, _):
        if step >= settings.get("die_at", 10**9) and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    fit = rvrs.fit(
        jax.random.key(2),
        models.model,
        np.load(path, mmap_mode="r"),
        y[share],
        guide=models.guide(),
        batch_size=40,
        num_steps=settings["num_steps"],
        progress=False,
        mesh=jax.make_mesh((jax.device_count(),), ("data",)),
        callback=callback,
        checkpoint=settings.get("checkpoint"),
        resume=settings.get("resume"),
    )
    draws = fit.sample(jax.random.key(3), 50, indices=[0, len(y[share]) - 1])
    found = {
        "elbo": fit.elbo,
        "error": fit.elbo_error,
        "acceptance": fit.acceptance,
        "loc": np.asarray(fit.params["beta_auto_loc"]).tolist(),
        "rows": len(fit.params["auto_precision_loc"]),
        "thresholds": np.asarray(fit.thresholds).tolist(),
        "draws": list(draws["precision"].shape),
    }
    Path(settings["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
