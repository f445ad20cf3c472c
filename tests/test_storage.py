import json
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rvrs import storage
from rvrs.storage import Checkpoint


@pytest.fixture
def checkpoint():
    arrays = {"run[0].x": np.arange(6.0).reshape(2, 3), "keys[0]": np.array([1, 2], np.uint32)}
    return Checkpoint({"proposal": "mvn", "settings": {"prior": -1.25}}, arrays)


@pytest.fixture
def path(tmp_path, checkpoint):
    path = tmp_path / "fit.npz"
    storage.write(path, checkpoint)
    return path


def test_what_is_written_is_read_bit_for_bit(path, checkpoint):
    got = storage.read(path)
    assert got.header["proposal"] == "mvn"
    assert got.header["settings"] == {"prior": -1.25}
    assert got.arrays.keys() == checkpoint.arrays.keys()
    for name, array in checkpoint.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array)
        assert got.arrays[name].dtype == array.dtype


def test_a_file_is_replaced_whole_and_nothing_else_is_left(path, checkpoint):
    storage.write(path, Checkpoint({"proposal": "diagonal"}, checkpoint.arrays))
    assert storage.read(path).header["proposal"] == "diagonal"
    assert [entry.name for entry in path.parent.iterdir()] == ["fit.npz"]


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np.lib.format, "write_array", fail)
    with pytest.raises(OSError, match="disk full"):
        storage.write(path, Checkpoint({}, {}))
    monkeypatch.undo()
    assert storage.read(path).header["proposal"] == "mvn"
    assert [entry.name for entry in path.parent.iterdir()] == ["fit.npz"]


def test_a_missing_folder_or_file_is_named(tmp_path, checkpoint):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        storage.write(tmp_path / "nowhere" / "fit.npz", checkpoint)
    with pytest.raises(FileNotFoundError, match=r"no file .*fit\.npz"):
        storage.read(tmp_path / "fit.npz")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_refused(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="truncated, damaged"):
        storage.read(path)


def test_a_changed_byte_is_noticed_wherever_it_is(path):
    content = path.read_bytes()
    before = storage.read(path)
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        try:
            got = storage.read(path)
        except ValueError:
            continue
        # Bytes of the container that carry nothing, such as time stamps.
        assert got.header == before.header
        for name in before.arrays:
            np.testing.assert_array_equal(got.arrays[name], before.arrays[name])


def test_a_changed_setting_is_noticed(path, tmp_path):
    with np.load(path) as file:
        members = dict(file)
    header = json.loads(members["header"].tobytes())
    header["settings"]["prior"] = 0.0
    members["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    forged = tmp_path / "forged.npz"
    np.savez(forged, **members)
    with pytest.raises(ValueError, match="was changed"):
        storage.read(forged)


class Bomb:
    """Unpickling this would leave a trace."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code was run')",))


def test_nothing_in_a_file_is_executed(tmp_path):
    path = tmp_path / "fit.npz"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a file of rvrs"):
        storage.read(path)
    with zipfile.ZipFile(path, "w") as file:
        for name in ("header.npy", "x.npy"):
            with file.open(name, "w") as member:
                np.lib.format.write_array(member, np.array([Bomb()], dtype=object))
    with pytest.raises(ValueError, match="not a file of rvrs"):
        storage.read(path)


@pytest.mark.parametrize("content", [{"a": np.zeros(3)}, {"header": np.zeros(3, np.uint8)}])
def test_another_npz_is_not_ours(tmp_path, content):
    path = tmp_path / "other.npz"
    np.savez(path, **content)
    with pytest.raises(ValueError, match="not a file of rvrs"):
        storage.read(path)


def test_another_version_of_the_format_says_so(path, checkpoint, monkeypatch):
    monkeypatch.setattr(storage, "_VERSION", 99)
    storage.write(path, checkpoint)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 99 of the format"):
        storage.read(path)


def test_trees_are_stored_by_name_and_restored_into_their_structure():
    tree = ({"a": jnp.arange(3.0)}, [jnp.int32(4)])
    arrays = storage.to_arrays("run", tree)
    got = storage.from_arrays("run", arrays, tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, got, tree)
    with pytest.raises(ValueError, match=r"run\[0\]\['a'\] does not fit"):
        storage.from_arrays("run", arrays, ({"a": jnp.arange(4.0)}, [jnp.int32(4)]))
    with pytest.raises(ValueError, match="missing"):
        storage.from_arrays("other", arrays, tree)


def test_arguments_are_told_apart_by_content():
    y = np.arange(3.0)
    one = storage.describe_arguments(((y, 5, "a"), {"flag": True}))
    assert one == storage.describe_arguments(((y.copy(), 5, "a"), {"flag": True}))
    other = storage.describe_arguments(((y + 1e-9, 5, "a"), {"flag": False}))
    assert storage.differences(one, other) == ["[0][0]", "[1]['flag']"]


FIGURES = dict.fromkeys(storage._FIGURES, 1.0) | {"num_draws": 5, "warnings": ["doubtful"]}
FINISHED = {
    "proposal": "mvn",
    "num_steps": 3,
    "steps_done": 3,
    "settings": {"target_acceptance": 0.1},
    "figures": FIGURES,
}
HISTORY = {"run[2].elbo": np.zeros(3)}


def test_a_finished_fit_may_have_figures_that_are_not_finite(tmp_path):
    path = tmp_path / "fit.npz"
    storage.write(path, Checkpoint(FINISHED | {"figures": FIGURES | {"khat": np.nan}}, HISTORY))
    assert np.isnan(storage.read(path).header["figures"]["khat"])


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"proposal": 3}, "proposal"),
        ({"proposal": None}, "proposal"),
        ({"steps_done": 4}, "steps_done"),
        ({"steps_done": 10**18}, "steps_done"),
        ({"steps_done": -1}, "steps_done"),
        ({"steps_done": "3"}, "steps_done"),
        ({"steps_done": True}, "steps_done"),
        ({"settings": {}}, "settings: target_acceptance"),
        ({"settings": {"target_acceptance": [0.1]}}, "settings: target_acceptance"),
        ({"settings": []}, "settings"),
        ({"figures": 3}, "figures"),
        ({"figures": {}}, "figures: acceptance, figures: elbo"),
        ({"figures": FIGURES | {"elbo": "1"}}, "figures: elbo"),
        ({"figures": FIGURES | {"warnings": "doubtful"}}, "figures: warnings"),
        ({"figures": FIGURES | {"guide": 1}}, "figures: guide"),
        ({"guide": "AutoSemiRVRS"}, "batch_size, figures: acceptance_range"),
        ({"learning_rate": "fast"}, "learning_rate"),
    ],
)
def test_a_header_that_says_nonsense_is_refused_whatever_its_digest(tmp_path, fields, wrong):
    path = tmp_path / "fit.npz"
    storage.write(path, Checkpoint(FINISHED, HISTORY))
    assert storage.read(path).header["steps_done"] == 3
    storage.write(path, Checkpoint(FINISHED | fields, HISTORY))
    with pytest.raises(storage.CheckpointError, match=f"something else in its place: .*{wrong}"):
        storage.read(path)


@pytest.mark.parametrize("name", ["proposal", "steps_done", "settings"])
def test_a_finished_fit_that_lacks_a_field_is_refused(tmp_path, name):
    path = tmp_path / "fit.npz"
    header = {field: value for field, value in FINISHED.items() if field != name}
    storage.write(path, Checkpoint(header, HISTORY))
    with pytest.raises(storage.CheckpointError, match=name):
        storage.read(path)
