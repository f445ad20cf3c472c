"""Two real processes, each with half of the data, talk over the loopback device."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 900
NUM_POINTS = 203


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(folder, count, only=None, **settings):
    """Processes of a fit; ``only`` starts one of them."""
    port, started = free_port(), []
    for number in range(count) if only is None else [only]:
        about = {"count": count, "number": number, "port": port, "devices": 2 // count}
        about |= {"folder": str(folder), "out": str(folder / f"out-{number}.json")}
        file = folder / f"settings-{number}.json"
        file.write_text(
            json.dumps(about | {"num_points": NUM_POINTS, "num_steps": 1000} | settings)
        )
        started.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.scaling.worker", str(file)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def end(process):
    try:
        return process.returncode, process.communicate(timeout=LONGEST)[1]
    finally:
        if process.poll() is None:
            process.kill()


def finish(folder, count, **settings):
    """What the processes of a fit have found."""
    errors = [end(process)[1] for process in start(folder, count, **settings)]
    found = []
    for number in range(count):
        out = folder / f"out-{number}.json"
        assert out.is_file(), errors[number]
        found.append(json.loads(out.read_text()))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, finish(folder, 2, checkpoint=str(folder / "fit.npz"))


@pytest.mark.slow
def test_two_processes_with_half_of_the_data_each_find_what_one_finds(two, tmp_path):
    (one,) = finish(tmp_path, 1)
    first, second = two[1]
    for name in ("elbo", "error", "loc"):
        assert first[name] == second[name]
    # Devices, shares of them and keys are the same; sums are added up in another order.
    error = np.hypot(one["error"], first["error"])
    assert abs(one["elbo"] - first["elbo"]) < 4 * error + 0.05
    np.testing.assert_allclose(one["loc"], first["loc"], atol=0.02)
    assert (first["rows"], second["rows"]) == (101, 102)
    assert one["rows"] == NUM_POINTS
    assert first["draws"] == second["draws"] == [50, 2]


@pytest.mark.slow
def test_a_run_of_two_processes_is_not_gone_on_with_by_one(two):
    folder, _ = two
    assert sorted(path.name for path in folder.glob("fit*")) == [
        "fit.process-0-of-2.npz",
        "fit.process-0-of-2.previous.npz",
        "fit.process-1-of-2.npz",
        "fit.process-1-of-2.previous.npz",
    ]
    (process,) = start(folder, 1, resume=str(folder / "fit.npz"))
    _, errors = end(process)
    assert errors.strip().endswith(
        f"ValueError: resume: {folder / 'fit.npz'} was stored by 2 process(es), but this run has "
        "1; start as many as then, with as many devices."
    )


@pytest.mark.slow
def test_without_a_coordinator_a_process_ends_within_its_time(tmp_path):
    began = time.monotonic()
    (process,) = start(tmp_path, 2, only=1, start_timeout=5)
    _, errors = end(process)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert "DEADLINE_EXCEEDED" in errors


@pytest.mark.slow
def test_when_one_process_is_killed_the_other_ends_and_both_go_on_to_the_same_bits(two, tmp_path):
    _, whole = two
    checkpoint = str(tmp_path / "fit.npz")
    began = time.monotonic()
    processes = start(tmp_path, 2, checkpoint=checkpoint, die_at=500, timeout=20)
    other, killed = processes
    end(killed)
    died = time.monotonic()
    _, errors = end(other)
    assert killed.returncode == -signal.SIGKILL
    # JAX's runtime ends the process; twice its time-out is enough on a busy machine.
    assert other.returncode not in (0, -signal.SIGKILL)
    assert time.monotonic() - died < 2 * 20 + 20
    assert "another task died" in errors or "stopped sending heartbeats" in errors
    assert died - began < LONGEST
    assert not (tmp_path / "out-0.json").exists()
    again = finish(tmp_path, 2, checkpoint=checkpoint, resume=checkpoint)
    assert again == whole
