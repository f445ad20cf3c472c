"""How a guide registers the parameters of its proposal: our own families and NumPyro's."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous

from rvrs.core.problem import PyTree
from rvrs.core.randomness import key_from_noise, noise_for_keys
from rvrs.guides import _numpyro
from rvrs.proposals import Proposal
from rvrs.proposals.given_flow import FlowjaxDistribution
from rvrs.settings import named_proposal


class GuideProposal(Protocol):
    """A family and the ``numpyro.param`` sites that hold its parameters."""

    family: Proposal

    def setup(self, args: tuple[Any, ...], kwargs: dict[str, Any], location: jax.Array) -> None:
        """Learn the model's structure; called once it is known to be valid.

        ``location`` is a point of the unconstrained space.
        """
        ...

    def register(self, location: jax.Array) -> PyTree:
        """Register the parameters, initially around ``location``, and return their values."""
        ...

    def start(self, location: jax.Array, scale: jax.Array) -> tuple[PyTree, PyTree]:
        """What to train from a normal distribution, and the frame that it is in.

        A frame gives the units of what is trained, so that an optimizer's steps are of the right
        size in every coordinate.
        """
        ...

    def in_plain_units(self, trained: PyTree, frame: PyTree) -> PyTree:
        """The parameters of the family."""
        ...

    def reframe(self, trained: PyTree, frame: PyTree) -> tuple[PyTree, PyTree]:
        """The same parameters in their own units."""
        ...

    def sites(self, parameters: PyTree) -> dict[str, Any]:
        """Parameters of the family by the names of their ``numpyro.param`` sites."""
        ...


def guide_proposal(
    proposal: AutoContinuous | Proposal | FlowjaxDistribution | str | None,
    model: Callable,
    prefix: str,
    init_scale: float,
) -> GuideProposal:
    """What the argument ``proposal`` of a guide stands for."""
    if isinstance(proposal, AutoContinuous):
        if proposal.model is not model:
            raise ValueError(
                "proposal was built for another model; build it from the model that the guide "
                f"is for, e.g. {type(proposal).__name__}(model)."
            )
        return StockProposal(proposal)
    if isinstance(proposal, type):
        raise ValueError(
            f"proposal must be an autoguide, not a class; pass {proposal.__name__}(model)."
        )
    return OwnProposal(
        named_proposal("diagonal" if proposal is None else proposal), prefix, init_scale
    )


class OwnProposal:
    """A family of :mod:`rvrs.proposals`; every field of its parameters becomes a site."""

    def __init__(self, family: Proposal, prefix: str, init_scale: float) -> None:
        self.family = family
        self._prefix = prefix
        self._init_scale = init_scale

    def setup(self, args: tuple[Any, ...], kwargs: dict[str, Any], location: jax.Array) -> None:
        """See whether the family is one for so many dimensions."""
        jax.eval_shape(lambda at: self.family.init(at, self._init_scale), location)

    def register(self, location: jax.Array) -> PyTree:
        """One ``numpyro.param`` for every field of the family's parameters."""
        initial = self.family.init(location, self._init_scale)
        sites = self.sites(initial)
        return type(initial)(*[numpyro.param(name, value) for name, value in sites.items()])

    def start(self, location: jax.Array, scale: jax.Array) -> tuple[PyTree, PyTree]:
        """The standard member of the family, in the frame of the normal distribution."""
        return self.family.init(jnp.zeros_like(location), 1.0), (location, scale)

    def in_plain_units(self, trained: PyTree, frame: PyTree) -> PyTree:
        """Carried out of the frame."""
        return self.family.push_forward(trained, *frame)

    def reframe(self, trained: PyTree, frame: PyTree) -> tuple[PyTree, PyTree]:
        """The member of the family is the new frame."""
        standard, *own = self.family.standardize(self.in_plain_units(trained, frame))
        return standard, tuple(own)

    def sites(self, parameters: PyTree) -> dict[str, Any]:
        """One site for every field."""
        return {f"{self._prefix}_{name}": value for name, value in parameters._asdict().items()}


class StockProposal:
    """A NumPyro autoguide with a density over flat vectors.

    Its noise is random keys, which its distribution is sampled with, since NumPyro's
    distributions have no common notion of noise.
    """

    def __init__(self, guide: AutoContinuous) -> None:
        self._guide = guide
        self.family = Proposal(
            init=_no_init,
            sample_noise=noise_for_keys,
            propose=self._propose,
            log_density=self._log_density,
            push_forward=_no_init,
            standardize=_no_init,
            closed_under="diagonal",
        )

    def setup(self, args: tuple[Any, ...], kwargs: dict[str, Any], location: jax.Array) -> None:
        """Let the autoguide learn the model's structure, and see whether it has a density."""
        self._guide._setup_prototype(*args, **kwargs)
        _numpyro.order_latent(self._guide)
        name = type(self._guide).__name__
        try:
            posterior = _numpyro.stock_posterior(self._guide, {})
            at = jax.ShapeDtypeStruct((self._guide.latent_dim,), jnp.result_type(float))
            jax.eval_shape(posterior.log_prob, at)
            if isinstance(posterior, dist.Delta):
                raise NotImplementedError
        except NotImplementedError:
            raise ValueError(
                f"proposal: {name} cannot evaluate its log density at a given point, which the "
                "gradient needs; use AutoDiagonalNormal, AutoMultivariateNormal, "
                "AutoLowRankMultivariateNormal or AutoIAFNormal, or for a flow "
                "rvrs.proposals.coupling_flow() or masked_autoregressive_flow()."
            ) from None
        if not posterior.has_rsample:
            raise ValueError(
                f"proposal: {name} has no reparameterized sampler, which the gradient needs."
            )

    def register(self, location: jax.Array) -> PyTree:
        """The autoguide registers its own parameters, at its own initial values."""
        return _numpyro.register_stock(self._guide)

    def start(self, location: jax.Array, scale: jax.Array) -> tuple[PyTree, PyTree]:
        """The autoguide's own initial values, unconstrained; location and scale where it has them.

        There is no frame: the autoguide decides what its parameters mean.
        """
        known = {"loc": location, "scale": scale} if scale.ndim == 1 else {"loc": location}
        values: Any = handlers.seed(_numpyro.register_stock, rng_seed=0)(self._guide)
        for name, value in known.items():
            site = f"{self._guide.prefix}_{name}"
            if site in values and values[site].shape == value.shape:
                values[site] = value
        transforms = _numpyro.parameter_transforms(self._guide)
        return {name: transforms[name].inv(value) for name, value in values.items()}, ()

    def in_plain_units(self, trained: PyTree, frame: PyTree) -> PyTree:
        """Constrained."""
        transforms = _numpyro.parameter_transforms(self._guide)
        return {name: transforms[name](value) for name, value in trained.items()}

    def reframe(self, trained: PyTree, frame: PyTree) -> tuple[PyTree, PyTree]:
        """There is no frame."""
        return trained, frame

    def sites(self, parameters: PyTree) -> dict[str, Any]:
        """They have their names already."""
        return parameters

    def _propose(self, parameters: PyTree, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        posterior = _numpyro.stock_posterior(self._guide, parameters)
        z, intermediates = posterior.sample_with_intermediates(key_from_noise(noise))
        if intermediates:
            return z, jnp.sum(posterior.log_prob(z, intermediates))
        return z, jnp.sum(posterior.log_prob(z))

    def _log_density(self, parameters: PyTree, z: jax.Array) -> jax.Array:
        return jnp.sum(_numpyro.stock_posterior(self._guide, parameters).log_prob(z))


def _no_init(*_: Any) -> PyTree:
    raise NotImplementedError("NumPyro's autoguides initialise themselves.")
