import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from rvrs import files


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "text.md"
    files.write_text(path, "old")
    files.write_text(path, "ü")
    assert path.read_bytes() == "ü".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stays_where_writing_fails(tmp_path):
    path = tmp_path / "text.md"
    files.write_text(path, "old")

    def fill(file):
        file.write(b"half of the new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write(path, fill)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_arrays_of_any_name_come_back(tmp_path):
    path = tmp_path / "arrays.npz"
    files.write_arrays(path, {"file": np.arange(3), "a/b": np.float32(2.5)})
    with np.load(path, allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["file"], np.arange(3))
        assert stored["a/b"] == np.float32(2.5)
    stored = files.read_arrays(path)
    np.testing.assert_array_equal(stored["file"], np.arange(3))
    assert stored["a/b"] == np.float32(2.5)
    assert stored["a/b"].shape == ()


def test_arrays_of_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Object arrays"):
        files.write_arrays(tmp_path / "arrays.npz", {"x": np.array([object()])})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_as_readable_as_others(tmp_path):
    files.write_text(tmp_path / "ours", "x")
    (tmp_path / "other").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


# A file may cost no more than this beyond its own size when it is refused.
MODEST = 2_000_000


def npy(array, shape=None, descr=None):
    """The bytes of an array, which may claim another shape or type."""
    content = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    header["shape"] = array.shape if shape is None else shape
    header["descr"] = header["descr"] if descr is None else descr
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue() + array.tobytes()


def write_zip(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as container:
        for name, content in members:
            container.writestr(name, content)


SMALL = np.arange(4.0)
HOSTILE = {
    "absurd shape": [("x.npy", npy(SMALL, shape=(10**15,)))],
    "shape that overflows": [("x.npy", npy(SMALL, shape=(2**62, 2**62)))],
    "shape with more zeros than sense": [("x.npy", npy(SMALL, shape=(0, 10**18)))],
    "negative shape": [("x.npy", npy(SMALL, shape=(-4,)))],
    "shape that is negative twice": [("x.npy", npy(SMALL, shape=(-2, -2)))],
    "elements without size": [("x.npy", npy(np.zeros(0), shape=(10**15,), descr="|V0"))],
    "pickled objects": [("x.npy", npy(SMALL, descr="|O"))],
    "less than it claims": [("x.npy", npy(SMALL, shape=(5,)))],
    "more than it claims": [("x.npy", npy(SMALL, shape=(3,)))],
    "no array": [("x.npy", b"import os")],
    "header that is code": [("x.npy", npy(SMALL).replace(b"(4,)", b"f()"))],
    "unknown version": [("x.npy", npy(SMALL).replace(b"NUMPY\x01", b"NUMPY\x09"))],
    "one name for two": [("x.npy", npy(SMALL)), ("x", npy(SMALL))],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_before_memory_is_allocated(case, tmp_path):
    path = tmp_path / "arrays.npz"
    write_zip(path, HOSTILE[case])
    refuse_modestly(path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "arrays.npz"
    write_zip(path, [("x.npy", npy(np.zeros(10**7)))], zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**6
    refuse_modestly(path)


def refuse_modestly(path):
    tracemalloc.start()
    try:
        with pytest.raises(files.DamagedError):
            files.read_arrays(path)
        assert tracemalloc.get_traced_memory()[1] < MODEST
    finally:
        tracemalloc.stop()


def test_names_that_lead_elsewhere_are_names_and_nothing_else(tmp_path):
    path = tmp_path / "inside" / "arrays.npz"
    path.parent.mkdir()
    write_zip(path, [("../escaped.npy", npy(SMALL)), ("/absolute.npy", npy(SMALL))])
    assert set(files.read_arrays(path)) == {"../escaped", "/absolute"}
    assert [entry.name for entry in tmp_path.rglob("*")] == ["inside", "arrays.npz"]


def mutate(random, content):
    """A copy with bytes changed, cut out, doubled or cut off."""
    content = bytearray(content)
    for _ in range(random.integers(1, 4)):
        start, length = random.integers(len(content)), random.integers(1, 9)
        match random.integers(4):
            case 0:
                content[start] ^= 1 << random.integers(8)
            case 1:
                content[start : start + length] = random.bytes(length)
            case 2:
                content[start:start] = content[start : start + length]
            case 3:
                del content[start : start + length]
    return bytes(content)


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_damage_does_more_than_be_refused(count, tmp_path):
    path = tmp_path / "arrays.npz"
    files.write_arrays(path, {"x": np.arange(6.0).reshape(2, 3), "y": np.array([1, 2], np.uint32)})
    content, random = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(count):
        path.write_bytes(mutate(random, content))
        try:
            arrays = files.read_arrays(path)
        except files.DamagedError:
            refused += 1
        else:
            assert all(array.nbytes <= len(content) + 100 for array in arrays.values())
    assert refused > count / 2
