import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.util import log_density
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import loggamma, norm

from rvrs.baselines import local
from rvrs.baselines.task import silent
from rvrs.datasets import Dataset
from rvrs.experiments import hierarchical_methods as methods
from rvrs.experiments.experiment import DivergedError
from rvrs.experiments.hierarchical_methods import METHODS, Effort
from rvrs.experiments.hierarchical_model import build
from rvrs.experiments.lognormal_family import (
    family_gap,
    family_optimum,
    interpolated_gap,
    optimal_fraction,
    shortfall,
)
from rvrs.semi_training import SemiTrainState, Trainer

GLOBALS = {"coefficients": np.array([0.4, -0.3]), "scale": 0.7, "degrees_of_freedom": 3.0}


def made_up(size: int) -> Dataset:
    random = np.random.RandomState(0)
    covariates = random.normal(size=(size, 2)).astype(np.float32)
    return Dataset("made up", covariates, random.normal(size=size).astype(np.float32), ("a", "b"))


def heavy_tailed() -> Dataset:
    dataset = made_up(200)
    noise = np.clip(np.random.RandomState(1).standard_t(2, size=200), -8, 8)
    return dataset._replace(responses=noise.astype(np.float32))


def residuals(dataset: Dataset) -> np.ndarray:
    return dataset.responses - dataset.covariates @ GLOBALS["coefficients"]


def effort(num_steps: int, batch_size: int = 50, **rest) -> Effort:
    small = {"mean_field_draws": 8, "elbo_error": 0.25, "evaluation_draws": 20_000}
    small |= {"global_draws": 100, "local_proposals": 200}
    return Effort(num_steps, batch_size, **(small | rest))


@pytest.fixture
def double_precision():
    with jax.enable_x64(True):
        yield


def solve(q, log_ratio, target_acceptance):
    return brentq(lambda at: q @ expit(log_ratio + at) - target_acceptance, -50, 50)


def brute_force(shape: float, target_acceptance: float, locations, scales) -> float:
    """Least KL(r || posterior) over a grid of proposals, as an integral of r log(r / posterior)."""
    z, dz = np.linspace(-25.0, 6.0, 4001, retstep=True)
    log_p = loggamma.logpdf(z, shape)
    gaps = []
    for location in locations:
        for scale in scales:
            log_q = norm.logpdf(z, location, scale)
            q, log_ratio = np.exp(log_q) * dz, log_p - log_q
            threshold = solve(q, log_ratio, target_acceptance)
            log_r = log_q - np.logaddexp(0, -log_ratio - threshold) - math.log(target_acceptance)
            gaps.append(np.exp(log_r) * dz @ (log_r - log_p))
    return min(gaps)


@pytest.mark.parametrize(("shape", "target_acceptance"), [(1.5, 0.5), (2.5, 0.1)])
def test_optimum_of_the_family_is_that_of_a_brute_force_grid(shape, target_acceptance):
    gap, mean_field_gap = family_optimum(shape, target_acceptance)
    # The grid holds the optimum of the proposal to 0.04, where the gap is flat.
    grid = brute_force(
        shape, target_acceptance, np.linspace(-1.0, 1.5, 63), np.linspace(0.4, 1.6, 31)
    )
    assert gap <= grid + 1e-9
    assert gap == pytest.approx(grid, rel=0.02)
    stirling = math.lgamma(shape) - (shape - 0.5) * math.log(shape) + shape
    assert mean_field_gap == pytest.approx(stirling - math.log(2 * math.pi) / 2, rel=1e-9)
    assert family_optimum(shape, 1.0)[0] == pytest.approx(mean_field_gap, rel=1e-6)


@pytest.mark.parametrize("nu", [1.0, 2.0, 4.0])
def test_rejection_can_close_four_fifths_of_the_gap_at_one_half_and_nearly_all_at_a_tenth(nu):
    assert 0.80 < optimal_fraction(nu, 0.5) < 0.83
    assert optimal_fraction(nu, 0.1) == pytest.approx(0.989, abs=5e-4)


@pytest.mark.slow
def test_mean_field_at_its_best_is_below_oracle_by_the_gap_of_every_row(double_precision):
    dataset = made_up(40)
    nu, scale = GLOBALS["degrees_of_freedom"], GLOBALS["scale"]
    shape = nu / 2 + 0.5
    rates = nu / 2 + residuals(dataset) ** 2 / (2 * scale**2)
    locations = {
        "coefficients": GLOBALS["coefficients"],
        "scale": math.log(scale),
        "degrees_of_freedom": math.log(nu),
        "tau": np.log(shape / rates) - 1 / (2 * shape),
    }
    # The global variables hardly vary, so that the gap is that of the local ones alone.
    params = {f"{site}_auto_loc": jnp.asarray(at) for site, at in locations.items()}
    params |= {f"{site}_auto_scale": jnp.full(np.shape(at), 1e-7) for site, at in locations.items()}
    params["tau_auto_scale"] = jnp.full(40, 1 / math.sqrt(shape))
    models = build(dataset, 40)
    limits = {"max_error": 0.08, "max_draws": 20_000}
    elbos, errors = zip(
        *(
            methods.evaluate(jax.random.key(0), model, local.normals(model), params, **limits)
            for model in (models.model, models.oracle_model)
        ),
        strict=True,
    )
    expected = 40 * family_optimum(shape, 1.0)[1]
    assert 0.01 < errors[0] < limits["max_error"]
    assert abs(elbos[1] - elbos[0] - expected) < 4 * math.hypot(*errors)
    assert 4 * math.hypot(*errors) < 0.3 * expected
    assert methods.mean_degrees_of_freedom(params) == pytest.approx(nu)


@pytest.mark.slow
def test_training_finds_the_optimum_of_oracle(double_precision):
    # Independent normals at the mode: their best scales are known where the density is normal.
    dataset = made_up(400)
    result = METHODS["oracle"](jax.random.key(0), dataset, effort(3000, batch_size=100), silent)
    models = build(dataset, 400)

    def negative_log_posterior(at):
        latents = {"coefficients": at[:2], "scale": jnp.exp(at[2])}
        latents["degrees_of_freedom"] = jnp.exp(at[3])
        return -log_density(models.oracle_model, (), {}, latents)[0] - at[2] - at[3]

    mode = jax.scipy.optimize.minimize(negative_log_posterior, jnp.zeros(4), method="BFGS").x
    curvature = jnp.diagonal(jax.hessian(negative_log_posterior)(mode))
    laplace = -negative_log_posterior(mode) + 0.5 * jnp.log(2 * math.pi / curvature).sum()
    assert result.elbo == pytest.approx(float(laplace), abs=0.3)
    assert result.seconds_per_step > 0
    # Half of the equal parts take at least their median.
    assert result.training_seconds > 0.49 * 3000 * result.seconds_per_step


@pytest.mark.parametrize("target_acceptance", [1.0, 0.5])
def test_the_interpolated_gap_is_that_of_the_family(target_acceptance, double_precision):
    gap = interpolated_gap(target_acceptance)
    for shape in (0.61, 1.7, 9.3):
        wanted = family_optimum(shape, target_acceptance)[0]
        assert float(gap(jnp.asarray(shape))) == pytest.approx(wanted, rel=2e-4)


def test_the_shortfall_of_a_proposal_is_its_distance_from_the_optimum(double_precision):
    shape, rate, target_acceptance = 2.0, 3.0, 0.5
    location, scale = 0.0, 1.0
    # Global variables that do not vary, so that the optimum of the family is the best there is.
    found = shortfall(
        jnp.full(3, shape),
        jnp.full((3, 1), rate),
        jnp.array([location - math.log(rate)]),
        jnp.array([scale]),
        target_acceptance,
    )
    gap = family_gap(shape, target_acceptance, location, scale)
    best = family_optimum(shape, target_acceptance)[0]
    assert gap - best > 0.01
    assert float(found[0]) == pytest.approx(gap - best, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["semi-rvrs-0.5", "semi-rvrs-0.5-gamma", "semi-rvrs-0.5-budget-8"])
def test_rejection_is_between_mean_field_and_oracle(name, double_precision):
    dataset, key = heavy_tailed(), jax.random.key(0)
    # Without local parameters steps are cheap, and few of them not enough.
    best = METHODS["oracle"](key, dataset, effort(8000), silent)
    base = METHODS["optimum-1"](key, dataset, effort(8000), silent)
    found = METHODS[name](key, dataset, effort(1500), silent)
    share = (found.elbo - base.elbo) / (best.elbo - base.elbo)
    error = math.hypot(found.elbo_error, best.elbo_error, base.elbo_error)
    assert (found.dropped > 0) == ("budget" in name)
    assert share > (0.9 if "gamma" in name else 0.7), share
    assert found.elbo < best.elbo + 4 * error
    assert (found.shortfall is None) == ("gamma" in name)


def broken_data() -> Dataset:
    return made_up(4)._replace(responses=np.full(4, np.nan, np.float32))


@pytest.mark.parametrize(
    ("num_steps", "words"), [(50, "50 of 50 steps"), (900, "100 of 100 steps")]
)
def test_training_without_finite_gradients_is_an_error(num_steps, words, double_precision):
    guide = local.normals(build(made_up(4), 2).oracle_model)
    model = build(broken_data(), 2).oracle_model
    shares = []
    with pytest.raises(DivergedError, match=words):
        methods.train(
            jax.random.key(0),
            model,
            guide,
            4,
            num_steps=num_steps,
            batch_size=2,
            report=lambda share, _: shares.append(share),
        )
    assert shares == []


def number():
    """A model that is quickly compiled."""
    numpyro.sample("number", dist.Normal(0.0, 1.0))


def test_progress_is_reported_between_parts_and_every_step_is_taken(double_precision):
    reports = []
    trained = methods.train(
        jax.random.key(0),
        number,
        local.normals(number),
        6,
        num_steps=250,
        batch_size=2,
        report=lambda *report: reports.append(report),
    )
    assert reports == [(0.4, "step 100"), (0.8, "step 200"), (1.0, "step 250")]
    assert 0 < trained.seconds_per_step < trained.training_seconds
    # It starts at 0.1 and is far below its optimum, 1: all steps are of Adam's rate, upwards in the
    # logarithm, and the rates of 250 steps along a cosine add up to 1.25.
    assert trained.params["number_auto_scale"] == pytest.approx(0.1 * math.exp(1.25), rel=0.15)


def test_evaluation_ends_when_its_error_is_small_enough_or_its_draws_are_made(
    double_precision, monkeypatch
):
    monkeypatch.setattr(methods, "_DRAWS_PER_ROUND", 100)

    def guide():
        numpyro.sample("number", dist.Normal(0.0, 2.0))

    def evaluate(max_error, max_draws):
        limits = {"max_error": max_error, "max_draws": max_draws}
        return methods.evaluate(jax.random.key(0), number, guide, {}, **limits)

    (_, once), (elbo, all_of_them) = evaluate(math.inf, 2000), evaluate(0.0, 2000)
    # log p - log q is log 2 - 1.5 times the square of a standard normal.
    sd = 1.5 * math.sqrt(2)
    assert once == pytest.approx(sd / math.sqrt(100), rel=0.4)
    assert all_of_them == pytest.approx(sd / math.sqrt(2000), rel=0.1)
    assert abs(elbo - (math.log(2) - 1.5)) < 4 * all_of_them
    _, enough = evaluate(0.5 * once, 2000)
    assert all_of_them < enough < 0.5 * once


@pytest.fixture
def watched(monkeypatch):
    """A trainer whose chunks update nothing in so many of their steps, and its reports."""
    optimizer, reports = optax.scale_by_adam(), []

    def start(num_skipped):
        def run_chunk(self, stage, rng_key, state, start, length, num_steps):
            count = state.opt_state.count + length - num_skipped
            return state._replace(opt_state=state.opt_state._replace(count=count)), None

        monkeypatch.setattr(Trainer, "run_chunk", run_chunk)
        trainer = methods._Watched(*[None] * 5).watch(lambda *report: reports.append(report))
        state = SemiTrainState({}, optimizer.init({}), {})

        def go(stage, begin):
            return trainer.run_chunk(stage, None, state, begin, 100, 1000)

        return trainer, go

    return start, reports


def test_chunks_of_both_stages_are_reported_and_those_of_training_timed(watched):
    start, reports = watched
    trainer, go = start(0)
    for stage in ("warm-up", "training"):
        for begin in range(0, 1000, 100):
            go(stage, begin)
    shares, words = zip(*reports, strict=True)
    assert list(shares) == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0
    assert words[0] == "warm-up, step 100"
    assert words[-1] == "training, step 1000"
    assert len(trainer.seconds_per_step) == 10


def test_more_than_one_step_in_a_hundred_without_update_is_an_error(watched):
    start, reports = watched
    _, go = start(6)
    # What is skipped without rejection may yet be made up for.
    go("warm-up", 0)
    go("warm-up", 100)
    go("training", 0)
    with pytest.raises(DivergedError, match="12 of 200 steps had no finite loss or gradient"):
        go("training", 100)
    assert len(reports) == 3


@pytest.mark.slow
def test_rejection_reports_how_far_it_is_and_says_what_was_dropped(double_precision):
    reports = []
    few = effort(40, batch_size=5, global_draws=5, local_proposals=20)
    found = METHODS["semi-rvrs-0.5-budget-4"](
        jax.random.key(0), made_up(20), few, lambda *report: reports.append(report)
    )
    shares, words = zip(*reports, strict=True)
    assert list(shares) == sorted(shares)
    assert words == ("compiling", "warm-up, step 20", "training, step 40", "evaluating")
    assert shares[-1] == 1.0
    # At the acceptance 1/2, two of four proposals are accepted with probability 11/16.
    assert 0.0 < found.dropped < 0.7
    assert 0 < found.seconds_per_step < found.training_seconds
    assert found.degrees_of_freedom > 0


@pytest.mark.slow
def test_rejection_without_finite_gradients_is_an_error(double_precision):
    few = effort(40, batch_size=2, global_draws=5, local_proposals=20)
    with pytest.raises(DivergedError, match="40 of 40 steps"):
        METHODS["semi-rvrs-0.5"](jax.random.key(0), broken_data(), few, silent)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("semi-rvrs-0.5", (0.5, "exact", None)),
        ("semi-rvrs-0.1-gamma", (0.1, "exact", None)),
        ("semi-rvrs-0.1-budget-60", (0.1, "budget", 60)),
        ("semi-rvrs-0.5-budget-6", (0.5, "budget", 6)),
    ],
)
def test_a_name_says_how_rejection_is_done(name, settings, monkeypatch):
    class AskedError(Exception):
        pass

    def asked(*arguments, **options):
        gamma = arguments[3] is not None
        raise AskedError(
            gamma, *(options[key] for key in ("target_acceptance", "sampler", "num_proposals"))
        )

    monkeypatch.setattr(methods, "AutoSemiRVRS", asked)
    with pytest.raises(AskedError) as error:
        METHODS[name](jax.random.key(0), made_up(4), effort(2, batch_size=2), silent)
    assert error.value.args == ("gamma" in name, *settings)


def test_only_mean_field_takes_several_draws_per_step(monkeypatch):
    asked = {}

    def train(*_, num_draws, **__):
        asked[name] = num_draws
        raise DivergedError

    monkeypatch.setattr(methods, "train", train)
    for name in ("mean-field", "oracle", "semi-dais-32", "optimum-1"):
        with pytest.raises(DivergedError):
            METHODS[name](jax.random.key(0), made_up(4), effort(2, batch_size=2), silent)
    assert asked == {"mean-field": 8, "oracle": 1, "semi-dais-32": 1, "optimum-1": 1}


def test_every_method_has_a_kind():
    assert {methods.kind(name) for name in METHODS} == set(methods.KINDS)
    assert methods.kind("semi-rvrs-0.1-budget-20") == "semi-rvrs"
    assert methods.kind("semi-dais-8") == "semi-dais"


def test_arguments_of_the_optimum_are_checked():
    with pytest.raises(ValueError, match="degrees_of_freedom must be a finite number above 0"):
        optimal_fraction(0.0, 0.5)
    with pytest.raises(ValueError, match="target_acceptance must be a number"):
        optimal_fraction(1.0, 0.0)
