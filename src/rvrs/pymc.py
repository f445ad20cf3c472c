"""Fits of PyMC models: ``pip install 'rvrs[pymc]'``.

The model's log density over unconstrained values, which PyMC writes in JAX, goes to
:func:`rvrs.fit` as that of a NumPyro model; the result has PyMC's names.
"""

import dataclasses
from os import PathLike
from typing import Any

import jax

from rvrs import fitting
from rvrs.core import arguments as checks
from rvrs.core.problem import PRNGKey
from rvrs.proposals import Proposal
from rvrs.proposals.given_flow import FlowjaxDistribution
from rvrs.pymc_model import Converted, Model, convert
from rvrs.result import ARVIZ_DRAWS, Fit

__all__ = ["PyMCFit", "fit", "load"]

_NOT_FOR_PYMC = ("guide", "batch_size", "learning_rate", "mesh", "model_args", "model_kwargs")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PyMCFit(Fit):
    """A trained and evaluated approximation of a PyMC model; made by :func:`rvrs.pymc.fit`.

    Like :class:`rvrs.Fit`, with the names of the PyMC model: ``sample`` and ``to_arviz`` have its
    free random variables and Deterministics, ``summary`` and ``plot`` the free random variables.

    >>> import jax, pymc as pm, rvrs
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean", 0.0, 10.0)
    ...     ratio = pm.Deterministic("ratio", pm.math.exp(mean))
    ...     y = pm.Normal("y", mean, 1.0, observed=[3.0, 1.0, 4.0])
    >>> fit = rvrs.pymc.fit(jax.random.key(0), model, num_steps=500, progress=False)
    >>> list(fit.sample(jax.random.key(1), 100))
    ['mean', 'ratio']
    """

    converted: Converted = dataclasses.field(repr=False)
    """The model as it was when it was fitted."""

    def __repr__(self) -> str:
        return f"PyMC{super().__repr__()}"

    def to_arviz(self, rng_key: PRNGKey | None = None, num_samples: int = ARVIZ_DRAWS) -> Any:
        """An ``arviz.InferenceData`` like PyMC's own, of independent draws (one chain).

        With the model's coords and dims, and groups of its observed and constant data as they were
        when it was fitted; ``pm.sample_posterior_predictive(fit.to_arviz(), model=model)`` goes on
        from there. ``sample_stats`` and attributes are those of :meth:`rvrs.Fit.to_arviz`.
        """
        result = super().to_arviz(rng_key, num_samples)
        result.extend(self.converted.groups.copy())
        return result

    def _constrain(self, latent: jax.Array) -> dict[str, jax.Array]:
        hidden = self.guide.latent_names
        return {n: value for n, value in super()._constrain(latent).items() if n not in hidden}

    def _latent_names(self) -> tuple[str, ...]:
        return self.converted.free_names

    def _axes(self) -> dict[str, Any]:
        return self.converted.axes


def fit(rng_key: PRNGKey, model: Model, **options: Any) -> PyMCFit:
    """Fit a PyMC model by reparameterized variational rejection sampling.

    >>> import jax, pymc as pm, rvrs
    >>> with pm.Model(coords={"group": ["a", "b", "c"]}) as model:
    ...     means = pm.Normal("means", 0.0, 10.0, dims="group")
    ...     y = pm.Normal("y", means, 1.0, observed=[3.0, 1.0, 4.0], dims="group")
    >>> fit = rvrs.pymc.fit(jax.random.key(0), model, num_steps=500, progress=False)
    >>> fit.to_arviz().posterior["means"].dims
    ('chain', 'draw', 'group')

    Parameters
    ----------
    model
        A ``pymc.Model`` whose free random variables are all continuous, and which PyMC can express
        in JAX. Potentials, ``pm.Data``, missing values and ``total_size`` mean what they mean in
        PyMC. The search for a start begins around ``model.initial_point()``, so ``initval=`` is
        heard.
    **options
        Those of :func:`rvrs.fit`: ``proposal``, ``target_acceptance``, ``num_steps``,
        ``num_evaluation_draws``, ``progress``, ``callback``, ``checkpoint`` and ``resume``.

    Returns
    -------
    A :class:`rvrs.pymc.PyMCFit`. Look at its ``warnings`` first.

    Notes
    -----
    PyMC computes in ``pytensor.config.floatX``, by default float64, and its bridge to JAX sets
    ``jax_enable_x64`` to that for the whole program. So do ``fit`` and :func:`load`, at every call,
    and leave it there: whatever is done with the result is as precise. Random keys that were made
    before serve as well; programs of other models are compiled anew, in the new precision.

    Minibatches (``pm.Minibatch``) are refused: whether a proposal is accepted depends on all of the
    data.
    """
    for name in _NOT_FOR_PYMC:
        if name in options:
            raise ValueError(
                f"{name} is not for PyMC models; leave it out, or write the model in NumPyro and "
                "call rvrs.fit."
            )
    checks.check_key("rng_key", rng_key)
    converted = convert(model)
    return _with_names(fitting.fit(rng_key, converted.model, converted.data, **options), converted)


def load(
    path: str | PathLike[str],
    model: Model,
    *,
    proposal: Proposal | FlowjaxDistribution | None = None,
) -> PyMCFit:
    """Load what ``PyMCFit.save`` stored; the model must be that of the fit, data included.

    >>> import os, tempfile
    >>> import jax, pymc as pm, rvrs
    >>> with pm.Model() as model:
    ...     mean = pm.Normal("mean", 0.0, 10.0)
    ...     y = pm.Normal("y", mean, 1.0, observed=[3.0, 1.0, 4.0])
    >>> fit = rvrs.pymc.fit(jax.random.key(0), model, num_steps=500, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "fit.npz")
    ...     fit.save(path)
    ...     rvrs.pymc.load(path, model).elbo == fit.elbo
    True

    Parameters
    ----------
    proposal
        Needed where the fit was made with a proposal of your own, such as a flow: one built alike.
    """
    checks.check_file("path", path)
    converted = convert(model)
    return _with_names(
        fitting.load(path, converted.model, converted.data, proposal=proposal), converted
    )


def _with_names(fitted: Any, converted: Converted) -> PyMCFit:
    known = {field.name: getattr(fitted, field.name) for field in dataclasses.fields(Fit)}
    return PyMCFit(**known, converted=converted)
