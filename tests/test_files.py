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


def test_arrays_of_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Object arrays"):
        files.write_arrays(tmp_path / "arrays.npz", {"x": np.array([object()])})
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_as_readable_as_others(tmp_path):
    files.write_text(tmp_path / "ours", "x")
    (tmp_path / "other").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode
