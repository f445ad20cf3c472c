import errno
import io
import os
import platform
import re
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


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    def fill(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=re.escape(f"device: '{tmp_path / 'x'}'")):
        files.write(tmp_path / "x", fill)
    with pytest.raises(FileNotFoundError, match=re.escape(f"directory: '{tmp_path / 'no' / 'x'}'")):
        files.write_text(tmp_path / "no" / "x", "")


def test_several_files_are_replaced_when_all_are_there(tmp_path):
    files.write_text(tmp_path / "a", "old a")
    files.write_text(tmp_path / "other", "other")
    with files.together(tmp_path) as folder:
        files.write_text(folder / "a", "new a")
        (folder / "b").write_text("new b")
        assert (tmp_path / "a").read_text() == "old a"
        assert not (tmp_path / "b").exists()
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"a": "new a", "b": "new b", "other": "other"}


def test_none_of_several_files_is_replaced_where_one_fails(tmp_path):
    files.write_text(tmp_path / "a", "old a")

    def write():
        with files.together(tmp_path) as folder:
            files.write_text(folder / "a", "new a")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=re.escape(f"device: '{tmp_path}'")):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old a"


def test_a_folder_can_be_held_once(tmp_path):
    with files.locked(tmp_path):
        with pytest.raises(files.LockedError) as error, files.locked(tmp_path):
            pass
        with files.locked(tmp_path.parent):
            pass
    assert str(error.value) == (
        f"{tmp_path} is in use: process {os.getpid()} on {platform.node()} writes its results "
        "there; wait until it has ended, or choose another folder."
    )
    with files.locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_deleted_while_it_is_opened_locks_nobody_out(tmp_path, monkeypatch):
    opened, holder = os.open, files.locked(tmp_path)
    holder.__enter__()

    def ended_meanwhile(*arguments):
        handle = opened(*arguments)
        monkeypatch.setattr(os, "open", opened)
        holder.__exit__(None, None, None)
        return handle

    monkeypatch.setattr(os, "open", ended_meanwhile)
    with files.locked(tmp_path), pytest.raises(files.LockedError), files.locked(tmp_path):
        pass


def test_what_killed_processes_have_left_is_removed_and_nothing_else(tmp_path):
    left = [".fit.npz.abcdefgh.part", ".rvrs-abcdefgh.part", "one/two/.seed-0.json.x.part"]
    kept = [".other.npz.abcdefgh.part", "fit.npz", "fit.npz.part", "one/.seed-0.json.x.part"]
    for name in left + kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / left[1]).unlink()
    (tmp_path / left[1]).mkdir()
    (tmp_path / left[1] / "fit.png").touch()
    with files.locked(tmp_path, "fit.npz", "*/*/seed-*"):
        found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*kept, ".rvrs.lock"}


@pytest.mark.parametrize("reason", ["no fcntl", "no locks"])
def test_where_there_are_no_locks_nothing_is_held_and_nothing_removed(
    tmp_path, monkeypatch, reason
):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if reason == "no fcntl":
        monkeypatch.setattr(files, "fcntl", None)
    else:
        monkeypatch.setattr(files.fcntl, "flock", refuse)
    (tmp_path / ".x.part").touch()
    with files.locked(tmp_path, "x"), files.locked(tmp_path, "x"):
        assert (tmp_path / ".x.part").exists()


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


@pytest.mark.parametrize(
    "array",
    [
        np.array([0, 2], np.uint8).view(bool),
        np.array([0x110000], np.uint32).view("U1"),
        np.array([0xD800], np.uint32).view("U1"),
    ],
)
def test_bytes_that_are_no_values_of_their_type_are_refused(array, tmp_path):
    path = tmp_path / "arrays.npz"
    write_zip(path, [("x.npy", npy(array))])
    with pytest.raises(files.DamagedError, match=r"truth values|not Unicode"):
        files.read_arrays(path)


def test_json_is_read_with_the_numbers_that_only_python_has():
    assert files.parse_json(b'{"a": [1, Infinity], "b": "\xc3\xa4"}') == {
        "a": [1, float("inf")],
        "b": "ä",
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1, "a": 1}',
        b'{"b": {"a": 1, "a": 2}}',
        b"[" * 101 + b"]" * 101,
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 101 + b"1" + b"}" * 101,
        b"9" * 5000,
    ],
)
def test_a_text_that_is_not_json_or_ambiguous_or_deep_is_refused(content):
    with pytest.raises(files.DamagedError):
        files.parse_json(content)


def test_json_may_be_nested_more_than_anything_that_is_written():
    assert files.parse_json(b"[" * 99 + b"]" * 99)
