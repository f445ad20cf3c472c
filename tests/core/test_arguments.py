import math

import pytest

from rvrs.core import arguments


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, math.nan, math.inf, "0.1", None, True])
def test_target_acceptance_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match="target_acceptance must be a number in"):
        arguments.check_target_acceptance(value, 0.0)


def test_target_acceptance_must_exceed_epsilon():
    with pytest.raises(ValueError, match=r"target_acceptance=0\.05 cannot be reached.*lower eps"):
        arguments.check_target_acceptance(0.05, 0.05)
    arguments.check_target_acceptance(1, 0.0)
    arguments.check_target_acceptance(1.0, 0.9)


@pytest.mark.parametrize("value", [-1e-9, 1.0, math.nan, "small", None])
def test_epsilon_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match="epsilon must be a number in"):
        arguments.check_epsilon(value)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True])
def test_num_samples_must_be_a_positive_whole_number(value):
    with pytest.raises(ValueError, match="num_samples must be a whole number of at least 1"):
        arguments.check_num_samples(value, "leave_one_out")


def test_one_draw_needs_a_running_baseline():
    with pytest.raises(ValueError, match=r'num_samples=1 .*baseline="running"'):
        arguments.check_num_samples(1, "leave_one_out")
    arguments.check_num_samples(1, "running")


@pytest.mark.parametrize(("value", "message"), [(1, "less than num_samples=2"), (0, "whole")])
def test_max_proposals_must_allow_for_the_draws(value, message):
    with pytest.raises(ValueError, match=f"max_proposals.*{message}"):
        arguments.check_max_proposals(value, 2)


@pytest.mark.parametrize("value", [math.nan, "auto"])
def test_threshold_must_be_a_number_or_none(value):
    with pytest.raises(ValueError, match="threshold must be None"):
        arguments.check_threshold(value)
    arguments.check_threshold(None)
    arguments.check_threshold(-3)


def test_a_choice_lists_the_known_words():
    with pytest.raises(ValueError, match="estimator must be one of 'a', 'b', got 'c'"):
        arguments.check_choice("estimator", "c", ("a", "b"))
    with pytest.raises(ValueError, match="estimator must be one of"):
        arguments.check_choice("estimator", ["a"], ("a", "b"))


@pytest.mark.parametrize("value", [0.0, -1, math.inf, "1"])
def test_a_scale_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match="init_scale must be a finite number above 0"):
        arguments.check_positive("init_scale", value)
