"""Figures of a fit."""

from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_fit(
    *,
    losses: np.ndarray,
    acceptances: np.ndarray,
    target_acceptance: float,
    elbo: float,
    proposal: dict[str, np.ndarray],
    fitted: dict[str, np.ndarray],
    path: str | PathLike[str] | None = None,
) -> "Figure":
    raise NotImplementedError
