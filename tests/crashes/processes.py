"""Real processes of the command, which are killed; and what must be left of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from rvrs import files, storage

COMMAND = [sys.executable, str(Path(__file__).with_name("command.py"))]
# A process that does not end by itself is a mistake of the test or of the command.
LONGEST = 600
# Processes of a pool have so many seconds to notice that they are alone.
SECONDS_TO_END = 10

MODEL = """
import numpyro
import numpyro.distributions as dist


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    numpyro.sample("obs", dist.Normal(slope * x, 1.0), obs=y)
"""
DATA = "x,y\n0,0.1\n1,2.3\n2,3.8\n3,6.1\n"


def environment(folder):
    """That of all processes of a test: compiled programs are shared."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "COLUMNS": "200",
    }


def start(arguments, variables):
    """The command, in a session of its own, so that all that it starts can be found."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process):
    """Wait for the end; the exit code and what was written to stderr."""
    try:
        _, errors = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, errors


def run(arguments, variables):
    """The command to its end."""
    return end(start(arguments, variables))


def finish(arguments, variables):
    """The command, which must succeed; how long it has taken."""
    began = time.monotonic()
    code, errors = run(arguments, variables)
    assert code == 0, errors
    return time.monotonic() - began


def kill(arguments, variables, delay):
    """Kill the command after a delay; whether it was still there."""
    process = start(arguments, variables)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate(timeout=SECONDS_TO_END)
    deadline = time.monotonic() + SECONDS_TO_END
    while _is_anyone_left(process.pid):
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError("processes of the killed command have gone on without it")
        time.sleep(0.05)
    return process.returncode == -signal.SIGKILL


def _is_anyone_left(session):
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def visible(folder):
    """The files in a folder, by their relative names, but for hidden ones."""
    found = (path for path in folder.rglob("*") if path.is_file())
    relative = {str(path.relative_to(folder)): path for path in found}
    return {
        name: path
        for name, path in sorted(relative.items())
        if not any(part.startswith(".") for part in Path(name).parts)
    }


def check_whole(folder):
    """Every file that can be seen can be read to its end."""
    for name, path in visible(folder).items():
        content(name, path)


def check_nothing_hidden(folder):
    """A command that has ended has left nothing but results."""
    hidden = [path for path in folder.rglob(".*") if path.name != ".rvrs.lock"]
    assert hidden == []
    assert not list(folder.rglob(".rvrs.lock"))


def content(name, path):
    """What a file holds, but for times: equal for equal results."""
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        assert found["format"] == "rvrs-result"
        return _without_times(found)
    if name.endswith((".checkpoint.npz", "fit.npz")):
        stored = storage.read(path)
        return _without_times(stored.header), _as_bytes(stored.arrays)
    if path.suffix == ".npz":
        return _as_bytes(files.read_arrays(path))
    if path.suffix == ".png":
        image = path.read_bytes()
        assert image.startswith(b"\x89PNG")
        assert image.endswith(b"IEND\xaeB`\x82")
        return image
    assert name == "summary.txt", f"{path} should not be here"
    text = path.read_text()
    assert text.endswith("\n")
    # The first line has the seconds.
    return text.splitlines()[1:]


TIMES = {"seconds", "finished", "seconds_per_step", "seconds_to_train"}


def _without_times(value):
    if not isinstance(value, dict):
        return value
    return {name: _without_times(v) for name, v in value.items() if name not in TIMES}


def _as_bytes(arrays):
    return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}


def contents(folder):
    """What all files of a folder hold, but for times."""
    return {name: content(name, path) for name, path in visible(folder).items()}


def delays(number, duration, seed):
    """Moments to kill at: over all of the duration, each part of it as often as the others."""
    random = np.random.default_rng(seed)
    edges = (np.arange(number) + random.uniform(size=number)) / number
    return random.permutation(duration * edges).tolist()


def exact(folder):
    """The bytes of all files, for results that must not be touched."""
    return {name: path.read_bytes() for name, path in visible(folder).items()}
