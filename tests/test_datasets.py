import functools
import hashlib
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from rvrs import datasets

SIZE = 40


class Places:
    """The places that files are looked for in."""

    def __init__(self, root):
        self.folder, self.cache, self.server = root / "data", root / "cache" / "rvrs", root / "www"
        self.folder.mkdir()
        self.server.mkdir()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Empty places; a test sets RVRS_DATA_URL itself."""
    places = Places(tmp_path)
    monkeypatch.setenv("RVRS_DATA", str(places.folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.cache.parent))
    monkeypatch.delenv("RVRS_DATA_URL", raising=False)
    return places


@pytest.fixture
def http_address(places, monkeypatch):
    """Address of a server of ``places.server``."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):  # noqa: A002
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Handler, directory=str(places.server))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def arrays(name, seed=0, size=SIZE):
    """Contents of a valid file, with features far from standardised."""
    rng = np.random.default_rng(seed)
    columns = datasets._FILES[name].num_features
    features = 1e4 + 50 * rng.standard_normal((size, columns))
    return {
        "X": features.astype(np.float32),
        "y": (rng.random(size) < 0.5).astype(np.float32),
        "feature_names": np.array([f"feature {i}" for i in range(columns)]),
    }


def write(folder, name, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.npz"
    np.savez(path, **contents)
    return path


def know(monkeypatch, path):
    """Make the checksum of a file the one that its data set should have."""
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(
        datasets._FILES, path.stem, datasets._FILES[path.stem]._replace(sha256=checksum)
    )


def seed_of(dataset):
    """The seed of :func:`arrays` that a data set was made with, which tells its place."""
    responses = [arrays(dataset.name, seed)["y"] for seed in range(4)]
    return [np.array_equal(dataset.responses, wanted) for wanted in responses].index(True)


DIMENSIONS = {
    "adult": 15,
    "bank": 17,
    "bike": 18,
    "breast_cancer": 31,
    "higgs": 29,
    "miniboone": 51,
    "mushroom": 22,
    "pol": 27,
    "spambase": 58,
    "susy": 19,
    "thyroid": 22,
}


def test_names_are_the_known_data_sets():
    assert datasets.names() == tuple(DIMENSIONS)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_every_data_set_has_its_dimension_and_single_precision(name, places):
    if name != "breast_cancer":
        write(places.folder, name, **arrays(name))
    dataset = datasets.load(name)
    size = 569 if name == "breast_cancer" else SIZE
    assert dataset.name == name
    assert dataset.covariates.shape == (size, DIMENSIONS[name])
    assert dataset.responses.shape == (size,)
    assert dataset.covariates.dtype == dataset.responses.dtype == np.float32
    assert len(dataset.covariate_names) == DIMENSIONS[name]


def test_covariates_are_standardised_and_followed_by_an_intercept(places):
    contents = arrays("adult")
    write(places.folder, "adult", **contents)
    dataset = datasets.load("adult")
    features = contents["X"].astype(float)
    wanted = (features - features.mean(0)) / features.std(0)
    np.testing.assert_allclose(dataset.covariates[:, :-1], wanted, rtol=1e-5, atol=1e-6)
    assert np.all(dataset.covariates[:, -1] == 1)
    np.testing.assert_array_equal(dataset.responses, contents["y"])
    assert dataset.covariate_names == (*contents["feature_names"], "intercept")
    assert all(type(name) is str for name in dataset.covariate_names)


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_a_constant_column_becomes_zero(places, value):
    # The standard deviation of many times 0.1 is not exactly 0.
    contents = arrays("adult")
    contents["X"] = contents["X"].astype(np.float64)
    contents["X"][:, 3] = value
    write(places.folder, "adult", **contents)
    covariates = datasets.load("adult").covariates
    assert np.all(covariates[:, 3] == 0)
    np.testing.assert_allclose(np.delete(covariates, 3, 1)[:, :-1].std(0), 1, rtol=1e-5)


def test_bank_is_taken_as_it_is(places):
    contents = arrays("bank")
    write(places.folder, "bank", **contents)
    dataset = datasets.load("bank")
    np.testing.assert_array_equal(dataset.covariates, contents["X"])
    assert dataset.covariate_names == tuple(contents["feature_names"])


def test_reference_subset_of_bank(places):
    contents = arrays("bank", size=4521)
    write(places.folder, "bank", **contents)
    dataset = datasets.load("bank", num_rows=100)
    rows = np.random.RandomState(0).permutation(4521)[:100]
    np.testing.assert_array_equal(dataset.covariates, contents["X"][rows])
    np.testing.assert_array_equal(dataset.responses, contents["y"][rows])


def test_a_subset_has_rows_of_the_whole_set():
    # Thus the standardisation is that of all rows.
    whole = datasets.load("breast_cancer")
    subset = datasets.load("breast_cancer", num_rows=50, seed=3)
    rows = np.random.RandomState(3).permutation(569)[:50]
    np.testing.assert_array_equal(subset.covariates, whole.covariates[rows])
    np.testing.assert_array_equal(subset.responses, whole.responses[rows])
    assert datasets.load("breast_cancer", num_rows=569).covariates.shape == (569, 31)


def test_breast_cancer_is_that_of_scikit_learn():
    dataset = datasets.load("breast_cancer")
    assert dataset.covariate_names[0] == "mean radius"
    assert dataset.covariate_names[-1] == "intercept"
    assert dataset.responses.sum() == 357  # benign
    np.testing.assert_allclose(dataset.covariates[:, :-1].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(dataset.covariates[:, :-1].std(0), 1, rtol=1e-5)


def test_breast_cancer_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"'breast_cancer'.*pip install 'rvrs\[data\]'"):
        datasets.load("breast_cancer")


def test_places_are_searched_in_order(places, monkeypatch):
    files = [
        write(folder, "adult", **arrays("adult", seed))
        for seed, folder in enumerate([places.folder, places.cache, places.server])
    ]
    know(monkeypatch, files[2])
    monkeypatch.setenv("RVRS_DATA_URL", places.server.as_uri())
    assert seed_of(datasets.load("adult")) == 0
    files[0].unlink()
    assert seed_of(datasets.load("adult")) == 1
    files[1].unlink()
    assert seed_of(datasets.load("adult")) == 2


def test_the_cache_is_in_the_home_folder_by_default(places, tmp_path, monkeypatch):
    monkeypatch.delenv("RVRS_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / ".cache" / "rvrs", "adult", **arrays("adult", 1))
    assert seed_of(datasets.load("adult")) == 1


def test_a_download_is_kept_in_the_cache(places, http_address, monkeypatch):
    served = write(places.server, "pol", **arrays("pol", 2))
    know(monkeypatch, served)
    monkeypatch.setenv("RVRS_DATA_URL", f"{http_address}/")
    assert seed_of(datasets.load("pol")) == 2
    # Nothing but the file is left behind, and it is used from now on.
    assert [path.name for path in places.cache.iterdir()] == ["pol.npz"]
    assert (places.cache / "pol.npz").read_bytes() == served.read_bytes()
    monkeypatch.delenv("RVRS_DATA_URL")
    assert seed_of(datasets.load("pol")) == 2


def test_a_download_with_another_checksum_is_refused(places, monkeypatch):
    write(places.server, "pol", **arrays("pol"))
    monkeypatch.setenv("RVRS_DATA_URL", places.server.as_uri())
    with pytest.raises(ValueError, match=r"pol\.npz has the SHA-256 checksum .* it was not kept"):
        datasets.load("pol")
    assert not places.cache.exists()


def test_a_download_that_is_too_large_is_refused(places, monkeypatch):
    served = write(places.server, "pol", **arrays("pol"))
    know(monkeypatch, served)
    monkeypatch.setattr(datasets, "_MAX_BYTES", served.stat().st_size - 1)
    monkeypatch.setenv("RVRS_DATA_URL", places.server.as_uri())
    with pytest.raises(ValueError, match=r"pol\.npz is larger than \d+ bytes"):
        datasets.load("pol")
    assert not places.cache.exists()
    monkeypatch.setattr(datasets, "_MAX_BYTES", served.stat().st_size)
    assert seed_of(datasets.load("pol")) == 0


def test_a_failed_replacement_leaves_nothing_in_the_cache(places, monkeypatch):
    know(monkeypatch, write(places.server, "pol", **arrays("pol")))
    monkeypatch.setenv("RVRS_DATA_URL", places.server.as_uri())

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Path, "replace", fail)
        with pytest.raises(OSError, match="No space left"):
            datasets.load("pol")
    assert list(places.cache.iterdir()) == []


def test_a_missing_file_names_the_three_remedies(places):
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("susy")
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "data set 'susy' not found",
        f"set RVRS_DATA (now {places.folder}) to a folder that holds susy.npz",
        f"put susy.npz into the cache folder {places.cache}",
        "set RVRS_DATA_URL (now not set)",
    ):
        assert part in message


def test_a_failed_download_names_the_cause_and_the_remedies(places, http_address, monkeypatch):
    monkeypatch.setenv("RVRS_DATA_URL", f"{http_address}/")
    wanted = rf"{http_address}/susy\.npz could not be fetched .*404.*set RVRS_DATA"
    with pytest.raises(FileNotFoundError, match=wanted):
        datasets.load("susy")
    assert not places.cache.exists()


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("address", ["ftp://example.org/data", "data:text/plain,", "/some/folder"])
def test_other_addresses_are_refused(address, monkeypatch):
    monkeypatch.setenv("RVRS_DATA_URL", address)
    with pytest.raises(ValueError, match="RVRS_DATA_URL must begin with http://"):
        datasets.load("susy")


def changed(key, change):
    def edit(contents):
        contents[key] = change(contents[key])

    return edit


def set_first(value):
    def change(array):
        array = array.copy()
        array.flat[0] = value
        return array

    return change


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda contents: contents.pop("y"), "it lacks the arrays y;"),
        (changed("X", lambda X: X[:, 1:]), r"X has the shape \(40, 13\) instead of \(rows, 14\)"),
        (changed("X", lambda X: X[:0]), r"X has the shape \(0, 14\)"),
        (changed("X", lambda X: X[0]), r"X has the shape \(14,\)"),
        (changed("y", lambda y: y[:, None]), r"y has the shape \(40, 1\) instead of \(40,\)"),
        (changed("y", lambda y: y[1:]), r"y has the shape \(39,\)"),
        (changed("feature_names", lambda names: names[1:]), "feature_names is not 14 strings"),
        (changed("X", set_first(np.nan)), "X has values that are not finite"),
        (changed("y", set_first(np.inf)), "y has values that are not finite"),
        (changed("X", lambda X: X.astype(str)), "X has values that are not finite numbers"),
        (changed("y", set_first(2)), "y has values other than 0 and 1"),
        # Reading it would run what the pickle says.
        (changed("X", lambda X: X.astype(object)), "it is not a NumPy archive"),
    ],
)
def test_wrong_contents_are_refused(places, edit, problem):
    contents = arrays("adult")
    edit(contents)
    path = write(places.folder, "adult", **contents)
    with pytest.raises(ValueError, match=problem) as error:
        datasets.load("adult")
    message = str(error.value)
    assert message.startswith(f"{path} cannot be used: ")
    assert message.endswith("delete it or put the right file there.")
    assert "\n" not in message


def flip_a_byte(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"<html>", lambda content: content[:-100], flip_a_byte],
)
def test_a_corrupt_file_is_refused(places, damage):
    path = write(places.folder, "adult", **arrays("adult", size=500))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"adult\.npz cannot be used: it is not a NumPy archive"):
        datasets.load("adult")


def test_a_single_array_is_refused(places):
    with (places.folder / "adult.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="it is not a NumPy archive"):
        datasets.load("adult")


def test_responses_of_a_regression_may_be_any_numbers(places):
    contents = arrays("bike")
    contents["y"] = np.linspace(-3, 7, SIZE)
    write(places.folder, "bike", **contents)
    np.testing.assert_allclose(datasets.load("bike").responses, contents["y"], rtol=1e-6)


@pytest.mark.parametrize("name", ["iris", "mnist", "../adult", None])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"name must be one of 'adult', .*'thyroid', got"):
        datasets.load(name)


@pytest.mark.parametrize("num_rows", [0, -1, 2.0, True, "all", 570])
def test_a_wrong_number_of_rows_is_refused(num_rows):
    with pytest.raises(ValueError, match="num_rows must be"):
        datasets.load("breast_cancer", num_rows=num_rows)


@pytest.mark.parametrize("seed", [-1, 2**32, 0.0, None, False])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be a whole number"):
        datasets.load("breast_cancer", seed=seed)
