"""Everything that reads files, with valid files to start from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import rvrs
from rvrs import datasets, files, fitting, model_file, semi_fitting, storage, vae_training
from rvrs import run as running
from rvrs.experiments.experiment import Result, Unit
from rvrs.experiments.store import Origin, Store
from rvrs.storage import Checkpoint
from rvrs.vae import VAE
from tests.fuzz import hostile
from tests.fuzz.hostile import End, Member, container, npy


class Loader(NamedTuple):
    """A function that reads a file, and what it may be given."""

    path: Path
    load: Callable[[], Any]
    check: Callable[[Any], bool]
    """Whether a result is what it should be, for a file that was not refused."""
    inputs: dict[str, st.SearchStrategy[bytes]]
    refused: tuple[type[Exception], ...] = (ValueError,)
    code: bool = False
    """Whether JAX is at work, which imports and compiles whenever it likes."""
    beyond: int = 3 * 2**20
    """Bytes that may be allocated besides a multiple of the file's."""


UNIT = Unit("toy", "one", "mf", 0)


def plain(arrays):
    """Arrays of numbers, truth values and characters."""
    for array in arrays.values():
        array.tolist()
    return all(array.dtype.kind in "biufcU" for array in arrays.values())


def signed(header, arrays):
    """A file of storage whose digest is right, whatever it says."""
    header = {"format": "rvrs-fit", "version": 1} | header
    header.pop("digest", None)
    header["digest"] = storage._digest(header, arrays)
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    members = [Member(f"{name}.npy", npy(array)) for name, array in arrays.items()]
    return container([Member("header.npy", npy(text)), *members], End())


def forged(content):
    """Copies of a file of storage with other headers and right digests, or other arrays."""
    header, arrays = content.header, content.arrays
    headers = hostile.values(header).map(lambda changed: signed(changed, arrays))
    shapes = st.sampled_from([(), (0,), (1,), (3,), (0, 3), (3, 0), (10**6, 0)])
    kinds = st.sampled_from(["f4", "f8", "i4", "u4", "b1", "U1", "c8"])

    def with_array(name, shape, kind):
        return signed(header, arrays | {name: np.zeros(shape, kind)})

    changed = st.builds(with_array, hostile.one_of([*arrays, "more"]), shapes, kinds)
    lost = st.builds(
        lambda name: signed(header, {k: v for k, v in arrays.items() if k != name}),
        hostile.one_of(list(arrays)),
    )
    return st.one_of(headers, headers, changed, lost)


def model(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.Poisson(rate), obs=y)


def local_model(x):
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)


Y = jnp.array([3, 1, 4])
X = jnp.array([0.1, 1.0, -1.0, 2.0])
TINY = VAE(num_pixels=5, num_latent=2, num_hidden=2)
IMAGES = np.array([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]], np.uint8)
NUM_STEPS = 3


def a_fit():
    """A file of ``Fit.save`` without the time that training takes."""
    arguments = ((Y,), {})
    guide, name = fitting._guide(model, None, "diagonal", 0.1, arguments)
    state, frame = running._first(guide, arguments, running._trivial_start(guide))
    history = jax.tree.map(lambda leaf: np.zeros(NUM_STEPS, leaf.dtype), running._no_history(state))
    header = {
        "proposal": name,
        "num_steps": NUM_STEPS,
        "num_evaluation_draws": 100,
        "settings": fitting._settings(guide),
        "model": fitting._describe_model(guide),
        "arguments": storage.describe_arguments(arguments),
        "figures": dict.fromkeys(storage._FIGURES, 0.5) | {"num_draws": 100, "warnings": ["a"]},
    }
    keys = jax.random.split(jax.random.key(0))
    return running.Run(keys[0], keys[1], state, frame, history).to_checkpoint(header)


def a_semi_fit(guide):
    """The same for local latents."""
    key, arguments = jax.random.key(0), ((X,), {})
    trainer, params = semi_fitting.prepare(key, guide, arguments, 2, None)
    state = trainer.first_state(params)
    history = semi_fitting.no_history(state)
    history = jax.tree.map(lambda leaf: np.zeros(NUM_STEPS, leaf.dtype), history)
    header = {"num_steps": NUM_STEPS} | semi_fitting._describe(trainer, params, arguments)
    figures = dict.fromkeys(storage._SEMI_FIGURES, 0.5)
    header["figures"] = figures | {"acceptance_range": [0.1, 0.2], "warnings": []}
    return semi_fitting.SemiRun(key, state, history).to_checkpoint(header)


def train(**options):
    return vae_training.train(
        vae_training.METHODS["standard"](TINY),
        jax.random.key(0),
        IMAGES,
        batch_size=2,
        progress=False,
        **options,
    )


def a_training(path):
    """A checkpoint of an autoencoder, after all of its steps."""
    seconds = vae_training._SECONDS_BETWEEN_CHECKPOINTS
    vae_training._SECONDS_BETWEEN_CHECKPOINTS = -1.0
    try:
        train(checkpoint=path)
    finally:
        vae_training._SECONDS_BETWEEN_CHECKPOINTS = seconds
    return storage.read(path)


def both(content, **arrays):
    return {"damaged": hostile.damaged(content), "containers": hostile.containers(**arrays)}


def of_arrays(folder):
    path = folder / "arrays.npz"
    files.write_arrays(path, {"x": np.arange(6.0).reshape(2, 3), "y": np.array([True, False])})
    return Loader(path, lambda: files.read_arrays(path), plain, both([path.read_bytes()]))


def of_packed_arrays(folder):
    path = folder / "packed.npz"
    seeds = []
    for save in (np.savez, np.savez_compressed):
        save(path, x=np.asfortranarray(np.ones((2, 3))), y=np.array(["ab", "c"]))
        seeds.append(path.read_bytes())
    load = lambda: files.read_arrays(path, compressed=True)  # noqa: E731
    return Loader(path, load, plain, both(seeds))


def of_storage(folder):
    path = folder / "fit.npz"
    stored = Checkpoint({"proposal": "mvn", "settings": {"a": 1}}, {"run[0]": np.ones(3)})
    storage.write(path, stored)
    inputs = both([path.read_bytes()], header=np.zeros(4, np.uint8)) | {"forged": forged(stored)}
    deep = [signed({"a": 0}, {}).replace(b'"a": 0', text.encode()) for text in hostile.DEEP]
    inputs["deep"] = hostile.one_of(deep)
    return Loader(path, lambda: storage.read(path), lambda got: isinstance(got, Checkpoint), inputs)


def of_fits(folder):
    path = folder / "finished.npz"
    stored = a_fit()
    storage.write(path, stored)

    def check(got):
        return isinstance(got, rvrs.Fit) and got.num_draws >= 0 and bool(repr(got))

    inputs = {"forged": forged(stored)}
    return Loader(path, lambda: rvrs.load(path, model, Y), check, inputs, code=True)


def of_semi_fits(folder):
    path = folder / "local.npz"
    guide = rvrs.AutoSemiRVRS(local_model, local_model, target_acceptance=0.3)
    stored = a_semi_fit(guide)
    storage.write(path, stored)

    def check(got):
        return isinstance(got, rvrs.SemiFit) and bool(repr(got))

    load = lambda: rvrs.load(path, local_model, X, guide=guide)  # noqa: E731
    return Loader(path, load, check, {"forged": forged(stored)}, code=True)


def of_trainings(folder):
    path = folder / "vae.npz"
    stored = a_training(path)
    return Loader(
        path,
        lambda: train(resume=path),
        lambda got: got[1].shape == (1,),
        {"forged": forged(stored)},
        code=True,
    )


def of_results(folder):
    store = Store(folder)
    origin = Origin("quick", {"sizes": [1, 2]}, 1, {"python": "3"})
    result = Result(UNIT, {"elbo": -1.5, "curve": [1, 2.5]}, None, 2.0)
    store.write(result, origin, machine={"cores": 2})
    path = store.path(UNIT)
    content = path.read_bytes()
    inputs = {"damaged": hostile.damaged([content]), "texts": hostile.texts(json.loads(content))}
    return Loader(path, lambda: store.read(UNIT), lambda got: got.result.unit == UNIT, inputs)


def of_results_arrays(folder):
    store = Store(folder)
    origin = Origin("quick", {}, 1, {})
    store.write(Result(UNIT, {}, None, 2.0), origin, arrays={"x": np.ones(3)}, machine={})
    path = store.path(UNIT).with_suffix(".npz")
    return Loader(path, lambda: store.arrays(UNIT), plain, both([path.read_bytes()]))


def of_datasets(folder):
    path = folder / "adult.npz"
    os.environ["RVRS_DATA"] = str(folder)
    rng = np.random.default_rng(0)
    contents = {
        "X": rng.normal(size=(4, 14)).astype(np.float32),
        "y": np.array([0.0, 1.0, 1.0, 0.0]),
        "feature_names": np.array([f"x{i}" for i in range(14)]),
    }
    np.savez_compressed(path, **contents)

    def check(got):
        return np.isfinite(got.covariates).all() and np.isin(got.responses, (0, 1)).all()

    inputs = both([path.read_bytes()], **contents)
    return Loader(path, lambda: datasets.load("adult"), check, inputs)


def of_images(folder):
    path = folder / "mnist_binarized.npz"
    os.environ["RVRS_DATA"] = str(folder)
    contents = {"x_train": np.ones((2, 784), np.uint8), "x_test": np.zeros((1, 784), np.uint8)}
    np.savez_compressed(path, **contents)
    inputs = both([path.read_bytes()], **contents)
    load = lambda: datasets.load_images("mnist_binarized")  # noqa: E731
    return Loader(path, load, lambda got: got.train.max() <= 1, inputs)


def _of_data(path, inputs):
    def load():
        return model_file.arguments(lambda data: None, model_file.read_data(path), str(path))

    def check(got):
        taken = got.kwargs["data"]
        # A column may have the name of the parameter.
        values = taken.values() if isinstance(taken, dict) else [taken]
        return all(np.isfinite(value).all() for value in values)

    refused = (model_file.UserFileError,)
    return Loader(path, load, check, inputs, refused, code=True)


def of_tables(folder):
    path = folder / "data.csv"
    path.write_text("x,y\n1,2.5\n-3,4\n")
    inputs = {"damaged": hostile.damaged([path.read_bytes()]), "tables": hostile.tables()}
    return _of_data(path, inputs)


def of_tables_of_arrays(folder):
    path = folder / "data.npz"
    np.savez(path, x=np.arange(3.0), size=np.array(3))
    return _of_data(path, both([path.read_bytes()], x=np.arange(3.0)))


MAKERS = {
    "arrays": of_arrays,
    "packed arrays": of_packed_arrays,
    "storage": of_storage,
    "fits": of_fits,
    "semi fits": of_semi_fits,
    "trainings": of_trainings,
    "results": of_results,
    "results' arrays": of_results_arrays,
    "data sets": of_datasets,
    "images": of_images,
    "tables": of_tables,
    "tables of arrays": of_tables_of_arrays,
}
"""Functions of a folder that make a loader with a valid file in it."""
INPUTS = [
    *((name, kind) for name in MAKERS for kind in ("damaged", "containers") if "fits" not in name),
]
INPUTS = [
    (name, kind)
    for name, kind in INPUTS
    if name != "trainings" and not (kind == "containers" and name in ("results", "tables"))
]
INPUTS += [("storage", "forged"), ("storage", "deep"), ("fits", "forged"), ("semi fits", "forged")]
INPUTS += [("trainings", "forged"), ("results", "texts"), ("tables", "tables")]
