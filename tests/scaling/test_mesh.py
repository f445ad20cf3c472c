"""Several devices of one process: exact draws, unbiased gradients, the same fits, few bytes."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

import rvrs
from tests.scaling import cases, models

ROOT = Path(__file__).parents[2]


@functools.cache
def figures(*arguments):
    """What a case gives, on eight devices."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.scaling.cases", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def z_score(values, exact):
    values = np.asarray(values, float)
    return (values.mean() - exact) / (values.std(ddof=1) / np.sqrt(len(values)))


def quartic():
    """Z, and moments of r, by quadrature."""
    z = np.linspace(-6, 6, 200_001)
    lw = -((z - 0.5) ** 4) + 0.5 * z**2
    density = stats.norm.pdf(z) / (1 + np.exp(-np.clip(lw + cases.THRESHOLD, -700, 700)))
    normalizer = np.trapezoid(density, z)
    return normalizer, [np.trapezoid(density * z**k, z) / normalizer for k in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("count", ["1", "2", "4", "8"])
def test_draws_whose_proposals_devices_share_are_exact_and_the_same_on_all(count):
    found = figures("draws")[count]
    assert found["same"]
    normalizer, moments = quartic()
    noise = np.array(found["noise"])
    log_normalizer, num_proposals, acceptance, num_draws = np.array(found["figures"]).T
    assert set(num_draws) == {2.0, 3.0}
    # All that every run has, and those that some have.
    for slot, rows in ((0, slice(None)), (1, slice(None)), (2, num_draws == 3)):
        for power, exact in enumerate(moments, 1):
            assert abs(z_score(noise[rows, slot] ** power, exact)) < 4, (slot, power)
    assert abs(z_score(log_normalizer, np.log(normalizer))) < 4
    # Wald: the number of proposals is a stopping time.
    assert abs(z_score(acceptance - normalizer * num_proposals, 0.0)) < 4


@pytest.mark.parametrize("count", ["4", "8"])
@pytest.mark.parametrize("kind", ["exact", pytest.param("budget", marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_device_though_some_devices_have_fewer_points(kind, count):
    found = {n: np.array(means) for n, means in figures("gradients", kind).items()}
    one, several = found["0"], found[count]
    error = np.sqrt((one.var(0, ddof=1) + several.var(0, ddof=1)) / cases.NUM_CHUNKS)
    z = (several.mean(0) - one.mean(0)) / error
    assert np.all(np.abs(z) < 4), z
    # There is something to be wrong about.
    assert np.max(np.abs(one.mean(0)) / error) > 10


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fits", "global_fits"])
def test_a_mesh_of_one_device_changes_no_bit(what):
    found = figures(what, "0,1,8")
    assert found["0"] == found["1"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fits", "global_fits"])
def test_a_fit_on_eight_devices_is_as_good_as_on_one(what):
    found = figures(what, "0,1,8")
    check_alike(found["0"], found["8"])


@pytest.mark.slow
def test_a_fit_of_eight_devices_is_loaded_by_one():
    assert all(found["loaded"] for found in figures("fits", "0,1,8").values())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fits", "global_fits"])
@pytest.mark.parametrize("count", ["2", "4"])
def test_a_fit_on_several_devices_is_as_good_as_on_one(what, count):
    found = figures(what, "0,2,4")
    check_alike(found["0"], found[count])


def check_alike(one, several):
    assert one["losses"] != several["losses"]
    # Evaluations have errors of their own; trainings of 500 steps differ by some hundredths.
    error = np.hypot(one["error"], several["error"])
    assert abs(one["elbo"] - several["elbo"]) < 4 * error + 0.05
    assert several["acceptance"] == pytest.approx(one["acceptance"], rel=0.03)


@pytest.mark.slow
def test_what_devices_send_each_other_depends_on_global_parameters_alone():
    found = figures("moved")
    assert set(found["plain"]) == {"all-reduce"}
    # Gradients of 2 locations and 2 scales, the loss, and a few numbers about the batch.
    assert 4 * 5 <= found["plain"]["all-reduce"] <= 4 * 15
    for other in ("points", "batch", "proposals"):
        assert found[other] == found["plain"]


def test_rows_go_to_devices_and_come_back():
    for name, found in figures("layouts").items():
        count, num_rows = map(int, name.split())
        assert found["same"]
        assert sum(found["sizes"]) == num_rows
        assert max(found["sizes"]) - min(found["sizes"]) <= 1
        assert found["on each"] == [2, max(found["sizes"])]
        assert found["shape"] == [2, count * max(found["sizes"])]
        assert np.mean(found["weights"]) == pytest.approx(1)


def fit(mesh, **options):
    options = {"guide": models.guide(), "batch_size": 4, "num_steps": 1} | options
    return rvrs.fit(jax.random.key(0), models.model, *models.data(8), mesh=mesh, **options)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (8, r"mesh must be a jax.sharding.Mesh, e.g. jax.make_mesh"),
        (jax.devices(), "mesh must be a jax.sharding.Mesh"),
        (
            jax.make_mesh((1, 1), ("data", "model")),
            r"mesh must have one axis, got \('data', 'model",
        ),
    ],
)
def test_what_is_no_mesh_of_one_axis_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        fit(mesh)


def test_a_batch_that_devices_do_not_divide_is_refused():
    found = figures("refused")
    assert found["batch"] == (
        "batch_size=42 is not a multiple of the 8 devices of the mesh; use e.g. batch_size=40."
    )
    assert found["points"] == (
        "batch_size=16 takes 2 data points from every device of the mesh, but one has only 1; use "
        "a smaller one, or fewer devices."
    )
