from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm

from rvrs.experiments import funnel, runner
from rvrs.experiments import store as stores
from rvrs.experiments.experiment import Result, Unit
from rvrs.experiments.store import Store

NUM_STEPS = 3000
EXPERIMENT = funnel.EXPERIMENT


@pytest.fixture(scope="module")
def fits() -> dict[float, funnel.Fit]:
    return {
        target_acceptance: funnel.fit(jax.random.key(0), target_acceptance, num_steps=NUM_STEPS)
        for target_acceptance in funnel.TARGET_ACCEPTANCES
    }


def reference_log_density(z: np.ndarray) -> np.ndarray:
    """The paper's formula in float64, written without the package."""
    along, across = (z[..., 0] + z[..., 1]) / np.sqrt(2), (z[..., 0] - z[..., 1]) / np.sqrt(2)
    return norm.logpdf(along) + norm.logpdf(across, scale=np.exp(along / 2))


class Exact(NamedTuple):
    elbo: float
    acceptance: float


def quadrature(fit: funnel.Fit) -> Exact:
    """ELBO and Z of a fit on a grid of the proposal's noise, in float64."""
    axis = np.linspace(-8, 8, 401)
    noise = np.stack(np.meshgrid(axis, axis), axis=-1)
    mass = np.prod(norm.pdf(noise), axis=-1) * (axis[1] - axis[0]) ** 2
    scale = np.exp(np.asarray(fit.parameters.log_scale, float))
    z = np.asarray(fit.parameters.loc, float) + scale * noise
    lw = reference_log_density(z) - np.sum(norm.logpdf(noise) - np.log(scale), axis=-1)
    a = fit.epsilon + (1 - fit.epsilon) * expit(lw + fit.threshold)
    normalizer = np.sum(mass * a)
    elbo = np.sum(mass * a * (lw - np.log(a))) / normalizer + np.log(normalizer)
    return Exact(elbo, normalizer)


def test_log_density_is_the_papers_formula():
    z = np.random.default_rng(0).normal(scale=2.0, size=(100, 2))
    ours = jax.vmap(funnel.log_density)(jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose(ours, reference_log_density(z), rtol=1e-4, atol=1e-4)


def test_density_is_normalised():
    # Wide enough for the open end of the funnel: the mass outside is below 1e-7.
    axis = np.linspace(-25, 25, 1001)
    z = np.stack(np.meshgrid(axis, axis), axis=-1)
    total = np.sum(np.exp(reference_log_density(z))) * (axis[1] - axis[0]) ** 2
    assert total == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("target_acceptance", funnel.TARGET_ACCEPTANCES)
def test_reported_elbo_agrees_with_quadrature(fits, target_acceptance):
    fit = fits[target_acceptance]
    assert abs(fit.elbo - quadrature(fit).elbo) < 4 * fit.elbo_error


@pytest.mark.slow
@pytest.mark.parametrize("target_acceptance", funnel.TARGET_ACCEPTANCES)
def test_reported_threshold_gives_the_target_acceptance(fits, target_acceptance):
    fit = fits[target_acceptance]
    # Four standard errors of Z are 1.3 % for the reported T and 4 % for the T of the evaluation,
    # which come from 100 000 and 10 000 proposals (the coefficient of variation of a is below 1).
    assert quadrature(fit).acceptance == pytest.approx(target_acceptance, rel=0.013)
    assert fit.acceptance == pytest.approx(target_acceptance, rel=0.04)


@pytest.mark.slow
def test_elbo_rises_towards_zero_as_the_target_acceptance_falls(fits):
    mean_field, half, twentieth = (fits[z] for z in funnel.TARGET_ACCEPTANCES)

    def clearly_below(first: funnel.Fit, second: funnel.Fit) -> bool:
        return second.elbo - first.elbo > 4 * np.hypot(first.elbo_error, second.elbo_error)

    assert clearly_below(mean_field, half)
    assert clearly_below(half, twentieth)
    assert twentieth.elbo < 4 * twentieth.elbo_error


@pytest.mark.slow
def test_short_fits_come_near_the_limits_of_training(fits):
    # The ELBO at the parameters where the expected gradient vanishes, solved for by quadrature.
    for target_acceptance, limit in [(1.0, -0.2031), (0.5, -0.0465), (0.05, -0.0020)]:
        assert quadrature(fits[target_acceptance]).elbo == pytest.approx(limit, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("target_acceptance", funnel.TARGET_ACCEPTANCES)
def test_densities_integrate_to_one(fits, target_acceptance):
    axis = np.linspace(-12, 12, 241)
    cell = (axis[1] - axis[0]) ** 2
    on_grid = funnel.densities(fits[target_acceptance], axis)
    assert on_grid.target.sum() * cell == pytest.approx(1, abs=1e-3)
    assert on_grid.proposal.sum() * cell == pytest.approx(1, abs=1e-3)
    # As exact as the calibration of T, see above.
    assert on_grid.fit.sum() * cell == pytest.approx(1, rel=0.013)
    assert np.all((on_grid.acceptance >= 0) & (on_grid.acceptance <= 1))


@pytest.mark.slow
def test_plot_writes_an_image(fits, tmp_path):
    path = tmp_path / "funnel.png"
    funnel.plot(fits.values(), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_plot_without_the_mean_field_fit_is_refused(fits, tmp_path):
    with pytest.raises(ValueError, match="mean-field"):
        funnel.plot([fits[0.5], fits[0.05]], tmp_path / "funnel.png")


def result(method: str, seed: int = 0, failure: str | None = None, **figures) -> Result:
    return Result(Unit("funnel", "funnel", method, seed), figures, failure, 1.0)


def results_with_elbos(elbos: dict[str, float], error: float = 0.001) -> list[Result]:
    return [
        result(method, elbo=elbo, elbo_error=error, acceptance=0.5, threshold=1.5, seconds=2.0)
        for method, elbo in elbos.items()
    ]


def drawable(method: str, threshold: float | None) -> Result:
    """A result whose Z belongs to its proposal and T."""
    figures = {"elbo": -0.1, "elbo_error": 0.01, "threshold": threshold, "seconds": 1.0}
    figures |= {"loc": [-0.2, -0.2], "log_scale": [0.1, 0.1], "acceptance": 1.0}
    if threshold is not None:
        fit = funnel._rebuilt(result(method, **figures))
        figures["acceptance"] = float(quadrature(fit).acceptance)
    return result(method, **figures)


@pytest.mark.parametrize("method", ["mean-field", "rvrs-0.5"])
def test_a_fit_is_rebuilt_from_the_stored_result_of_its_unit(method, tmp_path, monkeypatch):
    made, shares = [], []
    fit = funnel.fit
    monkeypatch.setattr(funnel, "fit", lambda *a, **b: made.append(fit(*a, **b)) or made[0])
    unit = Unit("funnel", "funnel", method, 3)
    settings = {"num_steps": 50, "num_evaluation_proposals": 2000}
    outcome = EXPERIMENT.run(unit, settings, {}, lambda share, _words: shares.append(share))
    origin = stores.origin(EXPERIMENT, "quick", settings)
    Store(tmp_path).write(Result(unit, outcome.figures, None, 1.0), origin, machine={})
    (stored,) = Store(tmp_path).load("funnel")
    assert stored.failure is None
    rebuilt = funnel._rebuilt(stored)
    assert rebuilt._replace(parameters=()) == made[0]._replace(parameters=())
    for ours, theirs in zip(rebuilt.parameters, made[0].parameters, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert shares[-1] == 1


def test_the_presets_are_planned_without_a_file_of_data(tmp_path):
    for preset, steps, units in [("quick", 2000, 3), ("cpu", 50_000, 15), ("paper", 5_000_000, 15)]:
        plan = runner.plan("funnel", preset, out=tmp_path)
        assert plan.settings == {"num_steps": steps, "num_evaluation_proposals": 1_000_000}
        assert len(plan.missing) == units


def test_the_figure_is_drawn_from_stored_results(tmp_path):
    results = [drawable("mean-field", None), drawable("rvrs-0.5", 0.5), drawable("rvrs-0.05", -2.5)]
    (path,) = EXPERIMENT.plot(results, tmp_path)
    assert path == tmp_path / "funnel.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_figure_is_drawn_where_a_column_of_it_would_stand_alone(tmp_path):
    mean_field, half = drawable("mean-field", None), drawable("rvrs-0.5", 0.5)
    assert EXPERIMENT.plot([mean_field], tmp_path) == []
    assert EXPERIMENT.plot([half, result("mean-field", failure="it fell")], tmp_path) == []


@pytest.mark.parametrize(
    ("elbos", "rises", "nearly_zero"),
    [
        ({"mean-field": -0.2, "rvrs-0.5": -0.05, "rvrs-0.05": -0.002}, True, True),
        ({"mean-field": -0.2, "rvrs-0.5": -0.25, "rvrs-0.05": -0.002}, False, True),
        ({"mean-field": -0.2, "rvrs-0.5": -0.0501, "rvrs-0.05": -0.05}, None, False),
        ({"mean-field": -0.2, "rvrs-0.5": -0.05}, None, None),
        ({}, None, None),
    ],
)
def test_claims_hold_where_the_elbo_rises_to_nearly_zero(elbos, rises, nearly_zero):
    first, second = EXPERIMENT.claims(results_with_elbos(elbos))
    assert first.holds is rises
    assert second.holds is nearly_zero


def test_the_table_has_a_row_for_each_method_and_says_what_failed():
    results = results_with_elbos({"rvrs-0.05": -0.002, "rvrs-0.5": -0.05})
    text = EXPERIMENT.tables([*results, result("mean-field", 1, failure="it fell")])
    rows = [line for line in text.splitlines() if line.startswith("| RVRS")]
    assert rows == [
        "| RVRS, Z_target = 0.5 | 1 | -0.0500 ± 0.0010 | 0.0010 | 0.5000 | 1.50 | 2.0 |",
        "| RVRS, Z_target = 0.05 | 1 | -0.0020 ± 0.0010 | 0.0010 | 0.5000 | 1.50 | 2.0 |",
    ]
    assert "- funnel, mean-field, seed 1: it fell" in text
