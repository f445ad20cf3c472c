"""Whatever a user passes, the answer is a result or an error that names the argument."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoNormal

import rvrs
from rvrs import baselines, datasets, diagnostics, proposals, storage, vae, vae_training, vi
from rvrs.bench.compilation import counted
from tests.guides.models import X, Y, line
from tests.properties import strategies
from tests.properties.conftest import LONG, QUICK, checked, effort
from tests.properties.strategies import Traced

KEY = jax.random.key(0)
LARGEST = 2**31 - 1

# Errors are found in microseconds, but there are many arguments.
REFUSALS = effort(hypothesis.settings(QUICK, max_examples=40), LONG)


# What is legal where.


def whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def count(value):
    return whole(value) and 1 <= value <= LARGEST


def number(value):
    return isinstance(value, float) or (whole(value) and abs(value) < 2**1000)


def positive(value):
    return number(value) and 0 < value < np.inf


def acceptance(value):
    return number(value) and 0 < value <= 1


def epsilon(value):
    return number(value) and 0 <= value < 1


def seed(value):
    return whole(value) and value >= 0


def flag(value):
    return isinstance(value, bool)


def word(value):
    return isinstance(value, str) and value != ""


def path(value):
    return word(value) or isinstance(value, Path)


def shape(value):
    return isinstance(value, tuple) and all(map(count, value))


def key(value):
    return isinstance(value, jax.Array) and (
        (jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and value.shape == ())
        or (value.dtype == jnp.uint32 and value.shape == (2,))
    )


def quantiles(value):
    try:
        given = np.asarray(value)
    except (ValueError, TypeError):
        return False
    if jnp.issubdtype(given.dtype, jnp.floating) or jnp.issubdtype(given.dtype, jnp.integer):
        return bool(given.size and given.ndim <= 1 and np.all((given >= 0) & (given <= 1)))
    return False


def numbers_in_a_row(value):
    try:
        given = np.asarray(value)
    except (ValueError, TypeError):
        return False
    real = jnp.issubdtype(given.dtype, jnp.floating) or jnp.issubdtype(given.dtype, jnp.integer)
    return bool(real and given.ndim == 1 and np.all(np.isfinite(given)))


def nothing(value):
    return False


def float_leaves(value):
    leaves = jax.tree.leaves(value)
    return all(map(precise, leaves)) and any(np.size(leaf) for leaf in leaves)


def is_finite(value):
    return all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(value))


def precise(leaf):
    return isinstance(leaf, float) or str(getattr(leaf, "dtype", "")) in ("float32", "float64")


def vector(value):
    return (
        isinstance(value, jax.Array | np.ndarray)
        and value.shape[1:] == ()
        and value.size > 0
        and value.ndim == 1
        and precise(value)
    )


def one_of(*words):
    return lambda value: isinstance(value, str) and value in words


def optional(legal):
    return lambda value: value is None or legal(value)


class Case(NamedTuple):
    """A call of which one argument after the other is wrong."""

    make: Callable[[], Callable[..., Any]]
    """The function; made when it is needed."""
    legal: Mapping[str, Callable[[Any], bool]]
    """What its arguments may be."""
    given: Callable[[], dict[str, Any]] = dict
    """Arguments of it that are right."""
    named: Mapping[str, str] = {}
    """What messages call an argument, where that is not its name."""
    traceable: tuple[str, ...] = ()
    """Arguments whose values may be traced."""
    compiled: int = 0
    """Programs, all of them of single operations, that it takes to see that something is wrong."""


def refused(name, call, value):
    """The call raises an error of ours, that names the argument and is short enough to read."""
    with pytest.raises((ValueError, TypeError), match=rf"\b{re.escape(name)}\b") as caught:
        call(value)
    assert not isinstance(caught.value, jax.errors.JAXTypeError)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert len(text) < 1000, "too long to read"


# What there is to call.


def log_density(position):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))


def algorithm(**settings):
    return vi.as_top_level_api(log_density, OPTIMIZER, **settings)


OPTIMIZER = optax.adam(1e-2)


@functools.cache
def trained():
    """An algorithm and a state of it."""
    made = algorithm()
    return made, made.init(jnp.zeros(2))


@functools.cache
def guide():
    made = rvrs.AutoRVRS(line)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        made(X, Y)
    return made, {n: site["value"] for n, site in trace.items() if site["type"] == "param"}


def shared():
    return numpyro.sample("mean", dist.Normal(0.0, 1.0))


def rows(mean, y):
    with numpyro.plate("data", 8, subsample_size=len(y)):
        z = numpyro.sample("z", dist.Normal(mean, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def global_model(y):
    return shared(), y


def local_model(outputs):
    rows(*outputs)


def whole_model(y):
    local_model(global_model(y))


@functools.cache
def semi_guide():
    made = rvrs.AutoSemiRVRS(whole_model, local_model, AutoNormal(global_model))
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        made(Y)
    return made, {n: site["value"] for n, site in trace.items() if site["type"] == "param"}


@functools.cache
def fit():
    """A fit that was not trained."""
    made, params = guide()
    figures = dict.fromkeys(
        ("elbo", "elbo_error", "log_evidence", "log_evidence_error", "acceptance"), 0.5
    )
    curve = np.linspace(0.0, 1.0, 10)
    return rvrs.Fit(
        guide=made,
        params=params,
        **figures,
        **dict.fromkeys(("threshold", "khat", "ess", "seconds"), 0.5),
        num_draws=10,
        **dict.fromkeys(("losses", "acceptances", "thresholds", "proposals_per_draw"), curve),
        warnings=(),
        proposal_name="diagonal",
        arguments=((X, Y), {}),
        checkpoint=storage.Checkpoint({}, {}),
    )


AUTOENCODER = vae.VAE(num_pixels=4, num_latent=2, num_hidden=3)
IMAGES = np.zeros((6, 4), np.uint8)


@functools.cache
def weights():
    return AUTOENCODER.init(KEY)


def conjugate():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(x, 1.0), obs=2.0)


SETTINGS = {
    "target_acceptance": acceptance,
    "num_samples": count,
    "epsilon": epsilon,
    "threshold": lambda value: value is None or (number(value) and value == value),
    "estimator": one_of("reparameterized", "score"),
    "max_proposals": lambda value: value is None or (count(value) and value > 1),
    "init_scale": positive,
}
PROPOSALS = one_of("diagonal", "mvn", "low_rank")
FLOW = dict.fromkeys(("num_layers", "nn_width", "nn_depth"), count) | {"seed": seed}
DRAWING = {"rng_key": key, "params": nothing, "num_samples": count}
SAMPLERS = one_of("exact", "budget")
OF_RVRS = {
    "vae": nothing,
    "target_acceptance": acceptance,
    "num_samples": count,
    "num_proposals": lambda value: value is None or (count(value) and value > 1),
    "sampler": SAMPLERS,
}


CASES = {
    "vi.as_top_level_api": Case(
        lambda: vi.as_top_level_api,
        SETTINGS
        | {
            "logdensity_fn": callable,
            "optimizer": nothing,
            "proposal": PROPOSALS,
            "baseline": one_of("running", "leave_one_out"),
            "threshold_rule": one_of("tracking", "sgd"),
        },
        lambda: {"logdensity_fn": log_density, "optimizer": OPTIMIZER},
    ),
    "vi.init": Case(
        lambda: trained()[0].init,
        {"position": lambda v: float_leaves(v) and is_finite(v)},
        traceable=("position",),
        compiled=20,
    ),
    "vi.step": Case(
        lambda: trained()[0].step,
        {"rng_key": key, "state": nothing},
        lambda: {"rng_key": KEY, "state": trained()[1]},
    ),
    "vi.sample": Case(
        lambda: trained()[0].sample,
        {"rng_key": key, "state": nothing, "num_samples": count},
        lambda: {"rng_key": KEY, "state": trained()[1]},
    ),
    "vi.evaluate": Case(
        lambda: trained()[0].evaluate,
        {"rng_key": key, "state": nothing, "num_proposals": count},
        lambda: {"rng_key": KEY, "state": trained()[1]},
    ),
    "vi.run": Case(
        lambda: vi.run,
        {
            "rng_key": key,
            "algorithm": nothing,
            "state": nothing,
            "num_steps": count,
            "chunk_size": count,
            "callback": optional(callable),
        },
        lambda: {"rng_key": KEY, "algorithm": trained()[0], "state": trained()[1], "num_steps": 1},
    ),
    "AutoRVRS": Case(
        lambda: rvrs.AutoRVRS,
        SETTINGS
        | {
            "model": callable,
            "proposal": optional(PROPOSALS),
            "baseline": one_of("running", "leave_one_out"),
            "model_gradient": one_of("unbiased", "truncated"),
            "prefix": word,
            "init_loc_fn": callable,
        },
        lambda: {"model": line},
    ),
    "AutoRVRS.sample_posterior": Case(
        lambda: lambda x=X, y=Y, **given: guide()[0].sample_posterior(x=x, y=y, **given),
        {"rng_key": key, "params": nothing, "sample_shape": shape},
        lambda: {"rng_key": KEY, "params": guide()[1]},
    ),
    "AutoRVRS.quantiles": Case(
        lambda: lambda **given: guide()[0].quantiles(x=X, y=Y, **given),
        {
            "rng_key": optional(key),
            "params": nothing,
            "quantiles": quantiles,
            "num_samples": count,
        },
        lambda: {"rng_key": KEY, "params": guide()[1], "quantiles": 0.5},
        traceable=("quantiles",),
        compiled=20,
    ),
    "AutoRVRS.median": Case(
        lambda: lambda **given: guide()[0].median(x=X, y=Y, **given),
        {"rng_key": optional(key), "params": nothing, "num_samples": count},
        lambda: {"rng_key": KEY, "params": guide()[1]},
    ),
    "AutoRVRS.evaluate": Case(
        lambda: lambda **given: guide()[0].evaluate(x=X, y=Y, **given),
        {"rng_key": key, "params": nothing, "num_draws": count},
        lambda: {"rng_key": KEY, "params": guide()[1]},
    ),
    "AutoRVRS.assess": Case(
        lambda: lambda **given: guide()[0].assess(x=X, y=Y, **given),
        {"rng_key": key, "params": nothing, "num_draws": count},
        lambda: {"rng_key": KEY, "params": guide()[1]},
    ),
    "AutoRVRS.draw_latent": Case(
        lambda: lambda **given: guide()[0].draw_latent(x=X, y=Y, **given),
        DRAWING,
        lambda: {"rng_key": KEY, "params": guide()[1], "num_samples": 2},
    ),
    "AutoRVRS.propose_latent": Case(
        lambda: lambda **given: guide()[0].propose_latent(x=X, y=Y, **given),
        DRAWING,
        lambda: {"rng_key": KEY, "params": guide()[1], "num_samples": 2},
    ),
    "AutoRVRS.constrain": Case(
        lambda: lambda **given: guide()[0].constrain(x=X, y=Y, **given),
        {"params": nothing, "latent": nothing},
        lambda: {"params": guide()[1], "latent": jnp.zeros((3, 2))},
    ),
    "AutoSemiRVRS": Case(
        lambda: rvrs.AutoSemiRVRS,
        SETTINGS
        | {
            "model": callable,
            "local_model": callable,
            "global_guide": lambda v: v is None or (callable(v) and not isinstance(v, type)),
            "local_guide": lambda v: v is None or (callable(v) and not isinstance(v, type)),
            "subsample_plate": optional(word),
            "sampler": SAMPLERS,
            "model_gradient": one_of("unbiased", "truncated"),
            "prefix": word,
        },
        lambda: {"model": whole_model, "local_model": local_model},
    ),
    "AutoSemiRVRS by budget": Case(
        lambda: rvrs.AutoSemiRVRS,
        {"num_proposals": lambda value: value is None or (count(value) and value > 1)},
        lambda: {"model": whole_model, "local_model": local_model, "sampler": "budget"},
    ),
    "AutoSemiRVRS.sample_posterior": Case(
        lambda: lambda **given: semi_guide()[0].sample_posterior(y=Y, **given),
        {"rng_key": key, "params": nothing, "sample_shape": shape},
        lambda: {"rng_key": KEY, "params": semi_guide()[1]},
        compiled=20,
    ),
    "AutoSemiRVRS.quantiles": Case(
        lambda: lambda **given: semi_guide()[0].quantiles(y=Y, **given),
        {
            "rng_key": optional(key),
            "params": nothing,
            "quantiles": quantiles,
            "num_samples": count,
        },
        lambda: {"rng_key": KEY, "params": semi_guide()[1], "quantiles": 0.5},
        traceable=("quantiles",),
        compiled=20,
    ),
    "AutoSemiRVRS.evaluate": Case(
        lambda: lambda **given: semi_guide()[0].evaluate(y=Y, **given),
        {"rng_key": key, "params": nothing, "num_global": count, "num_local": count},
        lambda: {"rng_key": KEY, "params": semi_guide()[1]},
    ),
    "fit": Case(
        lambda: lambda rng_key, model, **given: rvrs.fit(rng_key, model, X, Y, **given),
        {
            "rng_key": key,
            "model": callable,
            "model_kwargs": lambda v: v is None or (isinstance(v, dict) and not v),
            "guide": optional(nothing),
            "proposal": lambda v: PROPOSALS(v) or v == "auto",
            "target_acceptance": acceptance,
            "num_steps": count,
            "batch_size": optional(nothing),
            "learning_rate": optional(nothing),
            "num_evaluation_draws": count,
            "progress": flag,
            "callback": optional(callable),
            "checkpoint": optional(path),
            "resume": optional(path),
        },
        lambda: {"rng_key": KEY, "model": line, "progress": False},
    ),
    "fit with local latents": Case(
        lambda: functools.partial(rvrs.fit, KEY, whole_model, Y, progress=False),
        {
            "target_acceptance": lambda v: acceptance(v) and v == 0.1,
            "batch_size": lambda v: v is None or (count(v) and v <= 8),
            "learning_rate": optional(positive),
            "num_evaluation_draws": lambda v: count(v) and v == 100_000,
            "num_steps": count,
            "proposal": lambda v: word(v) and v == "auto",
            "progress": flag,
            "callback": optional(callable),
            "checkpoint": optional(path),
            "resume": optional(path),
        },
        lambda: {"guide": semi_guide()[0]},
    ),
    "load": Case(
        lambda: lambda path, model=line, **given: rvrs.load(path, model, X, Y, **given),
        {
            "path": path,
            "model": callable,
            "model_kwargs": lambda v: v is None or (isinstance(v, dict) and not v),
            "guide": optional(nothing),
        },
        lambda: {"path": "nowhere.npz"},
    ),
    "Fit.sample": Case(
        lambda: fit().sample,
        {"rng_key": key, "num_samples": count, "resample": flag},
        lambda: {"rng_key": KEY},
    ),
    "Fit.to_arviz": Case(lambda: fit().to_arviz, {"rng_key": optional(key), "num_samples": count}),
    "Fit.plot": Case(lambda: fit().plot, {"path": optional(path)}),
    "Fit.save": Case(lambda: fit().save, {"path": path}),
    "low_rank_normal": Case(lambda: proposals.low_rank_normal, {"rank": count}),
    "coupling_flow": Case(lambda: proposals.coupling_flow, FLOW),
    "masked_autoregressive_flow": Case(lambda: proposals.masked_autoregressive_flow, FLOW),
    **{
        f"{family.__name__}.init": Case(
            lambda family=family: family().init,
            {"location": vector, "scale": positive},
            lambda: {"location": jnp.zeros(2), "scale": 1.0},
            traceable=("location",),
        )
        for family in (
            proposals.diagonal_normal,
            proposals.full_rank_normal,
            proposals.coupling_flow,
            proposals.masked_autoregressive_flow,
        )
    },
    "VAE": Case(lambda: vae.VAE, dict.fromkeys(("num_pixels", "num_latent", "num_hidden"), count)),
    "VAE.init": Case(lambda: AUTOENCODER.init, {"rng_key": key}),
    "VAE.init_encoder": Case(lambda: AUTOENCODER.init_encoder, {"rng_key": key}),
    "VAE.init_decoder": Case(lambda: AUTOENCODER.init_decoder, {"rng_key": key}),
    "VAE.encode": Case(
        lambda: AUTOENCODER.encode,
        {"images": nothing},
        lambda: {"encoder": weights()["encoder"]},
    ),
    "VAE.log_weights": Case(
        lambda: AUTOENCODER.log_weights,
        {"rng_key": key, "params": nothing, "images": nothing, "num_samples": count},
        lambda: {"rng_key": KEY, "params": weights(), "images": IMAGES, "num_samples": 2},
    ),
    "VAE.importance_bound": Case(
        lambda: AUTOENCODER.importance_bound,
        {
            "rng_key": key,
            "params": nothing,
            "images": nothing,
            "num_samples": count,
            "chunk": count,
        },
        lambda: {"rng_key": KEY, "params": weights(), "images": IMAGES},
    ),
    "vae_training.standard": Case(lambda: vae_training.standard, {"vae": nothing}),
    "vae_training.iwae": Case(
        lambda: vae_training.iwae,
        {"vae": nothing, "num_samples": count},
        lambda: {"vae": AUTOENCODER},
    ),
    "vae_training.uha": Case(
        lambda: vae_training.uha,
        {"vae": nothing, "num_steps": count},
        lambda: {"vae": AUTOENCODER},
    ),
    "vae_training.guided": Case(
        lambda: vae_training.guided,
        {"vae": nothing, "make_guide": callable},
        lambda: {"vae": AUTOENCODER, "make_guide": lambda: AUTOENCODER.encoder_guide},
    ),
    "vae_training.rvrs": Case(lambda: vae_training.rvrs, OF_RVRS, lambda: {"vae": AUTOENCODER}),
    "vae_training.rvrs_guide": Case(
        lambda: vae_training.rvrs_guide, OF_RVRS, lambda: {"vae": AUTOENCODER}
    ),
    "vae_training.train": Case(
        lambda: vae_training.train,
        {
            "method": nothing,
            "rng_key": key,
            "images": nothing,
            "num_epochs": count,
            "batch_size": lambda v: count(v) and v <= len(IMAGES),
            "learning_rate": lambda v: positive(v) or callable(v),
            "params": lambda v: v is None or isinstance(v, dict),
            "progress": flag,
            "callback": optional(callable),
            "checkpoint": optional(path),
            "resume": optional(path),
            "description": lambda v: v is None or isinstance(v, dict),
        },
        lambda: {
            "method": vae_training.standard(AUTOENCODER),
            "rng_key": KEY,
            "images": IMAGES,
            "batch_size": 2,
            "progress": False,
        },
        compiled=20,
    ),
    "baselines.fit": Case(
        lambda: baselines.fit,
        {
            "rng_key": key,
            "method": nothing,
            "task": nothing,
            "num_steps": count,
            "proposal": one_of("diagonal", "mvn"),
            "num_evaluation_draws": count,
            "epsilon": optional(epsilon),
            "num_warmup": count,
            "thinning": count,
            "report": callable,
        },
        lambda: {
            "rng_key": KEY,
            "method": "mf",
            "task": baselines.Task("conjugate", conjugate),
            "num_steps": 10,
        },
    ),
    "baselines.parse": Case(lambda: baselines.parse, {"name": nothing}, named={"name": "method"}),
    "diagnostics.smooth": Case(lambda: diagnostics.smooth, {"log_weights": numbers_in_a_row}),
    "diagnostics.max_sliced_wasserstein": Case(
        lambda: diagnostics.max_sliced_wasserstein,
        {
            "draws": nothing,
            "reference": nothing,
            "num_projections": count,
            "num_replicates": count,
            "seed": seed,
        },
        lambda: {"draws": np.zeros((3, 7)), "reference": np.ones((4, 7))},
    ),
    "datasets.load": Case(
        lambda: datasets.load,
        {
            "name": nothing,
            "num_rows": lambda v: v is None or (count(v) and v <= 569),
            "seed": lambda v: whole(v) and 0 <= v < 2**32,
        },
        lambda: {"name": "breast_cancer"},
    ),
    "datasets.load_images": Case(lambda: datasets.load_images, {"name": nothing}),
}


ARGUMENTS = [(name, argument) for name, case in CASES.items() for argument in case.legal]


@REFUSALS
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=map("-".join, ARGUMENTS))
def test_a_wrong_argument_is_refused_by_its_name_before_anything_is_compiled(
    effort, name, argument
):
    case = CASES[name]
    function, given = case.make(), case.given()

    @checked(effort, drawn=strategies.other_than(case.legal[argument]))
    def _(drawn):
        value = drawn.value

        def call(value):
            return function(**given | {argument: value})

        with counted() as programs:
            if not isinstance(value, Traced):
                refused(case.named.get(argument, argument), call, value)
            elif argument not in case.traceable:
                value.call(functools.partial(refused, case.named.get(argument, argument), call))
        assert programs() <= case.compiled


# Every example has programs of its own, which take seconds to compile.
WORKS = pytest.mark.parametrize(
    "effort",
    [pytest.param(hypothesis.settings(LONG, max_examples=60), marks=pytest.mark.slow)],
    ids=["long"],
)
REMEDIES = r"target_acceptance|epsilon|num_samples|max_proposals|threshold"


@WORKS
def test_legal_settings_give_finite_numbers_of_the_type_of_the_position_or_are_refused(effort):
    @checked(
        effort,
        num_samples=st.sampled_from([1, 2, 3, 17, 1000]),
        pair=strategies.acceptance_and_epsilon(),
        threshold=st.sampled_from([None, None, 0.0, 30.0, 1e30, np.inf]),
        estimator=st.sampled_from(["reparameterized", "score"]),
        baseline=st.sampled_from(["running", "leave_one_out"]),
        threshold_rule=st.sampled_from(["tracking", "sgd"]),
        max_proposals=st.sampled_from([None, LARGEST]),
        proposal=st.sampled_from(["diagonal", "mvn", "low_rank"]),
        init_scale=st.sampled_from([1e-3, 1.0, 30.0]),
        dtype=strategies.DTYPES,
    )
    def _(pair, dtype, **settings):
        target_acceptance, epsilon = pair
        settings |= {"target_acceptance": target_acceptance, "epsilon": epsilon}
        with jax.enable_x64(dtype == "float64"):
            try:
                made = algorithm(**settings)
            except ValueError as error:
                refusal = str(error)
            else:
                refusal = ""
            if refusal:
                assert re.search(REMEDIES, refusal), refusal
                return
            # A thousand draws at a tiny acceptance would be millions of proposals at once.
            hypothesis.assume(settings["num_samples"] / target_acceptance < 1e5)
            state = made.init(jnp.zeros(2, dtype))
            state, info = vi.run(KEY, made, state, 2, chunk_size=LARGEST)
            draws, quality = made.sample(KEY, state, 3), made.evaluate(KEY, state, 100)
            results = jax.tree.map(np.asarray, (state.parameters, info, draws, quality))
        parameters, info, draws, quality = results
        for leaf in (*parameters, info.elbo, info.threshold, draws, *quality):
            assert leaf.dtype == dtype
        for leaf in (*parameters, info.elbo[~info.capped], info.acceptance, draws):
            assert np.all(np.isfinite(leaf))
        assert not np.any(np.isnan(info.threshold))
        assert np.isfinite(quality.elbo)


@WORKS
def test_data_of_any_type_give_finite_numbers_of_the_precision_that_is_on(effort):
    @checked(
        effort,
        kind=st.sampled_from(["float32", "float16", "bfloat16", "int8", "uint32", "bool"]),
        x64=st.booleans(),
    )
    def _(kind, x64):
        with jax.enable_x64(x64):
            made = rvrs.AutoRVRS(line, target_acceptance=0.5)
            data = (jnp.asarray(X).astype(kind), jnp.asarray(Y).astype(kind))
            with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
                made(*data)
            params = {n: s["value"] for n, s in trace.items() if s["type"] == "param"}
            quality = made.evaluate(KEY, params, *data, num_draws=50)
        for leaf in quality:
            assert leaf.dtype == ("float64" if x64 else "float32")
            assert np.isfinite(leaf)


@REFUSALS
def test_images_of_any_type_are_encoded_or_refused(effort):
    kinds = ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float32", "float64"]

    @checked(
        effort, kind=st.sampled_from([*kinds, "complex64", "str"]), rows=st.sampled_from([1, 6])
    )
    def _(kind, rows):
        images = np.asarray(IMAGES[:rows]).astype(jnp.bfloat16 if kind == "bfloat16" else kind)
        encoder = weights()["encoder"]
        if kind not in kinds:
            refused("images", functools.partial(AUTOENCODER.encode, encoder), images)
            return
        found = AUTOENCODER.encode(encoder, images)
        assert found.mean.dtype == "float32"
        assert found.mean.shape == (rows, AUTOENCODER.num_latent)
        assert np.all(np.isfinite(found.mean))


def test_quantiles_may_be_traced():
    made, params = guide()
    levels = jax.jit(lambda q: made.quantiles(params, q, X, Y, num_samples=20))(jnp.ones(2) / 2)
    assert levels["slope"].shape == (2,)


@REFUSALS
def test_any_number_of_weights_can_be_smoothed(effort):
    values = st.floats(-1e6, 1e6)

    @checked(effort, log_weights=st.lists(values, max_size=40), spread=st.sampled_from([0.0, 1.0]))
    def _(log_weights, spread):
        found = diagnostics.smooth(spread * np.asarray(log_weights))
        assert found.weights.shape == (len(log_weights),)
        assert np.all(found.weights >= 0)
        if log_weights:
            np.testing.assert_allclose(np.sum(found.weights), 1)
            assert 1 - 1e-9 <= found.ess <= len(log_weights) + 1e-9
