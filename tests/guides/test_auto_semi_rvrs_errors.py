"""What AutoSemiRVRS refuses, and what it says then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal

import rvrs
from tests.guides.models import svi_of

Y = np.array([0.3, -1.2, 0.8, 2.5], np.float32)
KEY = jax.random.key(0)


def data_plate():
    return numpyro.plate("data", 4, subsample_size=2)


def observe(mean, index):
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=jnp.asarray(Y)[index])


def local():
    """Takes its rows by index."""
    with data_plate() as index:
        observe(numpyro.sample("z", dist.Normal(0.0, 1.0)), index)


def rows(y):
    """Takes its rows as an argument."""
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def rows_of(y, size):
    """Takes the rows of a batch as an argument."""
    with numpyro.plate("data", size, subsample_size=len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def mean():
    return numpyro.sample("mean", dist.Normal(0.0, 1.0))


def around(mean):
    with data_plate() as index:
        observe(numpyro.sample("z", dist.Normal(mean, 1.0)), index)


def hierarchy():
    around(mean())


def init(model, *args, local_model=None, **settings):
    guide = rvrs.AutoSemiRVRS(model, local_model or model, **settings)
    return svi_of(model, guide).init(KEY, *args)


def look(*args, **settings):
    """What is refused by shapes and names alone; compiles nothing."""
    return jax.eval_shape(lambda: init(*args, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "both"}, "sampler must be one of 'exact', 'budget', got 'both'"),
        ({"sampler": None}, "sampler must be one of"),
        ({"num_proposals": 20}, "num_proposals=20 is for sampler='budget'"),
        ({"sampler": "budget", "num_proposals": 1}, "num_proposals=1 is less than num_samples=2"),
        ({"sampler": "budget", "num_proposals": 9.5}, "num_proposals must be a whole number"),
        ({"target_acceptance": 0.0}, "target_acceptance must be a number in"),
        ({"target_acceptance": "0.1"}, "target_acceptance must be a number in"),
        ({"target_acceptance": 1e-5}, "cannot be reached with epsilon"),
        ({"num_samples": 1}, "num_samples=2 or more"),
        ({"num_samples": 1, "sampler": "budget"}, "num_samples=2 or more"),
        ({"num_samples": 2.0}, "num_samples must be a whole number"),
        ({"epsilon": 1.0}, "epsilon must be a number in"),
        ({"threshold": float("nan")}, "threshold must be None"),
        ({"estimator": "vrs"}, "estimator must be one of"),
        ({"model_gradient": True}, "model_gradient must be one of"),
        ({"max_proposals": 1}, "max_proposals=1 is less than num_samples=2"),
        ({"init_scale": 0.0}, "init_scale must be a finite number above 0"),
        ({"init_scale": "small"}, "init_scale must be a finite number above 0"),
        ({"prefix": ""}, "prefix must be a word"),
        ({"prefix": 3}, "prefix must be a word"),
        ({"model": 3}, "^model must be a NumPyro model"),
        ({"local_model": None}, "local_model must be a NumPyro model"),
        ({"global_guide": 3}, "global_guide must be a guide"),
        ({"global_guide": AutoNormal}, "global_guide must be a guide .* an autoguide of a model"),
        ({"local_guide": "normal"}, "local_guide must be a guide"),
        ({"local_guide": AutoNormal}, "local_guide must be a guide .* an autoguide of a model"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        rvrs.AutoSemiRVRS(**{"model": local, "local_model": local} | settings)


def no_local():
    location = mean()
    with data_plate() as index:
        observe(location, index)


def two_subsampled():
    with numpyro.plate("columns", 6, subsample_size=3, dim=-2), data_plate():
        numpyro.sample("z", dist.Normal(0.0, 1.0))


def two_plates():
    with numpyro.plate("data", 4):
        numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("others", 3):
        numpyro.sample("x", dist.Normal(0.0, 1.0), obs=jnp.zeros(3))


def another_subsampled():
    with numpyro.plate("data", 4):
        numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("others", 4, subsample_size=2):
        numpyro.sample("x", dist.Normal(0.0, 1.0), obs=jnp.zeros(2))


def several_dims():
    with numpyro.plate("data", 4, dim=-1) as index:
        observe(numpyro.sample("z", dist.Normal(0.0, 1.0)), index)
    with numpyro.plate("data", 4, dim=-2):
        numpyro.sample("w", dist.Normal(0.0, 1.0))


def discrete():
    with data_plate() as index:
        observe(numpyro.sample("k", dist.Bernoulli(0.5)), index)


def stateful():
    numpyro.primitives.mutable("count", {"n": 0})
    local()


@pytest.mark.parametrize(
    ("model", "plate", "message"),
    [
        (no_local, None, "no local latent variables in plate 'data'; use rvrs.AutoRVRS"),
        (two_subsampled, None, r"subsamples more than one plate \(columns, data\)"),
        (two_subsampled, "data", r"subsamples more than one plate \(columns, data\)"),
        (local, "rows", "subsample_plate='rows' is not a plate of the model, which has 'data'"),
        (mean, "rows", "subsample_plate='rows' is not a plate of the model, which has none"),
        (another_subsampled, "data", "subsample_plate='data', but .* subsamples plate 'others'"),
        (two_plates, None, r"not clear \(plates: 'data', 'others'\).*subsample_plate"),
        (two_plates, "others", "no local latent variables in plate 'others'"),
        (mean, None, r"not clear \(plates: none\)"),
        (several_dims, None, r"plate 'data' has several dims \(\[-2, -1\]\)"),
        (discrete, None, "latent site 'k' is discrete; sum it out"),
        (stateful, None, r"mutable state \('count'\)"),
    ],
)
def test_models_that_it_cannot_take_are_refused_by_name(model, plate, message):
    with pytest.raises(ValueError, match=message):
        look(model, subsample_plate=plate)


def random_walk():
    with data_plate() as index:
        observe(jnp.cumsum(numpyro.sample("step", dist.Normal(0.0, 1.0))), index)


def random_walk_of_rows(y):
    with numpyro.plate("data", len(y)):
        step = numpyro.sample("step", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(jnp.cumsum(step), 1.0), obs=y)


def batch_normalised():
    with data_plate() as index:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        observe((z - z.mean()) / (1 + z.std()), index)


def sum_inside():
    with data_plate() as index:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        observe(z, index)
        numpyro.factor("pull", -(z.sum() ** 2))


@pytest.mark.parametrize(
    ("model", "args"),
    [(random_walk, ()), (random_walk_of_rows, (Y,)), (batch_normalised, ()), (sum_inside, ())],
)
def test_data_points_that_depend_on_each_other_are_refused(model, args):
    with pytest.raises(ValueError, match="plate 'data' depends on other points of the batch"):
        init(model, *args)


def test_they_are_refused_where_every_run_has_all_of_the_data():
    def model():
        with numpyro.plate("data", 4):
            step = numpyro.sample("step", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(jnp.cumsum(step), 1.0), obs=jnp.asarray(Y))

    with (
        pytest.warns(UserWarning, match=r"computes with all 4; use numpyro\.subsample"),
        pytest.raises(ValueError, match="depends on other points of the batch"),
    ):
        init(model)


def test_a_factor_outside_of_the_plate_that_depends_on_local_latents_is_refused():
    def model():
        with data_plate() as index:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            observe(z, index)
        numpyro.factor("pull", -(z.sum() ** 2))

    with pytest.raises(ValueError, match="a site outside of plate 'data' depends on local latents"):
        init(model)


def test_global_latents_without_a_guide_for_them_are_named():
    with pytest.raises(ValueError, match=r"global_guide is missing.*\(mean\).*AutoNormal"):
        look(hierarchy, local_model=around)


def misnamed():
    return numpyro.sample("location", dist.Normal(0.0, 1.0))


def one_too_many():
    numpyro.sample("scale", dist.HalfNormal(1.0))
    return mean()


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (AutoNormal(misnamed), "missing: mean; not among them: location"),
        (AutoNormal(one_too_many), "missing: none; not among them: scale"),
        (misnamed, "missing: mean; not among them: location"),
        (lambda: None, "missing: mean; not among them: none"),
    ],
)
def test_a_global_guide_with_other_sites_is_refused_by_their_names(guide, message):
    with pytest.raises(ValueError, match=f"global_guide: its sample sites must be.*{message}"):
        look(hierarchy, local_model=around, global_guide=guide)


def two_latents():
    with data_plate() as index:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        observe(z + numpyro.sample("w", dist.Normal(0.0, 1.0)), index)


def sites(**distributions):
    """A local guide with these sites."""

    def guide():
        with data_plate():
            for name, fn in distributions.items():
                numpyro.sample(name, fn)

    return guide


def outside():
    numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]))


def follows():
    with data_plate():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("w", dist.Normal(z, 1.0))


def random_scale():
    with data_plate():
        numpyro.sample("z", dist.Normal(0.0, jnp.exp(jax.random.normal(numpyro.prng_key()))))


def stateful_guide():
    numpyro.primitives.mutable("count", {"n": 0})
    sites(z=dist.Normal(0.0, 1.0))()


def all_rows():
    with data_plate():
        numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0))


NORMAL = dist.Normal(0.0, 1.0)
NO_DENSITY = r"the distribution of site 'z' \({}\) has no density with a reparameterized sampler"


@pytest.mark.parametrize(
    ("model", "guide", "message"),
    [
        (local, sites(), "missing: 'z'; not in the plate of the model: none"),
        (two_latents, sites(z=NORMAL), "missing: 'w'; not in the plate of the model: none"),
        (local, sites(z=NORMAL, w=NORMAL), "missing: none; not in the plate of the model: 'w'"),
        (local, outside, "site 'z' is not inside the plate 'data'"),
        (local, sites(z=dist.Delta(0.0)), NO_DENSITY.format("Delta")),
        (local, sites(z=dist.Poisson(1.0)), NO_DENSITY.format("Poisson")),
        (local, AutoDelta(local), NO_DENSITY.format("Delta")),
        (local, sites(z=NORMAL.expand([3]).to_event(1)), "has 1 event dimensions, but 0 in the"),
        (local, stateful_guide, "local_guide has mutable state"),
        (local, all_rows, "cannot be run for one data point of plate 'data' alone"),
    ],
)
def test_local_guides_that_cannot_propose_are_refused_by_name(model, guide, message):
    with pytest.raises(ValueError, match=message):
        look(model, local_guide=guide)


@pytest.mark.parametrize(
    ("model", "guide", "message"),
    [
        (two_latents, follows, "the distribution of site 'w' depends on the draw at another site"),
        (local, random_scale, r"site 'z' depends on .* \(or draws random numbers of its own\)"),
    ],
)
def test_local_sites_that_depend_on_draws_are_refused(model, guide, message):
    # Not by shapes alone: this is looked for where nothing is traced.
    with pytest.raises(ValueError, match=message):
        init(model, local_guide=guide)


def test_an_autoguide_with_one_vector_for_all_points_is_refused():
    with pytest.raises(ValueError, match="does not support local latent variables"):
        look(local, local_guide=AutoDiagonalNormal(local))
    with pytest.raises(ValueError, match="not in the plate of the model: '_auto_latent'"):
        look(rows, Y, local_guide=AutoDiagonalNormal(rows))


def started(model, *args, loss=None):
    loss = Trace_ELBO() if loss is None else loss
    guide = rvrs.AutoSemiRVRS(model, model)
    svi = SVI(model, guide, optax.adam(1e-2), loss)
    # A state of the right shape: what is refused is refused before anything is compiled.
    like = jax.eval_shape(lambda: svi.init(KEY, *args))
    fill = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)  # noqa: E731
    optim_state, mutable_state = jax.tree.map(fill, (like.optim_state, like.mutable_state))
    return (
        guide,
        svi,
        like._replace(optim_state=optim_state, mutable_state=mutable_state, rng_key=KEY),
    )


@functools.cache
def by_index():
    return started(local)


@functools.cache
def by_rows():
    return started(rows, Y)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([1, 4], "indices of plate 'data' must be from 0 to 3, got values from 1 to 4"),
        ([-1, 0], "indices of plate 'data' must be from 0 to 3, got values from -1 to 0"),
        ([0.0, 1.0], "must be whole numbers along one axis, got float32"),
        ([[0, 1]], r"must be whole numbers along one axis, got int32 of shape \(1, 2\)"),
    ],
)
def test_indices_of_points_that_there_are_not_are_refused(index, message):
    guide, svi, state = by_index()
    with handlers.substitute(data={"data": jnp.array(index)}):
        with pytest.raises(ValueError, match=message):
            svi.update(state)
        with pytest.raises(ValueError, match=message):
            guide.sample_posterior(KEY, svi.get_params(state))


def test_rows_that_are_not_those_of_the_chosen_points_are_refused():
    guide, svi, state = started(rows_of, Y, 9)
    message = "2 points of plate 'data' were chosen, but the arguments hold the rows of 4"
    with (
        handlers.substitute(data={"data": jnp.array([7, 8])}),
        pytest.raises(ValueError, match=message),
    ):
        guide.sample_posterior(KEY, svi.get_params(state), Y, 9)
    with pytest.raises(ValueError, match=r"'data' has 11 points now, but thresholds .* for 9"):
        svi.update(state, Y, 11)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_a_number_of_points_that_changed_is_refused(transform):
    _, svi, state = by_rows()
    message = "'data' has 3 points now, but thresholds are stored for 4; .* subsample_size"
    with pytest.raises(ValueError, match=message):
        transform(svi.update)(state, Y[:3])


def test_several_particles_are_refused_with_the_alternative():
    _, svi, state = started(local, loss=Trace_ELBO(num_particles=2))
    with pytest.raises(ValueError, match=r"num_particles > 1 .*AutoSemiRVRS\(\.\.\., num_samples"):
        svi.update(state)


METHODS = ["sample_posterior", "evaluate"]


@pytest.mark.parametrize("method", METHODS)
def test_parameters_that_belong_to_something_else_are_refused(method):
    guide, svi, state = by_index()
    params = svi.get_params(state)
    renamed = {name.replace("auto", "other"): value for name, value in params.items()}
    with pytest.raises(ValueError, match="params has no 'auto_z_loc'"):
        getattr(guide, method)(KEY, renamed)
    guide, svi, state = by_rows()
    message = r"params\['auto_z_loc'\] has the shape \(4,\), but with these arguments it is \(3,\)"
    with pytest.raises(ValueError, match=message):
        getattr(guide, method)(KEY, svi.get_params(state), Y[:3])


@pytest.mark.parametrize("method", METHODS)
def test_arguments_that_are_not_the_models_are_asked_for(method):
    guide, svi, state = by_rows()
    params = svi.get_params(state)
    call = getattr(guide, method)
    for args, kwargs, message in [
        ((), {}, "missing a required argument: 'y'"),
        ((Y, Y), {}, "too many positional arguments"),
        ((Y,), {"z": Y}, "unexpected keyword argument 'z'"),
    ]:
        with pytest.raises(TypeError, match=f"model's arguments after the parameters: .*{message}"):
            call(KEY, params, *args, **kwargs)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("sample_posterior", {"rng_key": 0}, "rng_key must be one JAX random key"),
        ("sample_posterior", {"sample_shape": 3}, "sample_shape must be a tuple"),
        ("evaluate", {"rng_key": 0}, "rng_key must be one JAX random key"),
        ("evaluate", {"num_global": 0}, "num_global must be a whole number"),
        ("evaluate", {"num_local": 1.5}, "num_local must be a whole number"),
        ("quantiles", {"quantiles": 1.5}, "quantiles must be numbers between 0 and 1"),
        ("quantiles", {"quantiles": 0.5, "num_samples": 0}, "num_samples must be a whole number"),
    ],
)
def test_bad_arguments_of_methods_are_named(method, settings, message):
    guide, svi, state = by_index()
    needed = {} if method == "quantiles" else {"rng_key": KEY}
    with pytest.raises(ValueError, match=message):
        getattr(guide, method)(params=svi.get_params(state), **needed | settings)


@pytest.mark.slow
def test_points_that_hit_max_proposals_are_counted_and_the_first_one_named():
    def model():
        with numpyro.plate("data", 4) as index:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            # Nothing at all has density at the points 1 and 3.
            numpyro.factor("never", jnp.where(index % 2 == 1, -jnp.inf, z))

    guide = rvrs.AutoSemiRVRS(model, model, target_acceptance=0.5, max_proposals=8)
    params = {"auto_z_loc": jnp.zeros(4), "auto_z_scale": jnp.ones(4)}
    with pytest.warns(UserWarning, match=r"hit at 2 of 4 data points \(first: 1\)"):
        guide.sample_posterior(KEY, params, sample_shape=(3,))
