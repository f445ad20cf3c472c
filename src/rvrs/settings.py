"""The settings of the method, and the checks of what a user passes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from scipy import stats

from rvrs import proposals
from rvrs.core import arguments, rejection
from rvrs.core.objectives import Baseline, Estimator, ModelGradient
from rvrs.core.problem import PyTree
from rvrs.core.threshold import Rule
from rvrs.proposals import Proposal
from rvrs.proposals.given_flow import FlowjaxDistribution, is_flow

LogDensity = Callable[[PyTree], jax.Array]


Sampler = Literal["exact", "budget"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one training, checked."""

    target_acceptance: float
    num_samples: int
    epsilon: float
    threshold: float | None
    estimator: Estimator
    baseline: Baseline = "leave_one_out"
    threshold_rule: Rule = "tracking"
    max_proposals: int
    model_gradient: ModelGradient = "unbiased"

    def __post_init__(self) -> None:
        arguments.check_epsilon(self.epsilon)
        arguments.check_target_acceptance(self.target_acceptance, self.epsilon)
        arguments.check_choice("baseline", self.baseline, get_args(Baseline))
        arguments.check_choice("estimator", self.estimator, get_args(Estimator))
        arguments.check_choice("threshold_rule", self.threshold_rule, get_args(Rule))
        arguments.check_num_samples(self.num_samples, self.baseline)
        arguments.check_block(self.num_samples, self.target_acceptance)
        arguments.check_max_proposals(self.max_proposals, self.num_samples)
        arguments.check_threshold(self.threshold)
        arguments.check_choice("model_gradient", self.model_gradient, get_args(ModelGradient))

    @property
    def follows_target(self) -> bool:
        """Whether T is a function of the proposal, the one that keeps Z at its target.

        The gradient then takes account of it; the paper, with its own rule, holds T fixed.
        """
        return self.threshold is None and self.threshold_rule == "tracking"

    @property
    def min_samples(self) -> int:
        """Draws that a step does with: one is enough where its baseline is known beforehand."""
        return 1 if self.baseline == "running" else self.num_samples

    @property
    def block_size(self) -> int:
        """Proposals in the first block of a step."""
        return rejection.block_size(self.num_samples, self.target_acceptance)


@dataclass(frozen=True, kw_only=True)
class FamilySettings(Settings):
    """Those of a training whose proposal is one of our families."""

    proposal: Proposal
    init_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_positive("init_scale", self.init_scale)


@dataclass(frozen=True, kw_only=True)
class SemiSettings(Settings):
    """Those of a training with local latent variables."""

    sampler: Sampler
    num_proposals: int | None
    """Proposals per data point of the sampler ``"budget"``; None for the exact one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.check_choice("sampler", self.sampler, get_args(Sampler))
        if self.sampler == "exact" and self.num_proposals is not None:
            raise ValueError(
                f"num_proposals={arguments.shown(self.num_proposals)} is for sampler='budget'; the "
                "exact sampler makes as many proposals as it needs, up to max_proposals."
            )
        if self.sampler == "budget":
            arguments.check_count("num_proposals", self.num_proposals)
            if cast(int, self.num_proposals) < self.num_samples:
                raise ValueError(
                    f"num_proposals={self.num_proposals} is less than "
                    f"num_samples={self.num_samples}, so that every point would be dropped; use "
                    "about 2 * num_samples / target_acceptance."
                )

    @property
    def expected_complete(self) -> float:
        """Share of points that get their draws where acceptance is at its target."""
        if self.num_proposals is None:
            return 1.0
        accepted = stats.binom(self.num_proposals, self.target_acceptance)
        return float(accepted.sf(self.num_samples - 1))


# max_proposals by default: so many times the proposals that are needed on average that an
# adapted threshold never gets there.
_DEFAULT_CAP = 50


def default_max_proposals(max_proposals: Any, num_samples: Any, target_acceptance: Any) -> Any:
    """``max_proposals``, or where that is None a bound that only a broken target reaches."""
    if max_proposals is not None:
        return max_proposals
    arguments.check_count("num_samples", num_samples)
    arguments.check_target_acceptance(target_acceptance, epsilon=0)
    arguments.check_block(num_samples, target_acceptance)
    needed = rejection.block_size(num_samples, target_acceptance)
    return min(_DEFAULT_CAP * needed, arguments.LARGEST_COUNT)


def named_proposal(proposal: Proposal | FlowjaxDistribution | str) -> Proposal:
    """A family by its name, that of a flow, or as it is."""
    if is_flow(proposal):
        return proposals.from_flowjax(proposal)
    if isinstance(proposal, Proposal):
        for name in Proposal._fields[:-1]:
            arguments.check_callable(f"proposal.{name}", getattr(proposal, name))
        arguments.check_choice(
            "proposal.closed_under", proposal.closed_under, ("diagonal", "triangular")
        )
        return proposal
    if not isinstance(proposal, str) or proposal not in _NAMED_PROPOSALS:
        raise ValueError(
            f"proposal must be one of {', '.join(map(repr, _NAMED_PROPOSALS))} (in rvrs.fit 'auto' "
            "as well), a family such as rvrs.proposals.coupling_flow(), or a flow of flowjax, got "
            f"{arguments.shown(proposal)}."
        )
    return _NAMED_PROPOSALS[proposal]()


_NAMED_PROPOSALS = {
    "diagonal": proposals.diagonal_normal,
    "mvn": proposals.full_rank_normal,
    "low_rank": lambda: proposals.low_rank_normal(_DEFAULT_RANK),
}
# Of "low_rank". Few directions carry most of a posterior's correlation; ten are still cheap.
_DEFAULT_RANK = 10


def check_density(logdensity_fn: LogDensity, position: PyTree) -> None:
    """Refuse positions that are not floating-point, and densities not scalar and finite there."""
    arguments.check_floats("position", position)
    result = arguments.evaluated_shape("logdensity_fn", logdensity_fn, position)
    if not isinstance(result, jax.ShapeDtypeStruct) or result.shape != ():
        raise ValueError(
            "logdensity_fn must return a scalar for one position, got "
            f"{jax.tree.map(lambda leaf: f'an array of shape {leaf.shape}', result)}; sum over "
            "observations and coordinates."
        )
    if str(result.dtype) not in ("float32", "float64"):
        raise ValueError(
            f"logdensity_fn must return a number of type float32 or float64, got {result.dtype}; "
            "convert what it adds up, e.g. with jnp.asarray(x, float)."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(position)):
        return
    value = logdensity_fn(position)
    if not jnp.isfinite(value):
        raise ValueError(
            f"logdensity_fn is {value} at the initial position; start from a position inside "
            "the support."
        )
