"""Data sets of the experiments, as arrays that are ready for a linear model.

Covariates are standardised, column by column, and an intercept (a column of ones) is appended.
Mean and standard deviation are those of the whole data set as it is distributed, so that a row
has the same covariates in every sub-sample; in a sub-sample they are only about 0 and 1.

Binary classification, responses 0 and 1:

- ``adult``, ``mushroom``, ``thyroid``: categories are integer codes.
- ``bank``: taken as it is distributed, which is standardised. It gets no intercept, and its first
  column is the row number, not a covariate; published results have it.
- ``breast_cancer``: bundled with scikit-learn, so that it needs no file; 1 is benign.
- ``higgs``, ``miniboone``, ``spambase``, ``susy``.

Regression, responses as they are distributed, which is centred but not scaled:

- ``bike``: two covariates sum to the count whose logarithm is the response.
- ``pol``.

Binary images, from :func:`load_images`:

- ``digits``: bundled with scikit-learn, 8 by 8 pixels, of which those of at least half of the
  maximum are 1.
- ``mnist_binarized``: the statically binarized MNIST, 28 by 28 pixels.

What is not bundled is in files ``<name>.npz``, tables with the arrays ``X`` (rows by features),
``y`` and ``feature_names``, images with ``x_train`` and ``x_test``. A file is taken from the first
place that has it:

1. the folder in the environment variable ``RVRS_DATA``;
2. the cache, ``$XDG_CACHE_HOME/rvrs`` or ``~/.cache/rvrs``;
3. the base address in ``RVRS_DATA_URL`` (http, https or file). What comes from there must have the
   SHA-256 checksum recorded here, and is then kept in the cache.
"""

import hashlib
import importlib
import os
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np

from rvrs import files
from rvrs.core.arguments import check_choice, check_count, check_seed

__all__ = ["Dataset", "Images", "image_names", "load", "load_images", "names"]


class Dataset(NamedTuple):
    """Covariates and responses of a regression or a binary classification.

    >>> from rvrs import datasets
    >>> datasets.load("breast_cancer").covariate_names[-1]
    'intercept'
    """

    name: str
    covariates: np.ndarray
    """``(N, D)``, float32."""
    responses: np.ndarray
    """``(N,)``, float32."""
    covariate_names: tuple[str, ...]
    """The D names of the columns."""


class _File(NamedTuple):
    """What is known about a data set that is stored in a file."""

    num_features: int
    sha256: str
    binary: bool = True
    """Whether the responses are 0 and 1."""
    ready: bool = False
    """Whether the features are used as they are, neither standardised nor with an intercept."""


class _Arrays(NamedTuple):
    """A data set as it is distributed."""

    features: np.ndarray
    responses: np.ndarray
    feature_names: np.ndarray


_FILES = {
    "adult": _File(14, "95dbaf36050119d2a02640b04a0a1465202c4d6bcf51ccfe084745524b6c0530"),
    "bank": _File(
        17, "1163faf38ff4a432d766f534ecaf0d3196d6e081fbaeb0989947696d7f16bf5b", ready=True
    ),
    "higgs": _File(28, "ffd961d59d9bcc94751075f571e959193f61609cb52477cbf956874a4e6d620b"),
    "miniboone": _File(50, "31ffe7fe7f9f99d6bc40cb55ea194d119b265e8e7c7b8215836dcdc7b9c2ffc4"),
    "mushroom": _File(21, "6630da2d8a36501a8db716de12c7f92b6eb1890e2418b6cd1962d062f526db24"),
    "spambase": _File(57, "fc796947cc589d8f86916ca2be02717411d128f232dae61f2007077217efc32b"),
    "susy": _File(18, "17eb92294f49030aea28afd9e363c70c9f216a21305206f0890e595faed486be"),
    "thyroid": _File(21, "c6b9ca02c0f5b6e41b80bd56552f29492b76160c2320f53345f0c3ebb8706aaa"),
    "bike": _File(
        17, "cbad5fb683324318da32b444da849056ae85b71d4424f2d8d937ae66bf448be4", binary=False
    ),
    "pol": _File(
        26, "8b849d9552e3b6575edb6382cdd3d6b7b5faaf53850283f52914ec51013e15bd", binary=False
    ),
}
_BUNDLED = "breast_cancer"

_MNIST, _DIGITS = "mnist_binarized", "digits"
_MNIST_SHA256 = "f51bc651efd58e7687803409d471252f3b9d17990406d1440f8dc733a1b61003"
_MNIST_PIXELS = 784
# Of the bundled digits, which are not split.
_NUM_TEST_DIGITS = 297

_TIMEOUT_SECONDS = 30
# Over ten times the largest file, so that a wrong address cannot fill the memory.
_MAX_BYTES = 32 * 2**20


def names() -> tuple[str, ...]:
    """The names that :func:`load` knows.

    >>> from rvrs import datasets
    >>> "breast_cancer" in datasets.names()
    True
    """
    return tuple(sorted([*_FILES, _BUNDLED]))


def load(name: str, *, num_rows: int | None = None, seed: int = 0) -> Dataset:
    """Load a data set, or a random sub-sample of its rows.

    Parameters
    ----------
    name
        One of :func:`names`.
    num_rows
        Size of the sub-sample, which is drawn without replacement; None for all rows, in the order
        in which they are stored.
    seed
        Seed of the sub-sample: the rows are the first ``num_rows`` of
        ``numpy.random.RandomState(seed).permutation(N)``.

    Raises
    ------
    ValueError
        For a wrong argument, for a file that does not hold the data set, and for a download that
        is not the known file.
    FileNotFoundError
        If the file is in none of the places that the module's description lists.
    ImportError
        For ``breast_cancer`` without scikit-learn.

    Examples
    --------
    >>> dataset = load("breast_cancer", num_rows=100)
    >>> dataset.covariates.shape
    (100, 31)
    """
    check_choice("name", name, names())
    if num_rows is not None:
        check_count("num_rows", num_rows)
    check_seed("seed", seed)

    arrays = _bundled() if name == _BUNDLED else _read(_find(name), _FILES[name])
    covariates, covariate_names = arrays.features, tuple(arrays.feature_names.tolist())
    if name == _BUNDLED or not _FILES[name].ready:
        covariates = _standardised_with_intercept(covariates)
        covariate_names = (*covariate_names, "intercept")

    size = len(covariates)
    rows = np.arange(size)
    if num_rows is not None:
        if num_rows > size:
            raise ValueError(
                f"num_rows must be at most {size}, the rows of {name}; got {num_rows}."
            )
        rows = np.random.RandomState(seed).permutation(size)[:num_rows]
    return Dataset(
        name,
        covariates[rows].astype(np.float32),
        arrays.responses[rows].astype(np.float32),
        covariate_names,
    )


class Images(NamedTuple):
    """Binary images, one row of pixels each, as bytes of 0 and 1.

    >>> from rvrs import datasets
    >>> int(datasets.load_images("digits").train.max())
    1
    """

    name: str
    train: np.ndarray
    test: np.ndarray


def image_names() -> tuple[str, ...]:
    """The names that :func:`load_images` knows.

    >>> from rvrs import datasets
    >>> datasets.image_names()
    ('digits', 'mnist_binarized')
    """
    return _DIGITS, _MNIST


def load_images(name: str) -> Images:
    """Load ``"mnist_binarized"`` or ``"digits"``; both parts are in a random order.

    Examples
    --------
    >>> images = load_images("digits")
    >>> images.train.shape, images.test.shape
    ((1500, 64), (297, 64))
    """
    check_choice("name", name, image_names())
    train, test = _bundled_digits() if name == _DIGITS else _read_images(_find(_MNIST))
    # A fixed order: the test images are distributed sorted by digit.
    return Images(
        name,
        train[np.random.RandomState(0).permutation(len(train))],
        test[np.random.RandomState(1).permutation(len(test))],
    )


def _bundled_digits() -> tuple[np.ndarray, np.ndarray]:
    pixels = _from_scikit_learn("load_digits", _DIGITS).data
    binary = (pixels >= pixels.max() / 2).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(binary))
    return binary[order[_NUM_TEST_DIGITS:]], binary[order[:_NUM_TEST_DIGITS]]


def _read_images(path: Path) -> tuple[np.ndarray, np.ndarray]:
    train, test = _read_arrays(path, "x_train", "x_test")
    for part in (train, test):
        if part.ndim != 2 or part.shape[1] != _MNIST_PIXELS or not len(part):
            problem = f"images have the shape {part.shape} instead of (rows, {_MNIST_PIXELS})"
            raise _unusable(path, problem)
        if part.dtype != np.uint8 or part.max() > 1:
            raise _unusable(path, "images are not bytes of 0 and 1")
    return train, test


def _read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    try:
        found = files.read_arrays(path, compressed=True)
    except files.DamagedError as error:
        problem = f"it is not a NumPy archive (.npz) of plain arrays, or is damaged ({error})"
        raise _unusable(path, problem) from error
    missing = [name for name in names if name not in found]
    if missing:
        raise _unusable(path, f"it lacks the arrays {', '.join(missing)}")
    return [found[name] for name in names]


def _standardised_with_intercept(features: np.ndarray) -> np.ndarray:
    # In double precision, as the mean of a column can be much larger than its spread.
    features = features.astype(np.float64)
    # Rounding can give a constant column a tiny standard deviation. Such a column becomes 0, and
    # so does one whose squares are too small for a number.
    constant = features.min(axis=0) == features.max(axis=0)
    spread = features.std(axis=0)
    scale = np.where(constant | (spread == 0), np.inf, spread)
    standardised = (features - features.mean(axis=0)) / scale
    return np.column_stack([standardised, np.ones(len(features))])


def _from_scikit_learn(loader: str, name: str) -> Any:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ImportError(
            f"the data set {name!r} comes with scikit-learn, which cannot be imported; "
            "run pip install 'rvrs[data]'."
        ) from error
    return getattr(datasets, loader)()


def _bundled() -> _Arrays:
    bunch = _from_scikit_learn("load_breast_cancer", _BUNDLED)
    return _Arrays(bunch.data, bunch.target, bunch.feature_names)


def _read(path: Path, expected: _File) -> _Arrays:
    arrays = _Arrays(*_read_arrays(path, "X", "y", "feature_names"))
    problem = _problem(arrays, expected)
    if problem:
        raise _unusable(path, problem)
    return arrays


def _problem(arrays: _Arrays, expected: _File) -> str | None:
    """What is wrong with the contents of a file, if anything."""
    features, responses, feature_names = arrays
    num_features = expected.num_features
    if features.ndim != 2 or features.shape[1] != num_features or len(features) == 0:
        return f"X has the shape {features.shape} instead of (rows, {num_features})"
    if responses.shape != (len(features),):
        return f"y has the shape {responses.shape} instead of ({len(features)},)"
    if feature_names.shape != (num_features,) or feature_names.dtype.kind != "U":
        return f"feature_names is not {num_features} strings"
    for key, array in (("X", features), ("y", responses)):
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            return f"{key} has values that are not finite numbers"
        if np.abs(array.astype(np.float64)).max() > np.finfo(np.float32).max:
            return f"{key} has values that are too large for single precision"
    if expected.binary and not np.isin(responses, (0, 1)).all():
        return "y has values other than 0 and 1"
    return None


def _unusable(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} cannot be used: {problem}; delete it or put the right file there.")


def _find(name: str) -> Path:
    """Where the file of a data set is, after a download if need be."""
    file_name = f"{name}.npz"
    folder, address = os.environ.get("RVRS_DATA"), os.environ.get("RVRS_DATA_URL")
    cached = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rvrs" / file_name
    if folder and (Path(folder) / file_name).is_file():
        return Path(folder) / file_name
    if cached.is_file():
        return cached
    failure = "not found"
    if address:
        url = f"{address.rstrip('/')}/{file_name}"
        if urlsplit(url).scheme not in ("http", "https", "file"):
            raise ValueError(
                f"RVRS_DATA_URL must begin with http://, https:// or file://, got {address!r}."
            )
        try:
            sha256 = _MNIST_SHA256 if name == _MNIST else _FILES[name].sha256
            content = _download(url, sha256)
        except (OSError, HTTPException) as error:
            failure = f"not found, and {url} could not be fetched ({error})"
        else:
            _write(cached, content)
            return cached
    raise FileNotFoundError(
        f"data set {name!r} {failure}: set RVRS_DATA (now {folder or 'not set'}) to a folder that "
        f"holds {file_name}, put {file_name} into the cache folder {cached.parent}, or set "
        f"RVRS_DATA_URL (now {address or 'not set'}) to a base address that serves {file_name}."
    )


def _download(url: str, sha256: str) -> bytes:
    try:
        with urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            content = response.read(_MAX_BYTES + 1)
    except HTTPError as error:
        error.close()  # it holds the connection
        raise
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{url} is larger than {_MAX_BYTES} bytes, so it was not kept.")
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise ValueError(
            f"{url} has the SHA-256 checksum {actual} instead of {sha256}, so it was not kept; "
            "set RVRS_DATA_URL to an address that serves the original file."
        )
    return content


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, lambda file: file.write(content))
