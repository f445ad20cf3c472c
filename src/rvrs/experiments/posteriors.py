"""Six posteriors with long NUTS runs, to compare approximate methods with.

Only eight schools has real data; the others are made up with fixed seeds, or have none.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import diagnostics, handlers
from numpyro.distributions import constraints, transforms
from numpyro.infer import MCMC, NUTS, reparam, util

from rvrs import files
from rvrs.core.arguments import check_choice, check_count


class Posterior(NamedTuple):
    """A posterior as a NumPyro model with its data."""

    name: str
    description: str
    model: Callable[..., Any]
    model_args: tuple[np.ndarray, ...] = ()
    nuts_model: Callable[..., Any] | None = None
    """The same posterior in coordinates that suit NUTS, for the reference alone. It takes the same
    arguments and has the latent sites of ``model``, be it as deterministic sites."""
    target_accept: float = 0.9
    """Target acceptance of the reference run; close to 1 where long steps diverge."""
    exact: Mapping[str, tuple[float, float]] | None = None
    """Mean and standard deviation of every coordinate of a site, where they are known."""


def _data() -> dict[str, tuple[np.ndarray, ...]]:
    # RandomState's numbers are the same in all versions of NumPy.
    random = np.random.RandomState(1)
    # Neither centred nor scaled: one covariate in thousands, one in thousandths.
    raw = random.normal([3000.0, 0.004, 1.0], [700.0, 0.001, 1.0], (80, 3))
    noise = random.standard_t(4, len(raw))
    # Outliers, all upwards, so that least squares would be misled.
    noise[:6] += 15.0
    # Every coefficient is tens of posterior sds away from 0.
    responses = 50.0 + raw @ np.array([0.01, 5000.0, -8.0]) + noise
    random = np.random.RandomState(2)
    # A common part makes every pair of covariates correlate by 0.8.
    common, own = random.normal(size=(100, 1)), random.normal(size=(100, 4))
    correlated = np.sqrt(0.8) * common + np.sqrt(0.2) * own
    counts = random.poisson(np.exp(1.0 + correlated @ np.array([0.5, -0.4, 0.3, 0.0])))
    random = np.random.RandomState(3)
    many = random.normal(size=(50, 10))
    # The third coefficient is about two standard errors, so that it may or may not be 0.
    sparse = many[:, :3] @ np.array([2.0, -1.5, 0.3]) + random.normal(size=50)
    random = np.random.RandomState(4)
    component = random.choice(3, size=120, p=[0.3, 0.4, 0.3])
    means, scales = np.array([-4.0, 0.0, 4.0]), np.array([0.8, 1.0, 1.2])
    errors = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    effects = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    return {
        "eight_schools": (errors, effects),
        "student_t": (raw, responses),
        "poisson": (correlated, counts.astype(np.int32)),
        "horseshoe": (many, sparse),
        "mixture": (random.normal(means[component], scales[component]),),
    }


def _eight_schools(standard_errors: Any, effects: Any) -> None:
    """Eight schools (Rubin, 1981), centred: a funnel whose neck the data leave open."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(effects)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, standard_errors), obs=effects)


# Within two sds of v the scale of x changes 20-fold. At Neal's 3 the sd of x would be beyond
# estimation: the kurtosis of x is 3 exp(sd^2), which is 28 here and 24,000 there.
_FUNNEL_SD = 1.5


def _funnel() -> None:
    """Neal's funnel in 5 dimensions, without data."""
    v = numpyro.sample("v", dist.Normal(0.0, _FUNNEL_SD))
    with numpyro.plate("width", 4):
        numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)))


def _student_t(covariates: Any, responses: Any, *, standardised: bool = False) -> None:
    """Robust regression on raw covariates: posterior sds from 1e-4 to 1e2, far from 0."""
    prior = dist.Normal(0.0, 1e4)  # vague for every coefficient
    if standardised:
        # The coefficients are an affine map of flat effects, so that no Jacobian is due.
        flat = dist.ImproperUniform(constraints.real_vector, (), event_shape=(4,))
        effects = jnp.asarray(numpyro.sample("effects", flat))
        slopes = numpyro.deterministic("slopes", effects[1:] / covariates.std(axis=0))
        centre = covariates.mean(axis=0) @ slopes - responses.mean()
        intercept = numpyro.deterministic("intercept", effects[0] - centre)
        numpyro.factor("prior", prior.log_prob(intercept) + prior.log_prob(slopes).sum())
    else:
        intercept = numpyro.sample("intercept", prior)
        slopes = numpyro.sample("slopes", prior.expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(10.0))
    degrees_of_freedom = numpyro.sample("degrees_of_freedom", dist.Gamma(2.0, 0.1))
    mean = intercept + covariates @ slopes
    numpyro.sample("y", dist.StudentT(degrees_of_freedom, mean, scale), obs=responses)


def _poisson(covariates: Any, counts: Any) -> None:
    """Poisson regression on correlated covariates: nearly a correlated normal."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.5))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 2.5).expand([4]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(intercept + covariates @ slopes)), obs=counts)


def _horseshoe(covariates: Any, responses: Any) -> None:
    """Regularised horseshoe of Piironen and Vehtari (2017): ten funnels that share a scale."""
    # About p0 / (p - p0) / sqrt(N) for p0 = 3 of p = 10 coefficients and N = 50 rows, as they
    # advise. The slab cuts off the tails at the size of a non-zero coefficient.
    global_scale, slab_scale = 0.06, 2.0
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(global_scale))
    with numpyro.plate("covariates", covariates.shape[1]):
        local = numpyro.sample("local", dist.HalfCauchy(1.0))
        # Their formula without its squares, which overflow.
        scale = 1 / jnp.hypot(1 / (tau * local), 1 / slab_scale)
        coefficients = numpyro.sample("coefficients", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Normal(covariates @ coefficients, noise), obs=responses)


def _mixture(observations: Any) -> None:
    """Mixture of three normals: ordered means, a simplex and skewed tails."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(3, 5.0)))
    # The least mean, then logarithms of the gaps.
    base = dist.Normal(jnp.array([0.0, 1.0, 1.0]), jnp.array([5.0, 0.5, 0.5])).to_event(1)
    ordered = dist.TransformedDistribution(base, transforms.OrderedTransform())
    means = numpyro.sample("means", ordered)
    scales = numpyro.sample("scales", dist.LogNormal(0.0, 0.5).expand([3]).to_event(1))
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, scales))
    numpyro.sample("y", mixture, obs=observations)


def _posterior(model: Callable[..., Any], decentred: str = "", **more: Any) -> Posterior:
    name = model.__name__.removeprefix("_")
    if decentred:
        more["nuts_model"] = handlers.reparam(model, config={decentred: reparam.LocScaleReparam(0)})
    return Posterior(name, model.__doc__ or "", model, _DATA.get(name, ()), **more)


_DATA = _data()
_FUNNEL_MOMENTS = {"v": (0.0, _FUNNEL_SD), "x": (0.0, math.exp(_FUNNEL_SD**2 / 4))}
_ALL = (
    _posterior(_eight_schools, decentred="theta", target_accept=0.99),
    _posterior(_funnel, decentred="x", exact=_FUNNEL_MOMENTS),
    _posterior(_student_t, nuts_model=partial(_student_t, standardised=True)),
    _posterior(_poisson),
    _posterior(_horseshoe, decentred="coefficients", target_accept=0.99),
    _posterior(_mixture),
)
POSTERIORS = {posterior.name: posterior for posterior in _ALL}
"""The posteriors by name."""


@cache
def _latents(name: str) -> dict[str, tuple[constraints.Constraint, tuple[int, ...]]]:
    """Support and shape of the latent sites."""
    check_choice("name", name, POSTERIORS)
    posterior = POSTERIORS[name]
    sites = handlers.trace(handlers.seed(posterior.model, 0)).get_trace(*posterior.model_args)
    return {
        site["name"]: (site["fn"].support, jnp.shape(site["value"]))
        for site in sites.values()
        if site["type"] == "sample" and not site["is_observed"]
    }


def comparable(name: str, draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The latent sites of draws of posterior ``name`` on a scale where moments exist, in float64.

    A half-Cauchy scale has no variance, nor need its posterior. So positive sites are compared by
    their logarithms, and simplices by NumPyro's unconstrained coordinates, one fewer than weights.
    Real and ordered sites stay as they are. Any leading axes will do; other sites are left out.
    """
    found = {}
    for site, (support, shape) in _latents(name).items():
        if site not in draws:
            raise ValueError(f"draws of {name!r} lack the site {site!r}.")
        values = np.asarray(draws[site], np.float64)
        if values.shape[max(values.ndim - len(shape), 0) :] != shape:
            raise ValueError(f"{site!r} must end in the shape {shape}, got {values.shape}.")
        base = support.base_constraint if isinstance(support, constraints.independent) else support
        if base not in (constraints.real, constraints.ordered_vector):
            with jax.enable_x64(True):
                values = np.asarray(dist.biject_to(support).inv(jnp.asarray(values)))
        found[site] = values
    return found


class Reference(NamedTuple):
    """Moments of a posterior on the scale of :func:`comparable`, and how well they are known."""

    name: str
    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]
    mcse: dict[str, np.ndarray]
    """Monte Carlo standard errors of ``mean``; 0 where the moments are exact."""
    min_ess: float
    """Least effective sample size of any coordinate or its squared deviation from the mean."""
    max_r_hat: float
    num_divergences: int
    seconds: float
    """Wall time of the run, including compilation."""


_MOMENTS = ("mean", "sd", "mcse")
_SEED = 0


def reference(
    name: str,
    cache_dir: str | PathLike[str],
    num_warmup: int = 2_000,
    num_samples: int = 20_000,
    num_chains: int = 4,
) -> Reference:
    """Moments of a posterior from a long NUTS run in double precision, or from ``cache_dir``.

    Runs of different lengths are stored side by side. A stored run is repeated if its settings or
    the posterior have changed; versions of JAX and NumPyro are stored but may change. A file that
    is no stored run raises a ValueError.
    """
    check_choice("name", name, POSTERIORS)
    lengths = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    for key, value in lengths.items():
        check_count(key, value)
    if num_samples < 4:
        raise ValueError(f"num_samples must be 4 or more for the diagnostics, got {num_samples}.")
    settings = {"name": name, **lengths, "log_density": _fingerprint(name), "seed": _SEED}
    settings |= {"target_accept": POSTERIORS[name].target_accept}
    path = Path(cache_dir) / f"{name}_{num_chains}x{num_warmup}+{num_samples}.npz"
    found = _read(path, settings) if path.is_file() else None
    if found is None:
        found = _run(POSTERIORS[name], lengths)
        _write(path, settings, found)
    return found


def _fingerprint(name: str) -> str:
    """The log density at a generic point, which any change of the model or its data changes."""
    with jax.enable_x64(True):
        point, posterior = {}, POSTERIORS[name]
        for site, (support, shape) in _latents(name).items():
            free = dist.biject_to(support).inverse_shape(shape)
            point[site] = jnp.linspace(-0.5, 0.3, math.prod(free)).reshape(free)
        energy = util.potential_energy(posterior.model, posterior.model_args, {}, point)
    return f"{-float(energy):.9g}"  # rounded, as the last digits depend on the machine


def _read(path: Path, settings: dict[str, Any]) -> Reference | None:
    """The run that is stored at ``path``, or None if its settings differ."""
    try:
        arrays = files.read_arrays(path)
        header = files.parse_json(arrays["header"].item().encode())
        if header["settings"] != settings:
            return None
        sites = _latents(settings["name"])
        moments = {key: {site: arrays[f"{key}/{site}"] for site in sites} for key in _MOMENTS}
        return Reference(settings["name"], **moments, **header["numbers"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no reference run; delete it.") from error


def _write(path: Path, settings: dict[str, Any], found: Reference) -> None:
    versions = {"jax": jax.__version__, "numpyro": numpyro.__version__}
    numbers = {key: getattr(found, key) for key in Reference._fields[1 + len(_MOMENTS) :]}
    header = json.dumps({"settings": settings, "versions": versions, "numbers": numbers})
    arrays = {f"{key}/{site}": getattr(found, key)[site] for key in _MOMENTS for site in found.mean}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_arrays(path, {"header": np.asarray(header), **arrays})


def _run(posterior: Posterior, lengths: dict[str, Any]) -> Reference:
    start = time.perf_counter()
    with jax.enable_x64(True):
        model = posterior.nuts_model or posterior.model
        kernel = NUTS(model, target_accept_prob=posterior.target_accept)
        mcmc = MCMC(kernel, chain_method="sequential", progress_bar=False, **lengths)
        mcmc.run(jax.random.key(_SEED), *posterior.model_args)
        draws = comparable(posterior.name, mcmc.get_samples(group_by_chain=True))
        divergences = int(mcmc.get_extra_fields()["diverging"].sum())
    seconds = time.perf_counter() - start
    mean, sd, mcse, sizes, r_hats = {}, {}, {}, [], []
    for site, values in draws.items():
        mean[site] = np.asarray(values.mean(axis=(0, 1)))
        sd[site] = np.asarray(values.std(axis=(0, 1), ddof=1))
        # Of the squares too, as the sds have to be as good as the means.
        both = (values, (values - mean[site]) ** 2)
        size, size_of_squares = (diagnostics.effective_sample_size(each) for each in both)
        mcse[site] = np.asarray(sd[site] / np.sqrt(size))
        sizes += [float(np.min(size)), float(np.min(size_of_squares))]
        r_hats.append(float(np.max(diagnostics.split_gelman_rubin(values))))
        if posterior.exact:
            for moments, exact in zip((mean, sd, mcse), (*posterior.exact[site], 0.0), strict=True):
                moments[site] = np.full_like(moments[site], exact)
    return Reference(posterior.name, mean, sd, mcse, min(sizes), max(r_hats), divergences, seconds)


class Comparison(NamedTuple):
    """How far draws are from a reference: numbers, each with its coordinate, as ``theta[3]``."""

    mean_error: tuple[float, str]
    """Largest distance of a mean from the reference's, in the reference's standard deviations."""
    min_sd_ratio: tuple[float, str]
    """Least standard deviation over the reference's."""
    max_sd_ratio: tuple[float, str]


def compare(draws: Mapping[str, Any], reference: Reference) -> Comparison:
    """Compare draws of the model's sites with a reference, on the scale of :func:`comparable`.

    The draws, two or more, lie along the first axis. Where one is not finite there (a scale of 0
    has no logarithm), the numbers are infinite or NaN.
    """
    names, errors, ratios = [], [], []
    for site, values in comparable(reference.name, draws).items():
        mean, sd = reference.mean[site], reference.sd[site]
        if values.ndim != mean.ndim + 1 or len(values) < 2:
            raise ValueError(f"draws of {site!r} must be two or more along one first axis.")
        names += [f"{site}{list(index) or ''}" for index in np.ndindex(mean.shape)]
        errors += [*np.ravel(np.abs(values.mean(axis=0) - mean) / sd)]
        with np.errstate(invalid="ignore"):  # infinite draws, which show as NaN
            ratios += [*np.ravel(values.std(axis=0, ddof=1) / sd)]
    # NumPy's argmax and argmin stop at a NaN, Python's max and min need not.
    worst = (errors, np.argmax(errors)), (ratios, np.argmin(ratios)), (ratios, np.argmax(ratios))
    return Comparison(*((float(of[at]), names[at]) for of, at in worst))
