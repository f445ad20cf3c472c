"""What the pages about the method draw with, and the picture on the front page.

``python docs/method/_pictures.py`` draws that picture anew.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import rvrs
from rvrs.core import acceptance, threshold

TARGET, PROPOSAL, FIT = "#c9c9c9", "#f5842f", "#1f4fbf"
GREEN, RED = "#2f8f5b", "#d6453d"

GRID = jnp.linspace(-8.0, 10.0, 8001)
SPACING = float(GRID[1] - GRID[0])


def log_target(z: jax.Array) -> jax.Array:
    """A posterior with a mode on the left, a shoulder on the right, and evidence 1."""
    left, right = norm.logpdf(z, -0.7, 0.5), norm.logpdf(z, 1.3, 1.2)
    return logsumexp(jnp.stack([left, right]), axis=0) - jnp.log(2.0)


class Curves(NamedTuple):
    """Everything about one approximation, on the grid."""

    proposal: jax.Array
    """q."""
    acceptance: jax.Array
    """a."""
    fit: jax.Array
    """r."""
    log_ratio: jax.Array
    """A."""
    normalizer: jax.Array
    """Z."""
    gap: jax.Array
    """log p(x) - ELBO: the divergence of r from the posterior."""


def integral(values: jax.Array) -> jax.Array:
    """Over the grid."""
    return jnp.sum(values) * SPACING


@jax.jit
def curves(loc: float, scale: float, t: jax.typing.ArrayLike) -> Curves:
    """The approximation with a normal proposal and threshold ``t``, by quadrature."""
    log_q = norm.logpdf(GRID, loc, scale)
    a = acceptance.evaluate(log_target(GRID) - log_q, jnp.asarray(t), 0.0)
    q = jnp.exp(log_q)
    normalizer = integral(q * a.probability)
    r = q * a.probability / normalizer
    elbo = integral(r * a.log_ratio) + jnp.log(normalizer)
    return Curves(q, a.probability, r, a.log_ratio, normalizer, -elbo)


@partial(jax.jit, static_argnames="target_acceptance")
def threshold_for(loc: float, scale: float, target_acceptance: float) -> jax.Array:
    """T at which a normal proposal is accepted so often, from evenly spread proposals."""
    z = loc + scale * norm.ppf((jnp.arange(4000) + 0.5) / 4000)
    lw = log_target(z) - norm.logpdf(z, loc, scale)
    return threshold.calibrate(lw[:, None], target_acceptance)[0]


def trained(target_acceptance: float, num_steps: int = 6000) -> tuple[float, float]:
    """Location and scale of a normal proposal that was trained for an acceptance."""
    algorithm = rvrs.vi.as_top_level_api(
        lambda z: log_target(z[0]),
        optax.adam(optax.cosine_decay_schedule(2e-2, num_steps)),
        target_acceptance=target_acceptance,
        num_samples=8,
        epsilon=0.0,
    )
    state = algorithm.init(jnp.zeros(1))
    state, _ = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps)
    return float(state.parameters.loc[0]), float(jnp.exp(state.parameters.log_scale[0]))


def trained_curves(target_acceptance: float) -> Curves:
    """The curves of a proposal that was trained for an acceptance."""
    loc, scale = trained(target_acceptance)
    return curves(loc, scale, threshold_for(loc, scale, target_acceptance))


def decisions(panel: Axes, shown: Curves, num_proposals: int = 900, seed: int = 0) -> None:
    """Proposals as points under q; those that fall under ``q a`` are accepted."""
    rng = np.random.default_rng(seed)
    share = np.asarray(shown.proposal, float)
    place = rng.choice(len(GRID), num_proposals, p=share / share.sum())
    z, q = np.asarray(GRID)[place], np.asarray(shown.proposal)[place]
    uniform = rng.uniform(size=num_proposals)
    accepted = uniform < np.asarray(shown.acceptance)[place]
    height = uniform * q
    panel.scatter(z[~accepted], height[~accepted], s=5, lw=0, color=PROPOSAL, alpha=0.35)
    panel.scatter(z[accepted], height[accepted], s=5, lw=0, color=FIT, alpha=0.8)
    panel.plot(GRID, shown.proposal, color=PROPOSAL, label="proposal q")
    panel.plot(GRID, shown.proposal * shown.acceptance, color=FIT, label="accepted, q a")


def outcome(panel: Axes, shown: Curves) -> None:
    """The posterior, the proposal, and what rejection makes of it."""
    panel.fill_between(GRID, jnp.exp(log_target(GRID)), color=TARGET, label="posterior")
    panel.plot(GRID, shown.proposal, color=PROPOSAL, linestyle="dashed", label="proposal q")
    panel.plot(GRID, shown.fit, color=FIT, label="approximation r")


def tidy(panels: Any, left: float = -4.0, right: float = 5.5) -> None:
    """Axes without clutter, over the same interval."""
    for panel in np.ravel(panels):
        panel.set_xlim(left, right)
        panel.spines[["top", "right"]].set_visible(False)


def columns(shown: dict[str, Curves]) -> Figure:
    """Two rows, decisions and what comes of them, and a column for each approximation."""
    figure, panels = plt.subplots(
        2, len(shown), figsize=(9.5, 5.0), sharex=True, sharey="row", layout="constrained"
    )
    for column, (title, each) in enumerate(shown.items()):
        decisions(panels[0, column], each)
        outcome(panels[1, column], each)
        panels[0, column].set_title(title, fontsize="medium")
        panels[1, column].set_xlabel("latent variable z")
    for row in panels:
        row[0].set_ylabel("density")
        row[0].set_ylim(bottom=0)
        row[-1].legend(loc="upper right", fontsize="small", frameon=False)
    tidy(panels)
    return figure


def one_knob(target_acceptances: tuple[float, ...] = (1.0, 0.3, 0.05)) -> Figure:
    """The picture on the front page: trained proposals at falling acceptance."""
    return columns(
        {
            f"Z = {each.normalizer:.2g}, gap {each.gap:.2g} nats": each
            for each in map(trained_curves, target_acceptances)
        }
    )


def derivative(function: Callable[[jax.Array], jax.Array], at: jax.Array) -> jax.Array:
    """Of a function of one number, at every point of an array."""
    return jax.vmap(jax.grad(function))(at)


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "_static" / "method.png"
    one_knob().savefig(path, dpi=130)
    print(path)
