"""Trainings and fits with flows of flowjax as proposals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flowjax import bijections
from flowjax.distributions import StudentT
from jax.scipy.stats import norm
from numpyro.infer import SVI, Trace_ELBO
from scipy import stats

import rvrs
from rvrs import proposals
from rvrs.bench import compilation
from rvrs.proposals import from_flowjax
from tests.proposals.flowjax_flows import conditional, coupling, flow_of, masked, planar, spline

LOG_EVIDENCE = 1.5


def banana(z):
    return LOG_EVIDENCE + norm.logpdf(z[0]) + norm.logpdf(z[1], z[0] ** 2, 0.5)


def trained(flow, num_steps):
    algorithm = rvrs.vi.as_top_level_api(
        banana,
        optax.adam(optax.cosine_decay_schedule(2e-2, num_steps)),
        proposal=flow,
        target_acceptance=0.3,
        num_samples=4,
        init_scale=0.5,
    )
    state = algorithm.init(jnp.zeros(2))
    run = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps, chunk_size=num_steps)
    return algorithm, state, *run


@pytest.mark.parametrize(
    "maker",
    [
        pytest.param(
            partial(masked, invert=False), id="masked autoregressive", marks=pytest.mark.slow
        ),
        pytest.param(partial(masked, invert=True), id="inverted", marks=pytest.mark.slow),
        pytest.param(partial(coupling, invert=True), id="coupling", marks=pytest.mark.slow),
        pytest.param(
            partial(masked, invert=False, base=lambda at: StudentT(5.0, at)),
            id="heavy tails",
            marks=pytest.mark.slow,
        ),
        pytest.param(partial(spline, invert=False), id="spline", marks=pytest.mark.slow),
    ],
)
def test_training_finds_the_log_evidence_of_a_banana_and_nearly_closes_the_gap(maker):
    algorithm, start, state, info = trained(maker(size=2), num_steps=1000)
    got = algorithm.evaluate(jax.random.key(1), state, 100_000)
    assert float(got.log_evidence_error) < 0.02
    assert abs(float(got.log_evidence) - LOG_EVIDENCE) < 4 * float(got.log_evidence_error)
    assert LOG_EVIDENCE - float(got.elbo) < 0.15
    assert not info.skipped.any()
    assert np.any(start.parameters.weights != state.parameters.weights)


Y = np.array([1.5], np.float32)


def model(y):
    """A banana, of which one coordinate is observed."""
    first = numpyro.sample("first", dist.Normal(0.0, 1.0))
    second = numpyro.sample("second", dist.Normal(first**2, 0.5))
    numpyro.sample("y", dist.Normal(second, 1.0), obs=y)


def exact(y):
    """Log evidence and the posterior mean of ``second``, by quadrature over ``first``."""
    first = np.linspace(-8, 8, 4001)
    joint = stats.norm.pdf(first) * stats.norm.pdf(y.item(), first**2, 1.25**0.5)
    second = (first**2 / 0.25 + y.item()) / (1 / 0.25 + 1)
    return np.log(np.sum(joint) * (first[1] - first[0])), np.average(second, weights=joint)


flow_for_the_model = partial(planar, size=2, flow_layers=4, invert=False)
FLOW = flow_for_the_model()
SHORT = {
    "target_acceptance": 0.3,
    "num_steps": 500,
    "num_evaluation_draws": 20_000,
    "progress": False,
}


@pytest.fixture(scope="module")
def fit():
    return rvrs.fit(jax.random.key(0), model, Y, proposal=FLOW, **SHORT)


def test_a_fit_finds_the_log_evidence_and_the_mean(fit):
    log_evidence, mean = exact(Y)
    assert abs(fit.log_evidence - log_evidence) < 4 * fit.log_evidence_error
    assert fit.log_evidence_error < 0.01
    assert log_evidence - fit.elbo < 0.1
    assert abs(fit.acceptance / 0.3 - 1) < 0.1
    draws = np.asarray(fit.sample(jax.random.key(1), 5000, resample=True)["second"], float)
    # Resampled draws are not quite independent.
    assert abs(draws.mean() - mean) < 6 * draws.std() / 5000**0.5
    assert fit.guide.settings.proposal is from_flowjax(FLOW)


def test_another_fit_with_the_same_flow_compiles_nothing_and_is_right(fit):
    with compilation.counted() as count:
        other = rvrs.fit(jax.random.key(1), model, Y - 0.5, proposal=FLOW, **SHORT)
        assert count() == 0
    assert other.guide is fit.guide
    assert abs(other.log_evidence - exact(Y - 0.5)[0]) < 4 * other.log_evidence_error


@pytest.fixture
def path(fit, tmp_path):
    fit.save(tmp_path / "fit.npz")
    return tmp_path / "fit.npz"


def test_a_loaded_fit_draws_the_same_to_the_bit(fit, path):
    loaded = rvrs.load(path, model, Y, proposal=flow_for_the_model())
    assert loaded.elbo == fit.elbo
    jax.tree.map(np.testing.assert_array_equal, loaded.params, fit.params)
    got, wanted = (each.sample(jax.random.key(3), 5000, resample=True) for each in (loaded, fit))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert np.all(np.isfinite(got["second"]))


def test_a_fit_is_not_loaded_without_its_flow(path):
    with pytest.raises(
        ValueError, match=r"a proposal of your own; .* rvrs\.load\(\.\.\., proposal="
    ):
        rvrs.load(path, model, Y)


@pytest.mark.parametrize(
    ("maker", "match"),
    [
        (
            partial(flow_for_the_model, flow_layers=3),
            r"weights does not fit: float32 \(\d+,\) instead",
        ),
        (partial(masked, size=2), "weights does not fit"),
        (partial(flow_for_the_model, size=4), "proposal: the flow is for d=4, but there are 2"),
    ],
)
def test_a_fit_is_not_loaded_with_a_flow_of_other_sizes(maker, match, path):
    with pytest.raises(ValueError, match=match):
        rvrs.load(path, model, Y, proposal=maker())


@pytest.mark.slow
def test_stock_svi_trains_a_guide_with_a_flow():
    guide = rvrs.AutoRVRS(model, proposal=FLOW, target_acceptance=0.3)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    result = svi.run(jax.random.key(0), 1000, Y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert result.losses[-100:].mean() < result.losses[:100].mean()
    got = guide.evaluate(jax.random.key(1), result.params, Y, num_draws=20_000)
    log_evidence, _ = exact(Y)
    assert abs(float(got.log_evidence) - log_evidence) < 4 * float(got.log_evidence_error)
    assert log_evidence - float(got.elbo) < 0.15
    fields = proposals.Flow._fields
    assert set(result.params) == {f"auto_{field}" for field in fields}


def svi_of(model, **options):
    guide = rvrs.AutoRVRS(model, **options)
    SVI(model, guide, optax.adam(1e-2), Trace_ELBO()).init(jax.random.key(0), Y)


def vi_of(_, **options):
    rvrs.vi.as_top_level_api(banana, optax.adam(1e-2), **options).init(jnp.zeros(2))


def fit_of(model, **options):
    rvrs.fit(jax.random.key(0), model, Y, **SHORT | options)


@pytest.mark.parametrize("use", [svi_of, vi_of, fit_of])
def test_every_way_in_refuses_what_does_not_fit_and_names_the_proposal(use):
    match = r"proposal: the flow is for d=3, but there are 2 latent .* base of shape \(2,\)"
    with pytest.raises(ValueError, match=match):
        use(model, proposal=flow_of("coupling"))
    with pytest.raises(ValueError, match="flow is conditional"):
        use(model, proposal=conditional())
    with pytest.raises(ValueError, match="proposal must be one of 'diagonal', "):
        use(model, proposal=bijections.Affine(jnp.zeros(2)))
