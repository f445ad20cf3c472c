"""What the pages about the method draw with, and the picture in the README.

``python docs/method/_pictures.py`` draws that picture anew.
"""

from collections.abc import Callable
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

import rvrs
from rvrs.core import acceptance, threshold

TARGET, PROPOSAL, FIT = "#c9c9c9", "#f5842f", "#1f4fbf"
GREEN, RED = "#2f8f5b", "#d6453d"

GRID = jnp.linspace(-6.0, 9.0, 6001)
SPACING = float(GRID[1] - GRID[0])

Parameters = Any


def log_target(z: jax.Array) -> jax.Array:
    """A posterior with a mode on the left, a shoulder on the right, and evidence 1."""
    modes = jnp.array([norm.logpdf(z, -0.7, 0.5), norm.logpdf(z, 1.3, 1.2)])
    return logsumexp(modes + jnp.log(jnp.array([0.5, 0.5]))[:, None].reshape(2, *[1] * z.ndim), 0)


class Curves(NamedTuple):
    """Everything about one approximation, on the grid."""

    proposal: jax.Array
    """q."""
    acceptance: jax.Array
    """a."""
    fit: jax.Array
    """r."""
    log_weight: jax.Array
    """lw = log p - log q."""
    log_ratio: jax.Array
    """A."""
    normalizer: float
    """Z."""
    threshold: float
    """T."""
    gap: float
    """log p(x) - ELBO: the divergence of r from the posterior."""


def integral(values: jax.Array) -> jax.Array:
    """Over the grid."""
    return jnp.sum(values) * SPACING


def curves(loc: float, scale: float, t: float, epsilon: float = 0.0) -> Curves:
    """The approximation with a normal proposal and threshold ``t``, by quadrature."""
    log_q, log_p = norm.logpdf(GRID, loc, scale), log_target(GRID)
    a = acceptance.evaluate(log_p - log_q, jnp.asarray(t), epsilon)
    q = jnp.exp(log_q)
    normalizer = integral(q * a.probability)
    r = q * a.probability / normalizer
    elbo = integral(r * a.log_ratio) + jnp.log(normalizer)
    return Curves(
        proposal=q,
        acceptance=a.probability,
        fit=r,
        log_weight=log_p - log_q,
        log_ratio=a.log_ratio,
        normalizer=float(normalizer),
        threshold=float(t),
        gap=float(jnp.log(integral(jnp.exp(log_p))) - elbo),
    )


def threshold_for(loc: float, scale: float, target_acceptance: float) -> float:
    """T at which a normal proposal is accepted so often, from evenly spread proposals."""
    z = loc + scale * norm.ppf((jnp.arange(20_000) + 0.5) / 20_000)
    lw = log_target(z) - norm.logpdf(z, loc, scale)
    return float(threshold.calibrate(lw[:, None], target_acceptance)[0])


def trained(target_acceptance: float, num_steps: int = 6000) -> Curves:
    """The curves of a normal proposal that was trained for an acceptance."""
    algorithm = rvrs.vi.as_top_level_api(
        lambda z: log_target(z[0]),
        optax.adam(optax.cosine_decay_schedule(2e-2, num_steps)),
        target_acceptance=target_acceptance,
        num_samples=8,
        epsilon=0.0,
    )
    state = algorithm.init(jnp.zeros(1))
    state, _ = rvrs.vi.run(jax.random.key(0), algorithm, state, num_steps)
    loc, scale = float(state.parameters.loc[0]), float(jnp.exp(state.parameters.log_scale[0]))
    return curves(loc, scale, threshold_for(loc, scale, target_acceptance))


def decisions(panel: Axes, shown: Curves, num_proposals: int = 900, seed: int = 0) -> None:
    """Proposals as points under q; those that fall under ``q a`` are accepted."""
    rng = np.random.default_rng(seed)
    place = rng.choice(len(GRID), num_proposals, p=np.asarray(shown.proposal * SPACING))
    z, q = np.asarray(GRID)[place], np.asarray(shown.proposal)[place]
    uniform = rng.uniform(size=num_proposals)
    accepted = uniform < np.asarray(shown.acceptance)[place]
    points = {"s": 5, "linewidths": 0}
    panel.scatter(z[~accepted], (uniform * q)[~accepted], color=PROPOSAL, alpha=0.35, **points)
    panel.scatter(z[accepted], (uniform * q)[accepted], color=FIT, alpha=0.8, **points)
    panel.plot(GRID, shown.proposal, color=PROPOSAL, label="proposal q")
    panel.plot(GRID, shown.proposal * shown.acceptance, color=FIT, label="q a, what is accepted")


def outcome(panel: Axes, shown: Curves) -> None:
    """The posterior, the proposal, and what rejection makes of it."""
    panel.fill_between(GRID, jnp.exp(log_target(GRID)), color=TARGET, label="posterior")
    panel.plot(GRID, shown.proposal, color=PROPOSAL, linestyle="dashed", label="proposal q")
    panel.plot(GRID, shown.fit, color=FIT, label="approximation r")


def tidy(panels: Any, left: float = -3.5, right: float = 5.5) -> None:
    """Axes without clutter, over the same interval."""
    for panel in np.ravel(panels):
        panel.set_xlim(left, right)
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)


def one_knob(fits: dict[float, Curves]) -> plt.Figure:
    """Two rows: proposals and decisions, and what comes of them, for each acceptance."""
    figure, panels = plt.subplots(
        2, len(fits), figsize=(9.5, 4.8), sharex=True, sharey="row", layout="constrained"
    )
    for column, (target_acceptance, shown) in enumerate(fits.items()):
        decisions(panels[0, column], shown)
        outcome(panels[1, column], shown)
        panels[0, column].set_title(
            f"Z = {target_acceptance:g}\ngap {shown.gap:.3f} nats", fontsize="medium"
        )
        panels[1, column].set_xlabel("latent variable z")
    panels[0, 0].set_ylabel("density")
    panels[1, 0].set_ylabel("density")
    panels[0, -1].legend(loc="upper right", fontsize="small", frameon=False)
    panels[1, -1].legend(loc="upper right", fontsize="small", frameon=False)
    tidy(panels)
    return figure


def derivative(function: Callable[[jax.Array], jax.Array], at: jax.Array) -> jax.Array:
    """Of a function of one number, at every point of an array."""
    return jax.vmap(jax.grad(function))(at)


README_ACCEPTANCES = (1.0, 0.3, 0.05)

if __name__ == "__main__":
    picture = one_knob({z: trained(z) for z in README_ACCEPTANCES})
    path = Path(__file__).parents[1] / "_static" / "method.png"
    picture.savefig(path, dpi=130)
    print(path)
