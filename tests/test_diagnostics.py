import builtins

import numpy as np
import pytest

from rvrs import diagnostics

FINE = {
    "khat": 0.3,
    "acceptance": 0.1,
    "target_acceptance": 0.1,
    "num_capped": 0,
    "num_without_gradient": 0,
    "num_steps": 100,
    "missing_evidence": 0.01,
}


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_khat_is_the_shape_of_a_pareto_tail(shape):
    uniform = np.random.default_rng(0).random(100_000)
    log_weights = -shape * np.log(uniform)
    got = diagnostics.smooth(log_weights)
    # The tail has about 950 draws: the estimate's standard error is near (1 + k) / sqrt(950).
    assert abs(got.khat - shape) < 4 * (1 + shape) / np.sqrt(950)


def test_smoothed_weights_add_up_and_tell_the_effective_sample_size():
    log_weights = 0.1 * np.random.default_rng(1).standard_normal(10_000) - 1e4
    got = diagnostics.smooth(log_weights)
    assert np.isclose(got.weights.sum(), 1)
    # For log-normal weights of small variance s^2 it is n exp(-s^2).
    assert abs(got.ess / (10_000 * np.exp(-0.01)) - 1) < 0.01
    order = np.argsort(log_weights)
    assert np.all(np.diff(got.weights[order]) >= -1e-12)


def test_weights_that_agree_have_no_tail():
    rounding = 1e-6 * np.random.default_rng(2).standard_normal(10_000)
    got = diagnostics.smooth(rounding)
    assert got.khat == 0
    assert got.ess > 9999
    none = diagnostics.smooth(np.zeros(0))
    assert np.isnan(none.khat)


def test_the_largest_weights_have_no_tail_where_they_agree_unless_they_are_too_few_to_tell():
    # A density with a jump, and the rounding of float32 on top of it.
    rng = np.random.default_rng(3)
    jump = 3.0 * (rng.random(10_000) < 0.3) + 1e-6 * rng.standard_normal(10_000)
    assert diagnostics.smooth(jump).khat == 0
    assert diagnostics.smooth(np.round(jump)).khat == 0
    assert np.isinf(diagnostics.smooth(np.zeros(3)).khat)


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="log_weights must be finite"):
        diagnostics.smooth(np.array([0.0, np.nan]))


def test_a_good_fit_raises_no_concern():
    assert diagnostics.concerns(**FINE) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"khat": 0.71}, r"k-hat is 0\.71"),
        ({"khat": np.nan}, "k-hat is nan"),
        ({"acceptance": 0.079}, r"-21 % off its target 0\.1"),
        ({"acceptance": 0.121}, r"\+21 % off"),
        ({"num_capped": 3}, "max_proposals was hit in 3 of 100 steps"),
        ({"num_without_gradient": 3}, "3 of 100 steps had no finite gradient"),
        ({"missing_evidence": 0.11}, r"ELBO is 0\.11 below the log evidence"),
    ],
)
def test_every_concern_is_put_in_words(change, words):
    (concern,) = diagnostics.concerns(**FINE | change)
    assert words.replace("\\", "") in concern


def test_the_limits_themselves_are_fine():
    limits = {"khat": 0.7, "acceptance": 0.081, "missing_evidence": 0.1}
    assert diagnostics.concerns(**FINE | limits) == ()


def test_a_fixed_threshold_has_no_target():
    change = {"acceptance": 0.5, "target_acceptance": None}
    assert diagnostics.concerns(**FINE | change) == ()


def test_without_arviz_it_is_named(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "arviz":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"rvrs\[arviz\]"):
        diagnostics.arviz()


def test_the_max_sliced_distance_of_a_shift_is_its_length():
    draws = np.random.default_rng(3).standard_normal((2000, 2))
    found = diagnostics.max_sliced_wasserstein(
        draws, draws + np.array([3.0, 4.0]), num_projections=500, num_replicates=3
    )
    # Some direction of 500 is within a degree of the shift's.
    assert 4.995 < found.mean <= 5 + 1e-9
    assert 0 <= found.sd < 0.005
    nothing = diagnostics.max_sliced_wasserstein(draws, draws, num_replicates=2)
    assert nothing.mean == pytest.approx(0, abs=1e-9)


def test_draws_of_different_dimension_are_refused():
    with pytest.raises(ValueError, match=r"draws and reference must be \(n, D\) and \(m, D\)"):
        diagnostics.max_sliced_wasserstein(np.zeros((5, 2)), np.zeros((5, 3)))
