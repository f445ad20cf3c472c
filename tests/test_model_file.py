import jax.numpy as jnp
import numpy as np
import pytest

from rvrs import model_file
from rvrs.model_file import UserFileError, arguments, load_model, read_data


@pytest.fixture(autouse=True)
def _restore_imports(monkeypatch):
    monkeypatch.syspath_prepend("")
    yield
    model_file.sys.modules.pop("rvrs_user_model", None)


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_model_is_the_function_of_that_name(write):
    path = write("def model(x): return 1\ndef other(): return 2\n", "m.py")
    assert load_model(path)(None) == 1
    assert load_model(path, "other")() == 2


def test_a_model_may_import_its_neighbours_and_define_dataclasses(write):
    write("value = 5\n", "neighbour_of_the_model.py")
    path = write(
        "from dataclasses import dataclass\nfrom neighbour_of_the_model import value\n"
        "@dataclass\nclass Config:\n    a: 'int' = value\n"
        "def model(): return Config().a\n",
        "m.py",
    )
    assert load_model(path)() == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def model(:\n", "{path}, line 1: invalid syntax."),
        ("\nx = 1 / 0\n", "{path}, line 2: ZeroDivisionError: division by zero."),
        ("import no_such_module\n", "{path}, line 1: ModuleNotFoundError: No module named "),
        ("import sys\nsys.exit(3)\n", "{path}, line 2: SystemExit: 3."),
        ("raise ValueError('''a\nb''')\n", "{path}, line 1: ValueError: a."),
        ("x = 1\n", "{path} has no function 'model': it has none."),
        (
            "def a(): 0\ndef b(): 0\n",
            "{path} has no function 'model': it has a, b; name one with --model.",
        ),
        ("model = 3\n", "{path}: 'model' is not a function but int."),
        ("def model(): 0\n\0", "{path}"),
        (b"\xff\xfe", "{path}"),
    ],
)
def test_what_is_wrong_with_a_model_file_is_said_in_one_line(write, text, message):
    path = write(text, "m.py")
    with pytest.raises(UserFileError) as error:
        load_model(path)
    assert str(error.value).startswith(message.format(path=path))
    assert "\n" not in str(error.value)


def test_no_model_file(tmp_path):
    with pytest.raises(UserFileError, match=r"cannot read .*m\.py: No such file"):
        load_model(tmp_path / "m.py")


def test_csv_columns_are_arrays(write):
    text = '\ufeffx, group ,"y"\r\n1.5,0,2\r\n-1e-3,2, 3.0 \r\n\r\n\n'
    data = read_data(write(text, "d.CSV"))
    assert list(data) == ["x", "group", "y"]
    np.testing.assert_array_equal(data["x"], [1.5, -1e-3])
    np.testing.assert_array_equal(data["group"], [0, 2])
    # Whole numbers can be indices.
    assert [data[name].dtype.kind for name in data] == ["f", "i", "f"]


def test_whole_numbers_beyond_32_bits_become_floats(write):
    data = read_data(write("x\n3000000000\n1\n", "d.csv"))
    np.testing.assert_array_equal(data["x"], [3e9, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{path} is empty; its first line"),
        ("\n\n", "{path} is empty; its first line"),
        ("x,y\n", "{path} has names of columns but no rows."),
        ("x,y\n1,2\n1,a\n", "{path}, line 3, column 'y': 'a' is not a number."),
        ("x,y\n1,2\n ,1\n", "{path}, line 3, column 'x': the value is missing."),
        ("x\n1\n\n2\n", "{path}, line 3: 0 values instead of 1"),
        ("x,y\n1,nan\n", "{path}, line 2, column 'y': 'nan' is not a finite number."),
        ("x,y\n1,1e999\n", "{path}, line 2, column 'y': '1e999' is not a finite number."),
        ("x,y\n1,1_000\n", "{path}, line 2, column 'y': '1_000' is not a number."),
        ("x,y\n1,2\n1\n", "{path}, line 3: 1 values instead of 2, the number of columns."),
        ("x,y\n1,2,3\n", "{path}, line 2: 3 values instead of 2, the number of columns."),
        ("x,x\n1,2\n", "{path}, line 1: two columns are called 'x'."),
        ("x,\n1,2\n", "{path}, line 1: column 2 has no name."),
        ("1,2\n3,4\n", "{path}, line 1: '1' is a number; the first line must hold the names"),
        ("x;y\n1;2\n", "{path} has a single column 'x;y'; separate columns by commas."),
        ('x,y\n1,"2\n', "{path}, line 2: unexpected end of data."),
        (b"x\n\xff\n", "{path} is not UTF-8 text"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_said_with_its_place(write, text, message):
    path = write(text, "d.csv")
    with pytest.raises(UserFileError) as error:
        read_data(path)
    assert str(error.value).startswith(message.format(path=path))


def test_npz_arrays_keep_their_shapes(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, X=np.ones((3, 2)), size=np.array(4), flags=np.array([True]))
    data = read_data(path)
    assert data["X"].shape == (3, 2)
    assert data["flags"].dtype == bool
    assert type(data["size"]) is int


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array(["a"])}, "array 'x' holds <U1 instead of real numbers"),
        ({"x": np.array([1j])}, "array 'x' holds complex128 instead of real numbers"),
        ({"x": np.array([np.nan])}, "array 'x' has values that are not finite"),
        ({"x": np.array([None])}, "is not an .npz file of plain arrays"),
        ({}, "holds no arrays"),
    ],
)
def test_what_is_wrong_with_an_npz_file_is_said(tmp_path, arrays, message):
    path = tmp_path / "d.npz"
    np.savez(path, allow_pickle=True, **arrays)
    with pytest.raises(UserFileError, match=message):
        read_data(path)


def test_other_files_are_refused(write, tmp_path):
    with pytest.raises(UserFileError, match=r"neither a \.csv nor an \.npz file"):
        read_data(write("x\n1\n", "d.txt"))
    with pytest.raises(UserFileError, match=r"is not an \.npz file"):
        read_data(write("x\n1\n", "d.npz"))
    for name in ("none.csv", "none.npz"):
        with pytest.raises(UserFileError, match=r"cannot read .*none.*: No such file"):
            read_data(tmp_path / name)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserFileError, match=r"cannot read .*folder\.csv: Is a directory"):
        read_data(tmp_path / "folder.csv")


COLUMNS = {"x": np.array([1.0, 2.0]), "y": np.array([0, 1]), "size": 2}


def test_parameters_get_the_columns_of_their_names():
    def model(y, x=None, scale=1.0, *rest, size, **more): ...

    found = arguments(model, COLUMNS, "d.csv")
    assert found.args == ()
    assert list(found.kwargs) == ["y", "x", "size"]
    np.testing.assert_array_equal(found.kwargs["x"], COLUMNS["x"])
    assert found.kwargs["y"].dtype == jnp.int32
    assert found.kwargs["size"] == 2
    assert found.defaulted == ("scale",)
    assert found.unused == ()


def test_positional_parameters_are_passed_by_position():
    def model(y, /, x): ...

    found = arguments(model, COLUMNS, "d.csv")
    np.testing.assert_array_equal(found.args[0], COLUMNS["y"])
    assert found.given == ("y", "x")
    assert found.unused == ("size",)


def test_a_parameter_called_data_gets_all_columns():
    found = arguments(lambda data, y: None, COLUMNS, "d.csv")
    assert list(found.kwargs["data"]) == ["x", "y", "size"]
    assert found.unused == ()


def test_a_column_called_data_is_a_column():
    found = arguments(lambda data: None, {"data": np.ones(2), "x": np.ones(2)}, "d.csv")
    np.testing.assert_array_equal(found.kwargs["data"], np.ones(2))


@pytest.mark.parametrize(
    ("model", "columns", "message"),
    [
        (lambda z: None, COLUMNS, "parameter 'z' is no column of d.csv, which has x, y, size;"),
        (lambda z: None, None, "parameter 'z' needs data; pass --data FILE"),
        (lambda data: None, None, "parameter 'data' needs data; pass --data FILE"),
        (lambda Y=None: None, COLUMNS, r"takes nothing from d.csv: .*\(Y\) is one of .*x, y, size"),
        (lambda: None, COLUMNS, r"takes nothing from d.csv: .*\(it has none\)"),
    ],
)
def test_what_does_not_match_is_said(model, columns, message):
    with pytest.raises(UserFileError, match=message):
        arguments(model, columns, "d.csv")


def test_a_model_without_parameters_needs_no_data():
    assert arguments(lambda size=3: None, None, "").defaulted == ("size",)
