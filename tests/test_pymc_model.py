"""PyMC models as NumPyro's: the same density, values and names; what cannot be is refused."""

import gc
import os
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from numpyro.infer.util import log_density

from rvrs import diagnostics, pymc_model
from rvrs.pymc_model import convert

pm = pytest.importorskip("pymc")
pytensor = pytest.importorskip("pytensor")
pt = pytensor.tensor

VALUES = np.array([0.3, -1.2, 2.0])
HOLES = np.array([[1.0, np.nan, 2.0], [np.nan, 0.0, 1.5]])


def transforms():
    ordered = pm.distributions.transforms.ordered
    positive = pm.HalfNormal("positive", 2.0)
    pm.Beta("unit", 2.0, 3.0)
    pm.Uniform("interval", -3.0, 5.0 + positive, shape=2)
    simplex = pm.Dirichlet("simplex", np.array([1.0, 2.0, 3.0]))
    pm.Normal("ordered", 0.0, 2.0, shape=3, transform=ordered, initval=[-1.0, 0.0, 1.0])
    pm.VonMises("angle", 0.0, 2.0)
    pm.ZeroSumNormal("sums to zero", 1.0, shape=4)
    pm.Deterministic("product", positive * simplex)


def covariance():
    factor, _, _ = pm.LKJCholeskyCov("factor", n=3, eta=2.0, sd_dist=pm.Exponential.dist(1.0))
    pm.MvNormal("vectors", np.zeros(3), chol=factor, shape=(2, 3))
    pm.MvNormal("y", np.zeros(3), chol=factor, observed=VALUES)


def time_series():
    walk = pm.GaussianRandomWalk("walk", mu=0.1, init_dist=pm.Normal.dist(0.0, 1.0), shape=3)
    waiting = pm.Exponential.dist(pt.exp(walk[-1]))
    pm.Censored("censored", waiting, None, 1.0, observed=[0.5, 1.0])
    pm.NormalMixture("mixture", w=[0.3, 0.7], mu=walk[:2], sigma=1.0, observed=VALUES)
    pm.NegativeBinomial("counts", mu=pt.exp(walk), alpha=2.0, observed=[1, 0, 3])
    pm.CustomDist("own", walk[0], logp=lambda value, at: -((value - at) ** 4), observed=0.3)


def missing():
    mean = pm.Normal("mean", 0.0, 1.0)
    with pytest.warns(match="missing values"):
        pm.Normal("y", mean, 1.0, observed=HOLES)


def scaled():
    mean = pm.Normal("mean", 0.0, 1.0)
    pm.Normal("y", mean, 1.0, observed=VALUES, total_size=30)


def potential():
    mean = pm.Normal("mean", 0.0, 1.0)
    pm.Potential("steep", -(mean**4))


def submodel():
    with pm.Model(name="inner"):
        scale = pm.HalfCauchy("scale", 1.0)
    pm.Normal("outer", 0.0, scale)


def built(write, **options):
    with pm.Model(**options) as model:
        write()
    return model


def moved(converted, *shape, scale=1.0):
    """Values of the latent sites: how far to go from the start."""
    rng = np.random.default_rng(0)
    start = converted.data["start"]
    return {
        f"{n} from its start": scale * rng.normal(size=shape + v.shape) for n, v in start.items()
    }


def evaluated(converted, latent):
    """The log joint density, and what NumPyro has at the sites that are shown."""
    density, trace = log_density(converted.model, (converted.data,), {}, latent)
    return density, {n: s["value"] for n, s in trace.items() if s["type"] == "deterministic"}


@pytest.mark.parametrize(
    "write", [transforms, covariance, time_series, missing, scaled, potential, submodel]
)
def test_density_values_and_names_are_those_of_pymc(write):
    model = built(write)
    converted = convert(model)
    variables = [*model.free_RVs, *model.deterministics]
    names = [variable.name for variable in variables]
    outputs = [model.logp(), *model.replace_rvs_by_values(variables)]
    pymc = model.compile_fn(outputs, inputs=model.value_vars, mode="FAST_COMPILE")
    latent = moved(converted, 4)
    densities, values = jax.jit(jax.vmap(lambda latent: evaluated(converted, latent)))(latent)
    assert converted.free_names == tuple(variable.name for variable in model.free_RVs)
    assert values.keys() == set(names)
    for index, density in enumerate(densities):
        start = converted.data["start"]
        point = {
            name: first + latent[f"{name} from its start"][index] for name, first in start.items()
        }
        wanted_density, *wanted = pymc(point)
        # PyMC keeps constants such as 2.0 in float32.
        np.testing.assert_allclose(density, wanted_density, rtol=1e-6)
        for name, value in zip(names, wanted, strict=True):
            np.testing.assert_allclose(values[name][index], value, rtol=1e-9, atol=1e-12)


def test_the_density_of_unconstrained_values_integrates_to_one():
    converted = convert(built(lambda: pm.Gamma("rate", 3.0, 1.0)))
    grid = np.linspace(-12.0, 5.0, 2001)
    latent = {"rate_log__ from its start": grid}
    densities, _ = jax.vmap(lambda latent: evaluated(converted, latent))(latent)
    # The rate is an exponential here: without its Jacobian this were the mean of 1 / rate, 1 / 2.
    # Trapezoids are exact to all digits; PyMC keeps constants such as 3.0 in float32.
    assert abs(np.trapezoid(np.exp(densities), grid) - 1) < 1e-7


def test_missing_values_are_inferred_and_put_among_the_others():
    converted = convert(built(missing))
    assert converted.free_names == ("mean", "y_unobserved")
    _, found = evaluated(converted, moved(converted))
    known = ~np.isnan(HOLES)
    np.testing.assert_array_equal(found["y"][known], HOLES[known])
    np.testing.assert_array_equal(found["y"][~known], found["y_unobserved"])


def test_a_total_size_scales_the_likelihood():
    one, ten = (convert(built(write)) for write in (lambda: pm.Normal("mean"), scaled))
    latent = {"mean from its start": np.array(0.7)}
    likelihood = np.sum(-0.5 * (VALUES - 0.7) ** 2 - 0.5 * np.log(2 * np.pi))
    difference = evaluated(ten, latent)[0] - evaluated(one, latent)[0]
    np.testing.assert_allclose(difference, 10 * likelihood, rtol=1e-12)


def test_the_start_is_the_initial_point_of_the_model():
    def write():
        pm.Normal("x", 0.0, 1.0, initval=30.0)
        pm.Gamma("rate", 2.0, 1.0, initval=5.0)

    converted = convert(built(write))
    # The search for a start is centred at zero.
    _, found = evaluated(converted, moved(converted, scale=0.0))
    np.testing.assert_allclose([found["x"], found["rate"]], [30.0, 5.0], rtol=1e-12)


def test_a_density_that_is_infinite_at_the_initial_point_alone_is_accepted():
    def write():
        x = pm.Normal("x", 0.0, 1.0)
        pm.Potential("hole", pt.switch(pt.eq(x, 0.0), -np.inf, 0.0))

    assert np.isfinite(convert(built(write)).data["log density"])


def test_a_model_that_did_not_change_is_known_again_but_not_kept_alive():
    model = built(scaled)
    converted = convert(model)
    assert convert(model).model is converted.model
    assert convert(built(scaled)).model is not converted.model
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_predictions_of_pymc_leave_a_model_as_it_was():
    model = built(scaled)
    converted = convert(model)
    drawn = diagnostics.arviz().from_dict({"mean": np.zeros((1, 2))}, observed_data={"y": VALUES})
    compilation = {"mode": "FAST_COMPILE"}
    pm.sample_posterior_predictive(drawn, model, compile_kwargs=compilation, progressbar=False)
    # But for the list of its variables, which has the observed one twice.
    assert len(model.basic_RVs) == 3
    assert convert(model).model is converted.model


def add_deterministic(model, _):
    with model:
        pm.Deterministic("twice", 2 * model["mean"])


def add_bound(model, _):
    with model:
        pm.Potential("bound", pt.switch(model["mean"] < 40.0, 0.0, -np.inf))


def set_data(model, _):
    with model:
        pm.set_data({"y": VALUES + 1.0})


def set_shared(_, outside):
    outside.shift.set_value(7.0)


def set_variable_of_python(_, outside):
    outside.power = 4


@pytest.mark.parametrize(
    "change", [add_deterministic, add_bound, set_data, set_shared, set_variable_of_python]
)
def test_a_model_that_changed_is_converted_anew(change):
    # Three of them are not seen in the density around the start.
    outside = SimpleNamespace(shift=pytensor.shared(2.0), power=2)
    with pm.Model() as model:
        mean = pm.Normal("mean", 0.0, 30.0)
        pm.Deterministic("shifted", mean + outside.shift)
        pm.CustomDist("own", mean, logp=lambda x, at: -((x - at) ** outside.power), observed=0.0)
        pm.Normal("z", mean, 1.0, observed=pm.Data("y", VALUES))
    latent = {"mean from its start": np.array(50.0)}
    before = convert(model)
    was = evaluated(before, latent)
    change(model, outside)
    after = convert(model)
    outputs = [model.logp(), *model.replace_rvs_by_values([mean, *model.deterministics])]
    pymc = model.compile_fn(outputs, inputs=model.value_vars, mode="FAST_COMPILE")
    density, found = evaluated(after, latent)
    assert [density, *found.values()] == pymc({"mean": 50.0})
    assert (density, found) != was
    # The older one is as it was, for the fits that have it.
    assert evaluated(before, latent) == was


def only_numpy():
    @pytensor.compile.ops.wrap_py([pt.dscalar], [pt.dscalar])
    def square(x):
        return np.asarray(x**2)

    pm.Potential("outside", -square(pm.Normal("x", 0.0, 1.0)))


def discrete():
    pm.Normal("x", pm.Poisson("count", 3.0) + pm.Bernoulli("coin", 0.5), 1.0)


def missing_counts():
    counts = np.ma.masked_array([1, 0], mask=[False, True])
    with pytest.warns(match="missing values"):
        pm.Poisson("y", pm.Gamma("rate", 2.0, 1.0), observed=counts)


def minibatch():
    batch = pm.Minibatch(VALUES, batch_size=2)
    pm.Normal("y", pm.Normal("x", 0.0, 1.0), 1.0, observed=batch, total_size=3)


def simulator():
    def simulate(rng, mean, size):
        return rng.normal(mean, 1.0, size=size)

    pm.Simulator("y", simulate, pm.Normal("x", 0.0, 1.0), observed=VALUES)


def random_deterministic():
    pm.Deterministic("noisy", pm.Normal("x", 0.0, 1.0) + pm.Normal.dist(0.0, 1.0))


def broken_data():
    rate = pm.Gamma("rate", 2.0, 1.0)
    pm.Poisson("y", rate, observed=[3, -1])
    pm.Poisson("fine", rate, observed=[3, 1])


def far_away():
    pm.Potential("region", pt.switch(pm.Normal("x", 0.0, 1.0) > 30.0, 0.0, -np.inf))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda: None, "model has no free random variables"),
        (lambda: pm.Normal("y", 0.0, 1.0, observed=VALUES), "model has no free random variables"),
        (discrete, "model: 'count', 'coin' cannot be inferred, being discrete"),
        (missing_counts, "model: 'y_unobserved' cannot be inferred, being discrete"),
        (minibatch, "model: its log density is random (pm.Minibatch"),
        (simulator, "model: its log density is random (pm.Minibatch, pm.Simulator"),
        (random_deterministic, "random numbers that are no variables"),
        (only_numpy, "model: PyMC cannot express it in JAX and says: NotImplementedError"),
        (broken_data, "not finite around it either, because of {'y': -inf}; check the data"),
        (far_away, "because of {'region': -inf}; check the data, or start inside the support"),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_what_cannot_be_fitted_is_refused_with_its_reason(write, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        convert(built(write))


def test_an_initial_value_inside_the_support_is_enough():
    def write():
        x = pm.Normal("x", 0.0, 1.0, initval=35.0)
        pm.Potential("region", pt.switch(x > 30.0, 0.0, -np.inf))

    assert np.isfinite(convert(built(write)).data["log density"])


@pytest.mark.parametrize("given", [3, None, pm.Model, lambda: None])
def test_something_else_than_a_model_is_refused(given):
    with pytest.raises(ValueError, match=r"model must be a pymc\.Model, got"):
        convert(given)


@pytest.mark.parametrize("library", ["pymc", "pytensor"])
def test_pymc_that_is_missing_is_asked_for(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[pymc\]'"):
        convert(pm.Model())


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_jax_gets_the_precision_of_pytensor(precision):
    with pytensor.config.change_flags(floatX=precision):
        converted = convert(built(lambda: pm.Normal("x", 0.0, 1.0)))
        assert jax.config.read("jax_enable_x64") == (precision == "float64")
        assert evaluated(converted, moved(converted))[1]["x"].dtype == precision


def test_tests_of_other_files_get_their_precision_back(pytestconfig):
    path = str(pytestconfig.rootpath / "conftest.py")
    same_precision = pytestconfig.pluginmanager.get_plugin(path).same_precision.__wrapped__()
    jax.config.update("jax_enable_x64", False)
    next(same_precision)
    convert(built(scaled))
    assert jax.config.read("jax_enable_x64")
    assert next(same_precision, "the end") == "the end"
    assert not jax.config.read("jax_enable_x64")


@pytest.mark.parametrize("flags", [None, "", "--xla_cpu_enable_fast_math=false"])
def test_the_flags_of_xla_are_left_alone(flags, monkeypatch):
    from pymc import sampling

    if flags is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", flags)
    # Import it again.
    monkeypatch.delitem(sys.modules, "pymc.sampling.jax", raising=False)
    monkeypatch.delattr(sampling, "jax", raising=False)
    pymc_model._libraries()
    assert "pymc.sampling.jax" in sys.modules
    assert os.environ.get("XLA_FLAGS") == flags


FRESH = """
import sys, rvrs
assert "pymc" not in sys.modules and "pytensor" not in sys.modules
from rvrs import pymc_model
pymc_model._libraries()
import jax
print(jax.device_count())
"""


def test_pymc_is_imported_when_it_is_needed_and_makes_no_devices():
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2"]
