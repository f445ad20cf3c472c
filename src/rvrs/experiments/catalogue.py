"""The experiments by the names that users write, loaded when they are asked for."""

import importlib

from rvrs.experiments.experiment import Experiment

NAMES = {
    "funnel": "rvrs.experiments.funnel:EXPERIMENT",
    "gradient-variance": "rvrs.experiments.gradient_variance:EXPERIMENT",
    "acceptance": "rvrs.experiments.acceptance_sweep:EXPERIMENT",
    "training-curves": "rvrs.experiments.training_curves:EXPERIMENT",
    "logistic": "rvrs.experiments.logistic:EXPERIMENT",
    "gaussian-process": "rvrs.experiments.gaussian_process:EXPERIMENT",
    "hierarchical": "rvrs.experiments.hierarchical:EXPERIMENT",
    "vae": "rvrs.experiments.vae:EXPERIMENT",
}
"""Where each experiment is: ``module:attribute``."""


def get(name: str) -> Experiment:
    """The experiment of a name."""
    return load(address(name))


def address(name: str) -> str:
    """Where an experiment is; a worker process needs no catalogue to load it from there."""
    if name not in NAMES:
        raise ValueError(f"there is no experiment {name!r}; choose from {', '.join(NAMES)}.")
    return NAMES[name]


def load(address: str) -> Experiment:
    """The experiment at ``module:attribute``."""
    module, _, attribute = address.partition(":")
    return getattr(importlib.import_module(module), attribute)
