import numpy as np

from rvrs import comparison_report
from rvrs.comparison_report import Moments


def test_accuracy_is_that_of_the_worst_coordinate_and_leaves_constants_out():
    reference = {
        "a": Moments(np.array([0.0, 1.0]), np.array([2.0, 0.0])),
        "b": Moments(np.array(1.0), np.array(0.5)),
    }
    sites = {
        "a": Moments(np.array([1.0, 1.0]), np.array([1.0, 0.0])),
        "b": Moments(np.array(0.0), np.array(0.75)),
    }
    assert comparison_report.accuracy(sites, reference) == (2.0, 0.5, 1.5)
    constant = {"a": Moments(np.ones(2), np.zeros(2))}
    assert comparison_report.accuracy(constant, constant) is None
