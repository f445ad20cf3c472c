import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.experiments import store as stores
from rvrs.experiments.experiment import Result, Unit
from rvrs.experiments.store import Store
from tests.experiments.toy import EXPERIMENT

UNIT = Unit("toy", "one", "RVRS@0.1_mvn-2", 3)
SETTINGS = EXPERIMENT.presets["quick"].settings
ORIGIN = stores.origin(EXPERIMENT, "quick", SETTINGS)
MACHINE = stores.machine()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def write(store, figures=None, *, unit=UNIT, failure=None, arrays=None, origin=ORIGIN):
    result = Result(unit, {"elbo": -1.5} if figures is None else figures, failure, 2.0)
    return store.write(result, origin, arrays=arrays, machine=MACHINE)


def change(store, **fields):
    path = store.path(UNIT)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_result_comes_back_as_it_was_written(store):
    figures = {"elbo": -1.25, "curve": [1, 2.5], "name": "ELBO", "nested": {"a": None}}
    written = write(store, figures)
    assert store.load("toy") == [written] == [Result(UNIT, figures, None, 2.0)]


def test_a_file_says_what_the_result_was_made_with(store, tmp_path):
    write(store)
    path = tmp_path / "toy" / "one" / "RVRS@0.1_mvn-2" / "seed-3.json"
    content = json.loads(path.read_text())
    assert content["format"] == "rvrs-result"
    assert content["version"] == 1
    assert content["unit"] == UNIT._asdict()
    assert content["preset"] == "quick"
    assert content["settings"] == {"scale": 0.5, "sizes": [1, 2]}
    assert content["revision"] == 1
    assert {"python", "rvrs", "jax", "jaxlib", "numpyro", "scipy"} <= set(content["versions"])
    assert set(content["machine"]) == {"platform", "cores"}
    assert content["status"] == "done"
    assert content["finished"].endswith("+00:00")
    assert (path.stat().st_mode & 0o044) == 0o044  # others may read it


def test_nothing_but_the_files_of_results_is_left(store, tmp_path):
    write(store, arrays={"draws": np.ones(2)})
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write(store, arrays={"draws": np.array([object()])})
    names = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["seed-3.json", "seed-3.npz"]


def test_results_are_sorted_by_data_set_method_and_number_of_the_seed(store):
    units = [
        Unit("toy", "a", "x", 2),
        Unit("toy", "a", "x", 10),
        Unit("toy", "a", "y", 0),
        Unit("toy", "b", "x", 0),
    ]
    for unit in reversed(units):
        write(store, unit=unit)
    write(store, unit=Unit("other", "a", "x", 0))
    assert [result.unit for result in store.load("toy")] == units
    assert store.experiments() == ["other", "toy"]
    assert store.load("nothing") == []


def test_figures_of_numpy_and_jax_become_plain_numbers(store):
    written = write(store, {"a": np.float32(0.5), "b": jnp.arange(2), "c": np.int64(3)})
    assert written.figures == {"a": 0.5, "b": [0, 1], "c": 3}
    assert store.load("toy") == [written]


@pytest.mark.parametrize("value", [float("nan"), [1.0, float("inf")], {"a": [np.float32("nan")]}])
def test_figures_that_are_not_finite_are_stored_as_a_failure(store, value):
    written = write(store, {"good": 1.0, "bad": value}, arrays={"draws": np.ones(2)})
    assert written == Result(UNIT, {}, "figures are not finite: bad", 2.0)
    assert store.load("toy") == [written]
    assert store.arrays(UNIT) is None
    assert not store.path(UNIT).with_suffix(".npz").exists()


def test_figures_that_json_cannot_hold_are_stored_as_a_failure(store):
    assert "TypeError: figures must be numbers, words" in str(write(store, {"a": object()}).failure)


def test_a_failure_is_stored_with_its_reason(store):
    write(store, failure="it diverged")
    assert store.has(UNIT)
    assert store.load("toy") == [Result(UNIT, {}, "it diverged", 2.0)]
    assert json.loads(store.path(UNIT).read_text())["status"] == "failed"


def test_arrays_come_back_as_they_were_written(store):
    # A name that numpy.savez does not take.
    arrays = {"file": np.arange(6, dtype=np.int16).reshape(2, 3), "draws": np.ones(4)}
    assert store.arrays(UNIT) is None
    write(store, arrays=arrays)
    found = store.arrays(UNIT)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_arrays_do_not_outlive_their_result(store):
    write(store, arrays={"draws": np.ones(4)})
    write(store, failure="not again")
    assert store.arrays(UNIT) is None
    assert not store.path(UNIT).with_suffix(".npz").exists()


def test_arrays_without_a_result_are_none(store):
    write(store, arrays={"draws": np.ones(4)})
    store.path(UNIT).unlink()
    assert store.arrays(UNIT) is None


def test_damaged_arrays_are_refused_by_name(store):
    write(store, arrays={"draws": np.ones(400)})
    path = store.path(UNIT).with_suffix(".npz")
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], whole[:-30], b"x" * 500):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"seed-3.npz is truncated or damaged; delete it"):
            store.arrays(UNIT)


@pytest.mark.parametrize("kept", [0, 1, 100, -3])
def test_a_truncated_file_is_refused_by_name(store, kept):
    write(store)
    path = store.path(UNIT)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"seed-3.json is truncated, damaged or not JSON; delete"):
        store.load("toy")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"NaN", b'{"format": "rvrs-result", "a": NaN}'])
def test_what_is_not_json_is_refused(store, content):
    write(store)
    store.path(UNIT).write_bytes(content)
    with pytest.raises(ValueError, match="not JSON; delete it and run its experiment again"):
        store.load("toy")


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"format": "other"}'])
def test_json_of_something_else_is_refused(store, content):
    write(store)
    store.path(UNIT).write_text(content)
    with pytest.raises(ValueError, match=r"seed-3.json is not a result of rvrs; delete it"):
        store.load("toy")


def test_another_version_of_the_format_is_refused(store):
    write(store)
    change(store, version=2)
    with pytest.raises(ValueError, match="version 2 of the format, this is version 1; delete"):
        store.load("toy")


@pytest.mark.parametrize(
    "fields",
    [{"figures": None}, {"seconds": "long"}, {"status": "failed"}, {"unit": {}}, {"settings": 1}],
)
def test_a_file_that_lacks_what_a_result_has_is_refused(store, fields):
    write(store)
    change(store, **fields)
    with pytest.raises(ValueError, match=r"seed-3.json lacks what a result has; delete it"):
        store.load("toy")


def test_a_file_of_another_unit_is_refused(store):
    write(store)
    moved = store.path(UNIT._replace(seed=4))
    store.path(UNIT).rename(moved)
    with pytest.raises(ValueError, match=r"seed-4.json holds the result of another unit, \('toy'"):
        store.load("toy")


@pytest.mark.parametrize("name", ["seed-03.json", "seed-.json", "seed-1 copy.json"])
def test_a_file_with_a_strange_name_is_refused(store, name):
    write(store)
    store.path(UNIT).rename(store.path(UNIT).with_name(name))
    with pytest.raises(ValueError, match="has a name that rvrs does not give; delete it"):
        store.load("toy")


def test_reading_a_unit_that_is_not_there_says_so(store):
    with pytest.raises(FileNotFoundError, match=r"there is no result .*seed-3.json"):
        store.read(UNIT)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/b", "/a", "a\\b", ".a", "a b", "a\n", "ä"]
)
@pytest.mark.parametrize("field", ["experiment", "dataset", "method"])
def test_names_cannot_lead_out_of_the_store(store, name, field):
    with pytest.raises(ValueError, match="cannot be the name of an experiment"):
        write(store, unit=UNIT._replace(**{field: name}))
    with pytest.raises(ValueError, match="cannot be the name of an experiment"):
        store.has(UNIT._replace(**{field: name}))


@pytest.mark.parametrize("seed", [-1, 1.0, True, "1"])
def test_a_seed_is_a_whole_number(store, seed):
    with pytest.raises(ValueError, match="a seed must be a whole number of at least 0"):
        store.path(UNIT._replace(seed=seed))


def test_results_made_with_the_same_are_added_to(store):
    store.check(EXPERIMENT, "quick", SETTINGS)
    write(store)
    store.check(EXPERIMENT, "quick", SETTINGS)


def test_results_of_other_experiments_do_not_matter(store):
    write(store, unit=UNIT._replace(experiment="other"), origin=ORIGIN._replace(revision=5))
    store.check(EXPERIMENT, "quick", SETTINGS)


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        (ORIGIN._replace(preset="cpu"), r": preset: 'cpu' -> 'quick'\. Results"),
        (ORIGIN._replace(revision=2), r": revision: 2 -> 1\. Results"),
        (
            ORIGIN._replace(settings={"scale": 0.25, "old": 1, "sizes": [1, 2]}),
            r": old of the settings: 1 -> None; scale of the settings: 0.25 -> 0.5\. Results",
        ),
        (
            ORIGIN._replace(versions=ORIGIN.versions | {"jax": "0.1"}),
            r": jax of the versions: '0.1' -> '[0-9.]+'\. Results",
        ),
    ],
)
def test_results_made_with_something_else_are_refused_by_name(store, origin, message):
    write(store)
    write(store, unit=UNIT._replace(seed=9), origin=origin)
    with pytest.raises(ValueError, match=message) as error:
        store.check(EXPERIMENT, "quick", SETTINGS)
    assert "choose another --out" in str(error.value)


def test_a_raised_revision_separates_results(store):
    write(store)
    with pytest.raises(ValueError, match="revision: 1 -> 2"):
        store.check(replace(EXPERIMENT, revision=2), "quick", SETTINGS)
