"""A disk that is full and a folder that is read-only: one line, and earlier results stay."""

import shutil
import subprocess
from contextlib import suppress

import pytest

from tests.crashes import command, processes
from tests.crashes.conftest import Example
from tests.crashes.processes import check_nothing_hidden, check_whole, contents, exact

# Bytes that a file may have. Checkpoints of a fit are larger than the first, its figure than the
# second; those of the experiment than the first.
LITTLE, MORE = 4_000, 100_000


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """``rvrs reproduce``, and some of its results."""
    folder = tmp_path_factory.mktemp("counting")
    arguments, variables = ["reproduce", "counting", "--jobs", "1"], processes.environment(folder)
    part = [*arguments, "--datasets", "one", "--seeds", "1"]
    seconds = processes.finish([*part, "--out", str(folder / "part")], variables)
    return Example(arguments, variables, folder / "part", seconds)


def limited(variables, size):
    return variables | {command.LARGEST_FILE: str(size)}


def check_one_line(result, beginning, *parts):
    code, errors = result
    assert code == 1, errors
    assert errors.startswith(beginning), errors
    assert errors.count("\n") == 1, errors
    for part in parts:
        assert part in errors


@pytest.mark.slow
def test_a_fit_without_room_for_its_checkpoint_leaves_the_earlier_one_as_it_was(fit, tmp_path):
    arguments, variables, whole, _ = fit
    out = shutil.copytree(whole, tmp_path / "out")
    again = [*arguments, "--out", str(out), "--seed", "1"]
    result = processes.run(again, limited(variables, LITTLE))
    path = out / "fit.checkpoint.npz"
    check_one_line(result, f"rvrs fit: {path}: File too large; raise the limit")
    assert exact(out) == exact(whole)
    check_nothing_hidden(out)


@pytest.mark.slow
def test_a_fit_without_room_for_its_figure_leaves_the_earlier_one_and_goes_on(fit, tmp_path):
    arguments, variables, whole, _ = fit
    out = shutil.copytree(whole, tmp_path / "out")
    # Not what the new one will be.
    (out / "summary.txt").write_text("earlier\n")
    earlier = exact(out)
    again = [*arguments, "--out", str(out)]
    result = processes.run(again, limited(variables, MORE))
    check_one_line(result, f"rvrs fit: {out}: File too large; ", "then go on with --resume.\n")
    found = exact(out)
    assert found.pop("fit.checkpoint.npz")
    assert found == earlier
    check_nothing_hidden(out)
    processes.finish([*again, "--resume"], variables)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_without_room_keeps_what_is_stored_and_stores_no_failure(counting, tmp_path, jobs):
    arguments, variables, part, _ = counting
    out = shutil.copytree(part, tmp_path / "out")
    again = [*arguments, "--jobs", jobs, "--out", str(out)]
    result = processes.run(again, limited(variables, LITTLE))
    check_one_line(
        result,
        f"rvrs reproduce: {out / 'counting'}",
        ".npz: File too large; raise the limit",
        "then the same command goes on.\n",
    )
    assert exact(out) == exact(part)
    check_nothing_hidden(out)


def without_privileges(variables):
    return variables | {command.NO_PRIVILEGES: "1"}


@pytest.fixture
def read_only():
    """Make folders read-only until the end of the test."""
    folders = []

    def read_only(folder):
        folders.append(folder)
        folder.chmod(0o555)

    yield read_only
    for folder in folders:
        folder.chmod(0o755)


@pytest.mark.parametrize("which", [pytest.param("fit", marks=pytest.mark.slow), "counting"])
def test_a_read_only_folder_is_refused_and_left_alone(which, request, tmp_path, read_only):
    arguments, variables, earlier, _ = request.getfixturevalue(which)
    out = shutil.copytree(earlier, tmp_path / "out")
    read_only(out)
    result = processes.run([*arguments, "--out", str(out)], without_privileges(variables))
    command = f"rvrs {arguments[0]}: "
    check_one_line(result, f"{command}cannot write to --out {out}: Permission denied.")
    assert exact(out) == exact(earlier)
    check_nothing_hidden(out)


@pytest.mark.parametrize("place", ["counting", "counting/one/walk"])
def test_a_read_only_folder_of_results_is_named_and_left_alone(
    counting, tmp_path, read_only, place
):
    arguments, variables, part, _ = counting
    out = shutil.copytree(part, tmp_path / "out")
    read_only(out / place)
    result = processes.run(
        [*arguments, "--datasets", "one", "--out", str(out)],
        without_privileges(variables),
    )
    check_one_line(result, "rvrs reproduce: ", str(out / place), "Permission denied")
    assert exact(out).items() >= exact(part).items()
    check_whole(out)
    check_nothing_hidden(out)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, that holds little."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk):
    """Leave no room at all."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(disk).free == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount")
@pytest.mark.parametrize("which", ["fit", "counting"])
def test_a_full_disk_is_told_in_one_line_and_earlier_results_stay(which, request, small_disk):
    arguments, variables, earlier, _ = request.getfixturevalue(which)
    out = shutil.copytree(earlier, small_disk / "out")
    fill(small_disk)
    again = [*arguments, "--out", str(out)]
    result = processes.run(again, variables)
    check_one_line(
        result, f"rvrs {arguments[0]}: {out}", "No space left on device; make room there"
    )
    assert exact(out) == exact(earlier)
    check_nothing_hidden(out)
