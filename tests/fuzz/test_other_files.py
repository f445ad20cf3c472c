"""What is no plain file is refused at once: nobody waits for a pipe, or reads without end."""

import contextlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rvrs import datasets, files, model_file, storage
from rvrs.experiments.store import Store
from tests.fuzz import hostile, loaders
from tests.fuzz.hostile import End, Member, container, npy
from tests.fuzz.watch import watched

READERS = {
    "arrays": files.read_arrays,
    "bytes": files.read_bytes,
    "storage": storage.read,
    "npz": lambda path: model_file.read_data(path.with_suffix(".npz")),
    "csv": lambda path: model_file.read_data(path.with_suffix(".csv")),
    "data set": lambda path: datasets._read(path, datasets._FILES["adult"]),
    "images": datasets._read_images,
}
REFUSED = (OSError, files.DamagedError, storage.CheckpointError, model_file.UserFileError)


def make(kind, path):
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "terminal":
            path.symlink_to("/dev/tty")
        case "loop":
            path.symlink_to(path)
        case "nothing":
            path.symlink_to(path.with_name("nothing"))
        case "socket":
            os.mknod(path, 0o140600)


KINDS = ["pipe", "folder", "device", "terminal", "loop", "nothing", "socket"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_at_once(name, kind, tmp_path):
    for path in (tmp_path / "x.npz", tmp_path / "x.csv"):
        make(kind, path)
    with watched(code=True, seconds=5) as effort, pytest.raises(REFUSED):
        READERS[name](tmp_path / "x.npz")
    assert effort.peak < 10**6


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_no_file_is_refused_at_once(kind, tmp_path):
    store = Store(tmp_path)
    path = store.path(loaders.UNIT)
    path.parent.mkdir(parents=True)
    make(kind, path)
    with watched(code=True, seconds=5) as effort, pytest.raises((OSError, ValueError)):
        store.read(loaders.UNIT)
    assert effort.peak < 10**6


def test_a_link_to_a_file_is_that_file(tmp_path):
    files.write_arrays(tmp_path / "x.npz", {"x": np.ones(2)})
    (tmp_path / "link.npz").symlink_to("x.npz")
    np.testing.assert_array_equal(files.read_arrays(tmp_path / "link.npz")["x"], np.ones(2))


def test_names_lead_nowhere(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    names = ["../escaped.npy", "/tmp/absolute.npy", "a/../../b.npy", "..\\c.npy"]
    path = folder / "x.npz"
    path.write_bytes(container([Member(name, npy(np.arange(4.0))) for name in names]))
    with watched(code=False):
        assert len(files.read_arrays(path)) == len(names)
    assert [entry.name for entry in tmp_path.rglob("*")] == ["inside", "x.npz"]


def test_a_directory_of_millions_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(container([Member("x.npy", npy(np.arange(4.0)), times=200_000)]))
    with watched(code=False) as effort, pytest.raises(files.DamagedError, match="directory"):
        files.read_arrays(path)
    assert effort.peak < 10**6


@pytest.mark.parametrize("compressed", [False, True])
def test_members_that_share_their_bytes_are_refused(compressed, tmp_path):
    path = tmp_path / "x.npz"
    member = Member("x.npy", npy(np.zeros(100_000)), 8 if compressed else 0)
    members = [member, *[member._replace(name="y.npy", content=b"", offset=0)] * 20]
    path.write_bytes(container(members))
    with watched(code=False) as effort, pytest.raises(files.DamagedError):
        files.read_arrays(path, compressed=compressed)
    assert effort.peak < 3 * 10**6


def test_what_is_compressed_may_grow_so_much_and_no_more(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros(files.UNPACKED_ANYWAY // 8 - 1000))
    assert files.read_arrays(path, compressed=True)["x"].size > 0
    np.savez_compressed(path, x=np.zeros(files.UNPACKED_ANYWAY // 8))
    with watched(code=False) as effort, pytest.raises(files.DamagedError, match="compression"):
        files.read_arrays(path, compressed=True)
    assert effort.peak < 10**6
    # However many bytes, if they are not more than these times the file's.
    noise = np.random.default_rng(0).integers(0, 4, 2 * files.UNPACKED_ANYWAY, np.uint8)
    np.savez_compressed(path, x=noise)
    np.testing.assert_array_equal(files.read_arrays(path, compressed=True)["x"], noise)
    with pytest.raises(files.DamagedError, match="compressed"):
        files.read_arrays(path)


def test_no_header_takes_long(tmp_path):
    path = tmp_path / "x.npz"
    for header in hostile.HEADERS:
        path.write_bytes(container([Member("x.npy", npy(np.arange(4.0), header=header))]))
        with watched(code=False) as effort:
            try:
                found = files.read_arrays(path)
            except files.DamagedError:
                continue
        assert found["x"].shape == (4,)
        assert effort.seconds < 0.5


def test_a_pickle_would_have_run_and_does_not(tmp_path, monkeypatch):
    # The payload works: what follows is no test of a dud.
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.npz"
    content = npy(np.frombuffer(hostile.PICKLED, np.uint8), "'|O'", shape="(1,)")
    path.write_bytes(container([Member("x.npy", content)], End()))
    with np.load(path, allow_pickle=True) as archive:
        archive["x"]
    assert hostile.MARKER.exists()
    hostile.MARKER.unlink()
    for name in ("arrays", "storage", "npz", "data set", "images"):
        with watched(code=name == "npz"), pytest.raises((*REFUSED, ValueError)):
            READERS[name](path)
    assert not hostile.MARKER.exists()


def test_a_table_of_short_lines_or_many_columns_takes_little_memory_and_time(tmp_path):
    path = tmp_path / "x.csv"
    # Names are told apart in one go, not by comparing each with all others.
    wide = ",".join(f"x{i}" for i in range(20_000)) + "\n"
    for text in ("x\n" + "\n" * 10**5, "x\n" + "1\n" * 20_000, wide):
        path.write_text(text)
        with watched(code=True) as effort, contextlib.suppress(model_file.UserFileError):
            model_file.read_data(path)
        assert effort.peak < 64 * len(text)
        assert effort.seconds < 3


@pytest.mark.parametrize("kind", ["f16", "M8[s]", "S3", "V4"])
def test_what_could_not_be_read_again_is_not_written(kind, tmp_path):
    with pytest.raises(ValueError, match=r"x: arrays of .* cannot be stored"):
        files.write_arrays(tmp_path / "x.npz", {"x": np.zeros(2, kind)})
    assert list(tmp_path.iterdir()) == []


KINDS_OF_ARRAYS = ["b1", "i1", "u2", ">i4", "u8", "f2", ">f4", "f8", "c8", "c16", "U3", ">U2"]


@pytest.mark.parametrize("kind", KINDS_OF_ARRAYS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 2), (2, 1, 2)])
def test_all_other_arrays_come_back_bit_for_bit(kind, shape, tmp_path):
    path = tmp_path / "x.npz"
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(kind)
    for given in (array, array.T, np.asfortranarray(array)):
        files.write_arrays(path, {"x": given})
        got = files.read_arrays(path)["x"]
        np.testing.assert_array_equal(got, given)
        assert got.dtype == given.dtype
        assert zipfile.ZipFile(path).testzip() is None
    assert Path(path).exists()
