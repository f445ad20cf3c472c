"""``rvrs reproduce`` is killed, and goes on to the same bits; two do not share a folder."""

import time

import pytest

from tests.crashes import processes
from tests.crashes.processes import check_nothing_hidden, check_whole, contents

COUNTING = ["reproduce", "counting"]
# Step times, which are a unit of their own, are never the same.
VAE = ["reproduce", "vae", "--methods", "standard,rvrs-0.1"]
FUNNEL = ["reproduce", "funnel", "--methods", "rvrs-0.5"]


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce")
    # Data sets that come with scikit-learn are enough.
    return processes.environment(folder) | {"RVRS_DATA": str(folder / "none")}


def kill_and_go_on(arguments, jobs, variables, tmp_path, number):
    """Kill runs with as many processes as ``jobs`` says in turn."""
    expected, durations = {}, {}
    for count in jobs:
        out = tmp_path / f"whole-{count}"
        several = [*arguments, "--jobs", str(count), "--out", str(out)]
        durations[count] = processes.finish(several, variables)
        expected = expected or contents(out)
        # However many compute.
        assert contents(out) == expected
        check_nothing_hidden(out)
    killed = went_on = 0
    moments = processes.delays(number, 1.05, seed=number)
    for place, moment in enumerate(moments):
        count = jobs[place % len(jobs)]
        out = tmp_path / str(place)
        again = [*arguments, "--jobs", str(count), "--out", str(out)]
        delay = moment * durations[count]
        killed += processes.kill(again, variables, delay)
        check_whole(out)
        before = processes.exact(out)
        went_on += bool(before)
        processes.finish(again, variables)
        assert contents(out) == expected, f"killed after {delay} s, {count} jobs"
        after = processes.exact(out)
        # What was stored is not computed again.
        stored = {name for name in before if name.endswith(".json")}
        assert {name: after[name] for name in stored} == {name: before[name] for name in stored}
        check_nothing_hidden(out)
    print(f"{' '.join(arguments)}: killed {killed} of {number}, went on from files {went_on}")
    assert killed >= number // 2


@pytest.mark.slow
def test_a_killed_run_that_writes_all_the_time_goes_on_to_the_same_bits(variables, tmp_path):
    kill_and_go_on(COUNTING, (1, 2), variables, tmp_path, 50)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "number"), [(VAE, 50), (FUNNEL, 10)])
def test_a_killed_experiment_goes_on_to_the_same_bits(variables, tmp_path, arguments, number):
    kill_and_go_on(arguments, (1, 2), variables, tmp_path, number)


@pytest.mark.slow
def test_of_two_runs_in_one_folder_one_is_refused(variables, tmp_path):
    arguments = [*COUNTING, "--jobs", "1", "--out"]
    processes.finish([*arguments, str(tmp_path / "whole")], variables)
    out = tmp_path / "out"
    # Enough seeds to be at it until the others have come.
    long = processes.start([*arguments, str(out), "--seeds", "30"], variables)
    deadline = time.monotonic() + 60
    while not (out / "counting" / ".rvrs.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    code, message = processes.run([*arguments, str(out)], variables)
    assert code == 1
    assert message.startswith(f"rvrs reproduce: {out / 'counting'} is in use: process ")
    assert message.endswith("wait until it has ended, or choose another folder.\n")
    assert message.count("\n") == 1
    assert long.poll() is None
    assert processes.end(long)[0] == 0
    found, expected = contents(out), contents(tmp_path / "whole")
    assert {name: found[name] for name in expected} == expected
    check_nothing_hidden(out)
