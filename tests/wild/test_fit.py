"""rvrs.fit on targets that break samplers: what it claims is true, what is doubtful it says."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rvrs
from tests.wild import targets as wild
from tests.wild.targets import ONE_DIMENSIONAL, Target

SHORT = {"num_steps": 200, "num_evaluation_draws": 20_000, "progress": False}
# What there is to say of every target, in the words of a warning.
WORDS = {
    "Cauchy": "k-hat is",
    "mass at both edges": "k-hat is",
    "overflow": "k-hat is",
    "mass at the edge": "off its target 0.1: the density may be non-finite",
    "no gradient": "steps had no finite gradient and were skipped",
}
# Targets that a fit need not say anything of, because it is right.
FINE = ("half is -inf", "discontinuity", "log density of 1e6", "log density of -1e6", "NaN at 1 %")
QUICK = (wild.AT_THE_EDGE, wild.OFFSET, wild.NO_GRADIENT)


def fitted_quietly(model, *args, **options) -> rvrs.Fit:
    """A fit that warns of nothing but what it holds in its own list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = rvrs.fit(jax.random.key(0), model, *args, **SHORT | options)
    assert tuple(str(warning.message) for warning in caught) == fit.warnings
    return fit


@functools.cache
def fitted(target: Target) -> rvrs.Fit:
    return fitted_quietly(wild.model_of_one, jnp.int32(ONE_DIMENSIONAL.index(target)))


def assert_whole(fit: rvrs.Fit) -> None:
    settings = fit.guide.settings
    assert np.max(fit.proposals_per_draw) * settings.num_samples <= settings.max_proposals
    for leaf in jax.tree.leaves(fit.params):
        assert np.all(np.isfinite(leaf))
    assert math.isfinite(fit.threshold)
    assert np.all(np.isfinite(fit.thresholds))
    for figure in (fit.elbo, fit.log_evidence, fit.acceptance, fit.ess):
        assert math.isfinite(figure)


@wild.few(ONE_DIMENSIONAL, QUICK)
def test_parameters_and_threshold_stay_finite_within_the_bound_on_proposals(target):
    fit = fitted(target)
    assert_whole(fit)
    assert np.all(np.isfinite(fit.losses))
    assert np.all(np.isfinite(fit.sample(jax.random.key(1), 200)["z"]))


@wild.few(ONE_DIMENSIONAL, QUICK)
def test_the_elbo_and_the_acceptance_are_those_of_quadrature(target):
    fit = fitted(target)
    loc = float(fit.params["auto_loc"][0])
    scale = math.exp(float(fit.params["auto_log_diagonal"][0]))
    wanted = wild.quadrature(target, loc, scale, fit.threshold, fit.guide.settings.epsilon)
    assert abs(fit.elbo - wanted.elbo) < 4 * fit.elbo_error + wild.rounding(wanted.elbo)
    # The proposals of 20,000 draws tell Z to within one percent.
    assert abs(math.log(fit.acceptance) - wanted.log_normalizer) < 0.05


@wild.few(ONE_DIMENSIONAL, QUICK)
def test_the_log_evidence_is_right_or_the_fit_says_that_it_may_not_be(target):
    fit = fitted(target)
    right = target.log_evidence
    if target is wild.FAR_MODES:
        # One of two equal modes is all that any draw has seen.
        right -= math.log(2)
    slack = 4 * fit.log_evidence_error + wild.rounding(right)
    assert fit.log_evidence < right + slack
    assert fit.elbo < right + 4 * fit.elbo_error + wild.rounding(right)
    if fit.khat <= 0.7:
        assert fit.log_evidence > right - slack
        if not fit.warnings:
            assert fit.elbo > right - 0.1 - slack


@wild.few(ONE_DIMENSIONAL, QUICK)
def test_what_is_doubtful_is_said_in_words_and_nothing_else(target):
    fit = fitted(target)
    if target.name in WORDS:
        assert any(WORDS[target.name] in warning for warning in fit.warnings)
    if target.name in FINE:
        assert fit.warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("target", [wild.HORSESHOE, wild.FUNNEL], ids=lambda t: t.name)
def test_many_dimensions_with_no_scale_of_their_own_are_warned_of(target):
    fit = fitted_quietly(wild.model_of(target))
    assert_whole(fit)
    assert any("k-hat is" in warning for warning in fit.warnings)
    assert fit.elbo < target.log_evidence + 4 * fit.elbo_error
    assert fit.log_evidence < target.log_evidence + 4 * fit.log_evidence_error


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize(
    "target", [wild.CAUCHY, wild.HALF_MISSING, wild.FUNNEL], ids=lambda t: t.name
)
def test_a_proposal_of_extreme_scale_finds_back_or_the_fit_says_that_it_did_not(target, scale):
    model = wild.model_of(target)
    guide = rvrs.AutoRVRS(model, init_scale=scale)
    fit = fitted_quietly(model, guide=guide)
    assert_whole(fit)
    off = abs(fit.log_evidence - target.log_evidence) > 4 * fit.log_evidence_error + 0.01
    assert fit.warnings or not off
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = fit.sample(jax.random.key(1), 100)["z"]
    if not np.all(np.isfinite(draws)):
        assert "max_proposals was hit" in str(caught[0].message)
        assert any("max_proposals was hit" in warning for warning in fit.warnings)


@pytest.mark.slow
def test_an_acceptance_of_one_in_a_million_ends_within_its_bound_and_is_nearly_exact():
    model = wild.model_of(wild.HALF_MISSING)
    fit = fitted_quietly(model, target_acceptance=1e-6, num_steps=2, num_evaluation_draws=5)
    assert_whole(fit)
    assert abs(fit.elbo - wild.HALF_MISSING.log_evidence) < 4 * fit.elbo_error + 1e-3
