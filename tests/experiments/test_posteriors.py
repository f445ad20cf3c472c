import json
import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import log_density, potential_energy
from scipy.stats import halfcauchy, norm

from rvrs.experiments import posteriors
from rvrs.experiments.posteriors import POSTERIORS, Reference, comparable, compare, reference

NAMES = tuple(POSTERIORS)
LENGTHS = {"num_warmup": 50, "num_samples": 20, "num_chains": 2}

# Of each array of the data.
SUMS = {
    "eight_schools": [100.0, 70.0],
    "horseshoe": [3.0216010795528443, -2.2622598848779005],
    "mixture": [25.640409948016355],
    "poisson": [-36.05685187883485, 290.0],
    "student_t": [245269.211968224, 7446.14486168326],
}


@cache
def prior_draws(name: str) -> dict[str, np.ndarray]:
    """200 draws of the latent sites from the prior."""
    posterior = POSTERIORS[name]

    def draw(key: jax.Array) -> dict[str, Any]:
        sites = handlers.trace(handlers.seed(posterior.model, key)).get_trace(*posterior.model_args)
        return {site: sites[site]["value"] for site in posteriors._latents(name)}

    draws = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 200))
    return {site: np.asarray(values) for site, values in draws.items()}


def made_up_reference(name: str, draws: dict[str, np.ndarray]) -> Reference:
    """A reference whose moments are those of the draws."""
    values = comparable(name, draws)
    mean = {site: np.asarray(each.mean(axis=0)) for site, each in values.items()}
    sd = {site: np.asarray(each.std(axis=0, ddof=1)) for site, each in values.items()}
    return Reference(name, mean, sd, sd, 0.1 + 0.2, 1.0 + 1e-15, 3, 1 / 3)


def assert_identical(one: Reference, other: Reference) -> None:
    for field, first, second in zip(Reference._fields, one, other, strict=True):
        if isinstance(first, dict):
            assert first.keys() == second.keys()
            for site, values in first.items():
                assert values.dtype == second[site].dtype == np.float64
                assert values.shape == second[site].shape
                assert values.tobytes() == second[site].tobytes()
        else:
            assert first == second, field


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the posteriors that were run; a run is made up instead of NUTS."""
    names: list[str] = []

    def run(posterior: posteriors.Posterior, lengths: dict[str, int]) -> Reference:
        names.append(posterior.name)
        return made_up_reference(posterior.name, prior_draws(posterior.name))

    monkeypatch.setattr(posteriors, "_run", run)
    return names


@pytest.mark.parametrize("name", NAMES)
def test_density_and_gradient_are_finite_near_the_start_of_a_sampler(name: str):
    posterior = POSTERIORS[name]
    assert posterior.name == name
    assert posterior.description

    @jax.jit
    @jax.vmap
    def energy(key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        start = {
            site: jax.random.uniform(key, biject_to(support).inverse_shape(shape), minval=-1)
            for site, (support, shape) in posteriors._latents(name).items()
        }
        function = partial(potential_energy, posterior.model, posterior.model_args, {})
        return jax.value_and_grad(function)(start)

    value, gradient = energy(jax.random.split(jax.random.key(0), 10))
    assert np.isfinite(value).all()
    assert gradient.keys() == posteriors._latents(name).keys()
    for each in gradient.values():
        assert np.isfinite(each).all()
        assert np.any(each != 0)


# The site that NUTS moves, its shape, and the sites of the model that follow from it.
NUTS_SITES = {
    "eight_schools": ("theta_decentered", (8,), ("theta",)),
    "funnel": ("x_decentered", (4,), ("x",)),
    "student_t": ("effects", (4,), ("intercept", "slopes")),
    "horseshoe": ("coefficients_decentered", (10,), ("coefficients",)),
}


@pytest.mark.parametrize("name", NAMES)
def test_nuts_model_is_the_same_posterior(name: str):
    posterior = POSTERIORS[name]
    if posterior.nuts_model is None:
        assert name not in NUTS_SITES
        return
    moved, shape, derived = NUTS_SITES[name]
    fixed = {
        site: np.full(shape, 0.7)
        for site, (_, shape) in posteriors._latents(name).items()
        if site not in derived
    }

    def densities(noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        nuts, sites = log_density(
            posterior.nuts_model, posterior.model_args, {}, {**fixed, moved: noise}
        )
        follow = {site: sites[site]["value"] for site in derived}
        plain, _ = log_density(posterior.model, posterior.model_args, {}, {**fixed, **follow})
        return nuts, plain

    with jax.enable_x64(True):
        nuts, plain = jax.jit(jax.vmap(densities))(
            jax.random.normal(jax.random.key(0), (5, *shape))
        )
    # The Jacobian depends on the fixed sites alone, so it is the same at all points.
    assert np.ptp(plain) > 1
    np.testing.assert_allclose(nuts - nuts[0], plain - plain[0], rtol=1e-9, atol=1e-9)


def test_eight_schools_is_centred():
    draw = {"mu": 3.0, "tau": 2.0, "theta": np.linspace(-4, 10, 8)}
    errors, effects = POSTERIORS["eight_schools"].model_args
    expected = norm.logpdf(3, 0, 5) + halfcauchy.logpdf(2, scale=5)
    expected += norm.logpdf(draw["theta"], 3, 2).sum()
    expected += norm.logpdf(effects, draw["theta"], errors).sum()
    ours, _ = log_density(POSTERIORS["eight_schools"].model, (errors, effects), {}, draw)
    assert float(ours) == pytest.approx(expected, rel=1e-5)


def test_exact_moments_of_the_funnel():
    random = np.random.default_rng(0)
    v = random.normal(scale=1.5, size=1_000_000)
    x = random.normal(size=v.size) * np.exp(v / 2)
    exact = POSTERIORS["funnel"].exact
    assert exact is not None
    assert exact["v"] == (0.0, 1.5)
    # Six standard errors at a kurtosis of 28.
    assert exact["x"] == (0.0, pytest.approx(x.std(), rel=6 * math.sqrt(28 / 4 / v.size)))


def test_data_are_reproducible():
    again = posteriors._data()
    for name, arrays in again.items():
        for ours, other in zip(POSTERIORS[name].model_args, arrays, strict=True):
            np.testing.assert_array_equal(ours, other)
    # As they were when the references were run.
    sums = {name: [float(array.sum()) for array in arrays] for name, arrays in again.items()}
    for name, expected in SUMS.items():
        assert sums[name] == pytest.approx(expected, rel=1e-12)


def test_comparable_scales():
    names = {"local": 10, "coefficients": 10}
    draws = prior_draws("horseshoe")
    ours = comparable("horseshoe", {**draws, "other": np.zeros(3)})
    assert ours.keys() == {"noise", "tau", "local", "coefficients"}
    for site, size in names.items():
        assert ours[site].shape == (200, size)
    np.testing.assert_allclose(ours["local"], np.log(draws["local"].astype(float)), rtol=1e-12)
    np.testing.assert_array_equal(ours["coefficients"], draws["coefficients"])

    draws = {site: each.reshape(2, 100, 3) for site, each in prior_draws("mixture").items()}
    ours = comparable("mixture", draws)
    assert ours["weights"].shape == (2, 100, 2)
    np.testing.assert_array_equal(ours["means"], draws["means"])
    assert all(each.dtype == np.float64 for each in ours.values())


def test_comparable_refuses_wrong_draws():
    draws = prior_draws("poisson")
    with pytest.raises(ValueError, match="name must be one of"):
        comparable("nonsense", draws)
    with pytest.raises(ValueError, match="lack the site 'slopes'"):
        comparable("poisson", {"intercept": draws["intercept"]})
    with pytest.raises(ValueError, match=r"'slopes' must end in the shape \(4,\)"):
        comparable("poisson", {**draws, "slopes": draws["slopes"][:, :3]})
    with pytest.raises(ValueError, match="two or more along one first axis"):
        compare(
            {site: each[:1] for site, each in draws.items()}, made_up_reference("poisson", draws)
        )
    with pytest.raises(ValueError, match="two or more along one first axis"):
        compare(
            {site: each[None] for site, each in draws.items()}, made_up_reference("poisson", draws)
        )


@pytest.mark.parametrize("name", NAMES)
def test_draws_do_not_differ_from_their_own_moments(name: str):
    draws = prior_draws(name)
    comparison = compare(draws, made_up_reference(name, draws))
    assert comparison.mean_error[0] < 1e-9
    assert comparison.min_sd_ratio[0] == pytest.approx(1)
    assert comparison.max_sd_ratio[0] == pytest.approx(1)


def test_compare_finds_the_worst_coordinates():
    draws = prior_draws("eight_schools")
    known = made_up_reference("eight_schools", draws)
    changed = {site: each.astype(float) for site, each in draws.items()}
    # Of the logarithm of tau, which a factor shifts.
    changed["tau"] = changed["tau"] * np.exp(-2.5 * known.sd["tau"])
    theta, centre = changed["theta"], known.mean["theta"]
    theta[:, 3] = centre[3] + 0.2 * (theta[:, 3] - centre[3])
    theta[:, 5] = centre[5] + 7.0 * (theta[:, 5] - centre[5])
    comparison = compare(changed, known)
    assert comparison.mean_error == (pytest.approx(2.5), "tau")
    assert comparison.min_sd_ratio == (pytest.approx(0.2), "theta[3]")
    assert comparison.max_sd_ratio == (pytest.approx(7.0), "theta[5]")


def test_compare_shows_draws_that_are_not_finite():
    draws = prior_draws("eight_schools")
    known = made_up_reference("eight_schools", draws)
    tau = draws["tau"].copy()
    tau[7] = 0.0
    comparison = compare({**draws, "tau": tau}, known)
    assert comparison.mean_error == (math.inf, "tau")
    assert math.isnan(comparison.max_sd_ratio[0])
    assert comparison.max_sd_ratio[1] == comparison.min_sd_ratio[1] == "tau"


@pytest.mark.slow
def test_reference_by_nuts_is_stored_and_read_bit_for_bit(tmp_path: Path):
    first = reference("eight_schools", tmp_path, **LENGTHS)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert_identical(first, reference("eight_schools", tmp_path, **LENGTHS))
    assert path.read_bytes() == content
    assert {site: each.shape for site, each in first.mean.items()} == {
        "mu": (),
        "tau": (),
        "theta": (8,),
    }
    assert first.num_divergences >= 0
    assert first.seconds > 0
    assert jnp.zeros(1).dtype == jnp.float32
    with np.load(path, allow_pickle=False) as archive:
        header = json.loads(archive["header"].item())
    assert header["versions"]["jax"] == jax.__version__
    assert header["settings"].items() >= LENGTHS.items()


@pytest.mark.parametrize("name", NAMES)
def test_every_reference_is_read_bit_for_bit(name: str, tmp_path: Path, runs: list[str]):
    first = reference(name, tmp_path / "new" / "folder")
    assert_identical(first, reference(name, tmp_path / "new" / "folder"))
    assert runs == [name]


def test_changed_settings_or_models_are_run_again(
    tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
):
    reference("poisson", tmp_path, **LENGTHS)
    reference("poisson", tmp_path, **{**LENGTHS, "num_samples": 30})
    assert len(runs) == len(list(tmp_path.iterdir())) == 2
    posterior = POSTERIORS["poisson"]
    monkeypatch.setitem(POSTERIORS, "poisson", posterior._replace(target_accept=0.5))
    reference("poisson", tmp_path, **LENGTHS)
    assert len(runs) == 3
    covariates, counts = posterior.model_args
    more = counts.copy()
    more[0] += 1
    monkeypatch.setitem(POSTERIORS, "poisson", posterior._replace(model_args=(covariates, more)))
    reference("poisson", tmp_path, **LENGTHS)
    assert len(runs) == 4
    reference("poisson", tmp_path, **LENGTHS)
    assert len(runs) == 4


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "foreign", "pickle"])
def test_a_file_that_is_no_reference_is_refused(damage: str, tmp_path: Path, runs: list[str]):
    reference("poisson", tmp_path, **LENGTHS)
    (path,) = tmp_path.iterdir()
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("no archive")
    elif damage == "foreign":
        np.savez(path, X=np.zeros(3))
    else:
        np.savez(path, header=np.array({"settings": 1}, dtype=object))
    content = path.read_bytes()
    with pytest.raises(ValueError, match="holds no reference run; delete it"):
        reference("poisson", tmp_path, **LENGTHS)
    assert path.read_bytes() == content
    assert runs == ["poisson"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "nonsense"}, "name must be one of"),
        ({"num_warmup": 0}, "num_warmup must be a whole number"),
        ({"num_samples": 3}, "num_samples must be 4 or more"),
        ({"num_chains": 1.5}, "num_chains must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        reference(**{"name": "poisson", "cache_dir": tmp_path, **LENGTHS, **arguments})
