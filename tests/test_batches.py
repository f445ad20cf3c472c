"""Batches of data points: who is in which, and what of the data is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs.batches import Batches, pick
from rvrs.spread import Shard

X = np.arange(46.0, dtype=np.float32).reshape(23, 2)
Y = np.arange(23, dtype=np.int32) * 10


def batches(num_points=23, batch_size=5, seed=(3, 7), arguments=((X,), {"y": Y, "n": 4})):
    # Leaves in the order of jax.tree: positional arguments, then keywords by name.
    return Batches(arguments, (0, 2), num_points, batch_size, seed)


def epoch(data, number):
    return data.indices(number * data.per_epoch, data.per_epoch)


def test_no_point_comes_twice_within_an_epoch():
    data = batches()
    assert data.per_epoch == 4
    for number in range(10):
        points = epoch(data, number)
        assert points.shape == (4, 5)
        assert len(np.unique(points)) == 20
        assert points.min() >= 0
        assert points.max() < 23


def test_an_epoch_without_leftovers_has_every_point_once():
    points = epoch(batches(num_points=20), 3)
    np.testing.assert_array_equal(np.sort(points.ravel()), np.arange(20))


def test_one_batch_may_have_all_points():
    data = batches(batch_size=23)
    assert data.per_epoch == 1
    np.testing.assert_array_equal(np.sort(data.indices(5, 2), axis=1), [np.arange(23)] * 2)


def test_leftovers_have_their_turn_in_other_epochs_as_often_as_all_others():
    data, num_epochs = batches(), 2000
    counts = np.bincount(data.indices(0, num_epochs * data.per_epoch).ravel(), minlength=23)
    # Without replacement a point is in an epoch with probability 20 / 23.
    share = 20 / 23
    z = (counts - num_epochs * share) / np.sqrt(num_epochs * share * (1 - share))
    assert np.all(np.abs(z) < 4), z


def test_places_within_an_epoch_are_random():
    data, num_epochs = batches(num_points=20), 2000
    places = np.argsort([epoch(data, n).ravel() for n in range(num_epochs)], axis=1)
    z = (places.mean(0) - 9.5) / np.sqrt((20**2 - 1) / 12 / num_epochs)
    assert np.all(np.abs(z) < 4), z


def test_batches_depend_on_the_seed_and_their_number_alone():
    data = batches()
    whole = data.indices(0, 10)
    # Parts within an epoch, across its end, and of several epochs.
    for start, length in [(0, 1), (3, 1), (3, 4), (4, 4), (1, 9), (9, 1)]:
        np.testing.assert_array_equal(data.indices(start, length), whole[start : start + length])
    np.testing.assert_array_equal(batches(arguments=((), {})).indices(0, 10), whole)


def test_epochs_and_seeds_differ():
    data = batches()
    assert not np.array_equal(epoch(data, 0), epoch(data, 1))
    for seed in [(3, 8), (4, 7), (7, 3)]:
        assert not np.array_equal(batches(seed=seed).indices(0, 4), data.indices(0, 4)), seed


def test_indices_are_of_the_type_that_jax_has():
    assert batches().indices(0, 3).dtype == np.int32


@pytest.mark.parametrize("index", [[4], [22, 0, 4], [[1, 2, 2], [9, 1, 0]]])
def test_take_has_the_rows_of_the_points_in_place_of_all(index):
    index = np.array(index)
    (x,), kwargs = batches().take(index)
    np.testing.assert_array_equal(x, X[index])
    np.testing.assert_array_equal(kwargs["y"], Y[index])
    assert (x.dtype, kwargs["y"].dtype) == (X.dtype, Y.dtype)
    assert x.shape == (*index.shape, 2)
    assert kwargs["n"] == 4


def test_arguments_that_are_not_of_the_points_stay_as_they_are():
    shared = jnp.ones(23)
    data = Batches(((shared, Y), {}), (1,), 23, 5, (0,))
    (first, rows), _ = data.take(np.array([2]))
    assert first is shared
    np.testing.assert_array_equal(rows, [20])
    by_index = Batches(((shared, Y), {}), (), 23, 5, (0,))
    (first, second), _ = by_index.take(np.array([2]))
    assert first is shared
    assert second is Y


class CountingMap(np.memmap):
    """A memory map that knows how many of its rows were asked for."""

    rows_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountingMap.rows_read += len(found)
        return found


def test_of_a_memory_map_only_the_rows_of_the_batch_are_read(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    wanted = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    wanted.tofile(path)
    x = CountingMap(path, np.float32, "r", shape=wanted.shape)
    monkeypatch.setattr(CountingMap, "rows_read", 0)
    data = Batches(((x,), {}), (0,), 1000, 4, (0,))
    index = data.indices(0, 2)
    (got,), _ = data.take(index)
    assert CountingMap.rows_read == 8
    np.testing.assert_array_equal(got, wanted[index])
    # Rows in memory, not a window of the file.
    assert type(got) is np.ndarray
    assert not np.shares_memory(got, x)


def test_pick_has_one_of_several_batches():
    data = batches()
    index = data.indices(2, 3)
    chunk = data.take(index)
    for number in range(3):
        (x,), kwargs = pick(data.row_leaves, chunk, jnp.asarray(number))
        np.testing.assert_array_equal(x, X[index[number]])
        np.testing.assert_array_equal(kwargs["y"], Y[index[number]])
        assert kwargs["n"] == 4


def test_pick_can_be_traced():
    data = batches()
    index = data.indices(0, 3)
    (x,), kwargs = data.take(index)
    arrays = jax.tree.map(jnp.asarray, ((x,), {"y": kwargs["y"]}))
    picked = jax.jit(lambda number: pick((0, 1), arrays, number))(2)
    np.testing.assert_array_equal(picked[0][0], X[index[2]])
    np.testing.assert_array_equal(picked[1]["y"], Y[index[2]])


def test_bytes_are_those_of_the_rows_of_one_point():
    # Two floats and one integer of four bytes each.
    assert batches().row_bytes == 12
    assert Batches(((X, Y), {}), (), 23, 5, (0,)).row_bytes == 0


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 23], "points must be from 0 to 22, got 0 to 23"),
        ([-1, 4], "points must be from 0 to 22, got -1 to 4"),
        ([[1, 2]], "points must be a list of whole numbers"),
        (3, "points must be a list of whole numbers"),
        ([1.0], "points must be a list of whole numbers"),
        ([True, False], "points must be a list of whole numbers"),
        (np.zeros(0, int), "points must be a list of whole numbers"),
    ],
)
def test_indices_of_points_that_there_are_not_are_refused(index, message):
    with pytest.raises(ValueError, match=message):
        batches().check_index("points", np.asarray(index))


def test_the_first_and_the_last_point_are_points():
    batches().check_index("points", np.array([22, 0], np.int64))
    batches().check_index("points", np.array([0], np.uint8))


# Two of four devices are those of this process; the smallest of all has 7 points.
SHARDS = (Shard(1, 0, 12), Shard(2, 12, 11))


def spread_out(shards=SHARDS, size=3, per_epoch=2, seed=(3, 7)):
    num_points = sum(shard.size for shard in shards)
    return Batches(((), {}), (), num_points, size * len(shards), seed, shards, per_epoch)


def columns(data, start, length):
    """Points of every shard in batches ``start`` to ``start + length``."""
    return np.split(data.indices(start, length), len(data.shards), axis=1)


def test_every_device_has_its_share_of_every_batch_in_its_own_columns():
    data = spread_out()
    assert data.indices(0, 9).shape == (9, 6)
    assert data.indices(0, 9).dtype == np.int32
    for shard, points in zip(SHARDS, columns(data, 0, 9), strict=True):
        assert points.shape == (9, 3)
        assert points.min() >= shard.start
        assert points.max() < shard.start + shard.size


def test_no_point_of_a_device_comes_twice_within_an_epoch():
    data = spread_out()
    assert data.per_epoch == 2
    for number in range(20):
        for points in columns(data, 2 * number, 2):
            assert len(np.unique(points)) == 6


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_epoch_of_devices_without_leftovers_has_every_point_once(size):
    shards = (Shard(0, 0, 8), Shard(1, 8, 8), Shard(2, 16, 8))
    data = spread_out(shards, size, 8 // size)
    np.testing.assert_array_equal(np.sort(epoch(data, 3).ravel()), np.arange(24))


def test_leftovers_of_a_device_have_their_turn_as_often_as_its_other_points():
    data, num_epochs = spread_out(), 2000
    counts = np.bincount(data.indices(0, num_epochs * 2).ravel(), minlength=23)
    share = np.repeat([6 / 12, 6 / 11], [12, 11])
    z = (counts - num_epochs * share) / np.sqrt(num_epochs * share * (1 - share))
    assert np.all(np.abs(z) < 4), z


def test_places_are_rows_on_the_device_of_the_point():
    data = spread_out()
    index = data.indices(0, 9)
    places = data.places(index)
    assert (places.shape, places.dtype) == (index.shape, index.dtype)
    first, second = np.split(places, 2, axis=1)
    np.testing.assert_array_equal(first, index[:, :3])
    np.testing.assert_array_equal(second, index[:, 3:] - 12)
    # All of their rows, from the first to the last.
    many = np.split(data.places(data.indices(0, 100)), 2, axis=1)
    assert [set(rows.ravel()) for rows in many] == [set(range(12)), set(range(11))]


def test_places_of_points_that_are_all_on_one_device_are_these_points():
    index = batches().indices(0, 9)
    assert batches().places(index) is index


def test_the_order_of_a_device_depends_on_no_other_device():
    first, second = columns(spread_out(), 0, 9)
    # Others with more or fewer points, before it or in other processes.
    for shards, column in [
        ((Shard(1, 0, 20), Shard(2, 20, 11)), 1),
        ((Shard(2, 0, 11),), 0),
        ((Shard(0, 0, 7), Shard(1, 7, 12), Shard(2, 19, 11), Shard(3, 30, 9)), 2),
    ]:
        found = columns(spread_out(shards), 0, 9)[column]
        np.testing.assert_array_equal(found - shards[column].start, second - 12)
    np.testing.assert_array_equal(columns(spread_out((Shard(1, 0, 12),)), 0, 9)[0], first)


def test_devices_with_as_many_points_have_orders_of_their_own():
    shards = tuple(Shard(number, 9 * number, 9) for number in range(4))
    data = spread_out(shards, 3, 3)
    orders = [
        tuple((points - shard.start).ravel())
        for number in range(4)
        for points, shard in zip(columns(data, 3 * number, 3), shards, strict=True)
    ]
    assert len(set(orders)) == 16


def test_batches_of_devices_depend_on_the_seed_and_their_number_alone():
    data = spread_out()
    whole = data.indices(0, 10)
    for start, length in [(0, 1), (1, 1), (1, 4), (2, 4), (1, 9), (9, 1)]:
        np.testing.assert_array_equal(data.indices(start, length), whole[start : start + length])
    assert not np.array_equal(spread_out(seed=(3, 8)).indices(0, 10), whole)


def test_without_devices_batches_are_those_that_they_have_always_been():
    # By hand: a permutation per epoch, cut into batches.
    data = batches()
    assert data.shards == ()
    assert data.per_epoch == 4
    for number in range(3):
        order = np.random.default_rng([3, 7, number]).permutation(23)
        np.testing.assert_array_equal(epoch(data, number), order[:20].reshape(4, 5))
    # Frozen, so that a stored fit goes on with the batches that it has begun with.
    np.testing.assert_array_equal(data.indices(0, 1), [[3, 9, 11, 18, 15]])
