"""``rvrs fit`` is killed, and goes on to the same bits; two do not share a folder."""

import pytest

from tests.crashes import processes
from tests.crashes.processes import check_nothing_hidden, check_whole, contents


def resumed(arguments, out):
    """The command that goes on with what is there."""
    stored = any((out / name).exists() for name in ("fit.checkpoint.npz", "fit.npz"))
    return [*arguments, *(["--resume"] if stored else [])]


@pytest.mark.slow
def test_a_killed_fit_goes_on_to_the_same_bits(fit, tmp_path):
    command, variables, whole, seconds = fit
    number, expected, killed, went_on = 50, contents(whole), 0, 0
    for place, delay in enumerate(processes.delays(number, 1.05 * seconds, seed=number)):
        out = tmp_path / str(place)
        arguments = [*command, "--out", str(out)]
        killed += processes.kill(arguments, variables, delay)
        check_whole(out)
        again = resumed(arguments, out)
        went_on += "--resume" in again
        processes.finish(again, variables)
        assert contents(out) == expected, f"killed after {delay} s"
        check_nothing_hidden(out)
    print(f"rvrs fit: killed {killed} of {number}, went on from a file {went_on}")
    assert killed >= number // 2


@pytest.mark.slow
def test_a_fit_that_was_killed_while_it_wrote_its_results_is_completed(fit, tmp_path):
    command, variables, whole, _ = fit
    (tmp_path / "fit.npz").write_bytes((whole / "fit.npz").read_bytes())
    (tmp_path / ".rvrs-abcdefgh.part").mkdir()
    (tmp_path / ".rvrs-abcdefgh.part" / "fit.png").touch()
    (tmp_path / ".rvrs.lock").touch()
    processes.finish([*command, "--out", str(tmp_path), "--resume"], variables)
    assert contents(tmp_path) == contents(whole)
    check_nothing_hidden(tmp_path)


@pytest.mark.slow
def test_of_two_fits_in_one_folder_one_is_refused(fit, tmp_path):
    command, variables, whole, _ = fit
    out = tmp_path / "out"
    both = [processes.start([*command, "--out", str(out)], variables) for _ in range(2)]
    (code, errors), (refused, message) = sorted(map(processes.end, both))
    assert (code, refused) == (0, 1), errors
    assert message.startswith(f"rvrs fit: {out} is in use: process ")
    assert message.endswith("wait until it has ended, or choose another folder.\n")
    assert message.count("\n") == 1
    assert contents(out) == contents(whole)
    check_nothing_hidden(out)
