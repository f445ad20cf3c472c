"""Where data points are, of one device or of any; what eight devices do is in tests/scaling."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from rvrs import spread
from rvrs.spread import Shard, Spread
from tests import several


def mesh(name="data"):
    return jax.make_mesh((1,), (name,), devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, r"mesh must be a jax.sharding.Mesh, e.g. jax.make_mesh\(.*\), got None"),
        (8, "mesh must be a jax.sharding.Mesh"),
        (jax.devices(), "mesh must be a jax.sharding.Mesh"),
        ("data", "mesh must be a jax.sharding.Mesh"),
        (Mesh(np.array(jax.devices()[:1]), "data").abstract_mesh, "must be a jax.sharding.Mesh"),
        (
            Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model")),
            r"mesh must have one axis, got \('data', 'model'\); make one of all devices",
        ),
        (Mesh(np.array(jax.devices()[0]), ()), r"mesh must have one axis, got \(\)"),
        (Mesh(np.array([], object), ("data",)), "mesh has no device of process 0"),
    ],
)
def test_what_is_no_mesh_of_one_axis_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        spread.check(wrong)


def test_a_mesh_without_a_device_of_this_process_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    message = r"mesh has no device of process 3; make it of jax.devices\(\) of all processes"
    with pytest.raises(ValueError, match=message):
        spread.check(mesh())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_any_kind_of_axis_becomes_one_of_the_usual_kind(kind):
    found = spread.check(jax.make_mesh((1,), ("rows",), axis_types=(kind,)))
    assert found.axis_names == ("rows",)
    assert list(found.devices) == jax.devices()[:1]
    assert found.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 203])
@pytest.mark.parametrize("parts", [1, 2, 7, 8])
def test_parts_of_a_number_differ_by_one_at_most(count, parts):
    found = spread._divide(count, parts)
    assert len(found) == parts
    assert sum(found) == count
    assert max(found) - min(found) <= 1


def over(monkeypatch, processes, rows, batch_sizes):
    """In each of several processes; ``processes`` has that of every device."""
    devices = np.array([SimpleNamespace(process_index=number) for number in processes])
    fake = SimpleNamespace(devices=devices, axis_names=("data",))

    def run(number):
        return spread.over(fake, rows[number], batch_sizes[number])

    return several.processes(monkeypatch, len(rows), run)


def test_points_go_to_the_devices_of_their_process_in_whatever_order_these_are(monkeypatch):
    first, second = over(monkeypatch, [0, 1, 1, 0, 1, 0], (10, 20), (12, 12))
    assert first.shards == (Shard(0, 0, 4), Shard(3, 4, 3), Shard(5, 7, 3))
    assert second.shards == (Shard(1, 0, 7), Shard(2, 7, 7), Shard(4, 14, 6))
    for found in (first, second):
        assert (found.smallest, found.largest, found.num_points) == (3, 7, 30)
        assert found.num_devices == 6
        wanted = np.array([4, 7, 7, 3, 6, 3]) * 6 / 30
        np.testing.assert_allclose(found.weights_of_all, wanted, rtol=1e-15)


@pytest.mark.parametrize(
    ("processes", "rows"),
    [([0], (5,)), ([0] * 8, (203,)), ([0, 1], (101, 102)), ([1, 0, 0, 1], (4, 99))],
)
def test_weights_average_one_and_make_every_point_count_alike(monkeypatch, processes, rows):
    for found in over(monkeypatch, processes, rows, [len(processes)] * len(rows)):
        weights = np.array(found.weights_of_all)
        np.testing.assert_allclose(weights.mean(), 1, rtol=1e-14)
        # A batch has a point of a device with a probability of one over its points.
        sizes = weights * sum(rows) / len(processes)
        own = [sizes[shard.number] for shard in found.shards]
        np.testing.assert_allclose(own, [shard.size for shard in found.shards], rtol=1e-14)
        assert (sizes.min(), sizes.max()) == pytest.approx((found.smallest, found.largest))
        assert found.num_points == sum(rows)


@pytest.mark.parametrize(
    ("processes", "batch_sizes"), [([0, 0, 1, 1], (4, 8)), ([0, 1, 1, 1], (4, 4))]
)
def test_processes_that_disagree_are_told(monkeypatch, processes, batch_sizes):
    for error in over(monkeypatch, processes, (10, 20), batch_sizes):
        with pytest.raises(ValueError, match="disagree about batch_size or the number of their"):
            raise error


@pytest.mark.parametrize(("batch_size", "instead"), [(1, 4), (3, 4), (5, 4), (7, 8), (11, 12)])
def test_a_batch_that_devices_do_not_divide_is_refused(monkeypatch, batch_size, instead):
    for error in over(monkeypatch, [0, 0, 1, 1], (10, 20), (batch_size, batch_size)):
        message = rf"batch_size={batch_size} is not .* 4 devices .* e.g. batch_size={instead}\.$"
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_batch_of_more_than_the_smallest_share_is_refused_in_all_processes(monkeypatch):
    processes, rows = [0, 0, 1, 1], (5, 20)
    assert [found.smallest for found in over(monkeypatch, processes, rows, (8, 8))] == [2, 2]
    for error in over(monkeypatch, processes, rows, (12, 12)):
        message = "takes 3 data points from every device of the mesh, but one has only 2"
        with pytest.raises(ValueError, match=message):
            raise error


def test_points_of_one_device_are_all_its_own():
    found = spread.over(mesh(), 7, 3)
    assert found[1:] == ("data", (Shard(0, 0, 7),), 7, 7, 7, (1.0,))
    assert found.num_devices == 1
    # It is part of what programs are found by.
    assert hash(found) == hash(spread.over(mesh(), 7, 3))
    assert found != spread.over(mesh(), 8, 3)


def test_specs_name_the_axis_of_rows_alone():
    found = spread.over(mesh("rows"), 7, 3).specs({"none": -1, "first": 0, "later": (1, 2)})
    assert found == {
        "none": PartitionSpec(),
        "first": PartitionSpec("rows"),
        "later": (PartitionSpec(None, "rows"), PartitionSpec(None, None, "rows")),
    }


def rows_of(num_rows):
    random = np.random.default_rng(0)
    arrays = {
        "float": random.normal(size=(num_rows, 2)).astype(np.float32),
        "whole": np.arange(num_rows, dtype=np.int32),
        "second": random.random((4, num_rows)) < 0.5,
        "shared": np.array(3.0, np.float32),
    }
    return arrays, {"float": 0, "whole": 0, "second": 1, "shared": -1}


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_rows_go_to_a_device_and_come_back_without_what_was_added_to_shorter_shares(padding):
    arrays, axes = rows_of(5)
    found = Spread(mesh(), "data", (Shard(0, 0, 5),), 5, 5 + padding, 5, (1.0,))
    placed = found.place(arrays, axes)
    assert {name: leaf.shape for name, leaf in placed.items()} == {
        "float": (5 + padding, 2),
        "whole": (5 + padding,),
        "second": (4, 5 + padding),
        "shared": (),
    }
    # Rows that are there, so that no computation on them fails.
    np.testing.assert_array_equal(placed["whole"][5:], [4] * padding)
    back = found.fetch(placed, axes)
    for name, leaf in arrays.items():
        assert type(back[name]) is np.ndarray
        assert back[name].dtype == leaf.dtype
        np.testing.assert_array_equal(back[name], leaf)


def test_arrays_on_every_device_come_back():
    arrays = [rows_of(5)[0], jnp.arange(3), np.zeros((0, 2)), jnp.array(True)]
    placed = spread.replicate(mesh(), arrays)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))
    back = spread.fetch(placed)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(arrays), strict=True):
        assert type(found) is np.ndarray
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == jnp.asarray(wanted).dtype


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_typed_keys_stay_the_keys_that_they_are(impl, shape):
    data = np.arange(np.prod((*shape, 4)), dtype=np.uint32).reshape(*shape, 4)
    data = data[..., : 2 if impl == "threefry2x32" else 4]
    key = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    (placed,) = spread.replicate(mesh(), (key,))
    assert placed.dtype == key.dtype
    assert placed.sharding.is_fully_replicated
    np.testing.assert_array_equal(jax.random.key_data(placed), data)


def test_what_is_no_array_stays_as_it_is():
    function = object()
    leaves = {
        "count": 3,
        "rate": 0.5,
        "flag": True,
        "name": "x",
        "function": function,
        "none": None,
    }
    found = spread.replicate(mesh(), leaves | {"x": np.ones(2)})
    assert found.pop("x").shape == (2,)
    assert found == leaves
    assert {type(leaf) for leaf in found.values()} == {type(leaf) for leaf in leaves.values()}


def test_what_one_process_has_found_is_all_that_there_is():
    tree = {"a": np.ones(2)}
    (found,) = spread.of_all_processes(tree, {"a": 0})
    assert found is tree


def test_what_several_processes_have_found_is_the_same_in_all_and_of_its_own_size(monkeypatch):
    trees = [
        {"rows": np.arange(2.0 * size).reshape(size, 2) + size, "figure": np.float32(size)}
        for size in (3, 0, 5)
    ]
    axes = {"rows": 0, "figure": -1}
    for parts in several.processes(
        monkeypatch, 3, lambda number: spread.of_all_processes(trees[number], axes)
    ):
        for part, tree in zip(parts, trees, strict=True):
            np.testing.assert_array_equal(part["rows"], tree["rows"])
            assert part["figure"] == tree["figure"]
