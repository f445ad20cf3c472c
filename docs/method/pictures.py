r"""
The method in pictures
======================

One latent variable, so that everything can be drawn: a posterior :math:`p(z \mid x)` with a peak
and a shoulder, and a normal proposal :math:`q(z)`. All curves on this page are computed on a grid,
with the library's own acceptance probabilities.
"""

import _pictures as pictures
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import FIT, GREEN, GRID, PROPOSAL, RED, TARGET
from jax.scipy.stats import norm

import rvrs

# %%
# Proposal, acceptance, approximation
# -----------------------------------
#
# A proposal is drawn from :math:`q`, and accepted with probability
#
# .. math:: a(z) = \sigma\big(\log p(x, z) - \log q(z) + T\big),
#
# :math:`\sigma` being the logistic function: likely where the posterior is high compared to the
# proposal, unlikely where it is low. What is accepted has the density :math:`r(z) = q(z)\,a(z) /
# Z`, where :math:`Z` is the share that is accepted. The threshold :math:`T` moves the line:

loc, scale = 0.5, 1.8
at_threshold = {f"T = {t:g}": pictures.curves(loc, scale, t) for t in (4.0, 0.0, -4.0)}

figure, panels = plt.subplots(1, 3, figsize=(9.5, 2.9), sharey=True, layout="constrained")
for panel, (title, shown) in zip(panels, at_threshold.items(), strict=True):
    panel.plot(GRID, shown.acceptance, color=GREEN)
    panel.axhline(shown.normalizer, color=GREEN, linestyle="dotted")
    panel.set_title(f"{title}: accepted, Z = {shown.normalizer:.2g}", fontsize="medium")
    panel.set_xlabel("latent variable z")
panels[0].set_ylabel("acceptance probability a(z)")
pictures.tidy(panels)

# %%
# With a large :math:`T` everything is accepted, and :math:`r` is the proposal: this is ordinary
# variational inference. The lower :math:`T`, the fewer are accepted and the more :math:`r` looks
# like the posterior. Where :math:`a` is small everywhere it is proportional to :math:`p / q`, and
# :math:`r` *is* the posterior: rejection sampling. In between it is not exact, but it needs no
# bound on :math:`p / q`, and never stops working in a tail.

figure = pictures.columns(at_threshold)

# %%
# Nobody wants to choose :math:`T`. You choose the acceptance :math:`Z` instead
# (``target_acceptance``), and :math:`T` follows: the acceptance grows with it, so there is exactly
# one that fits. (Below, where little is accepted, the lines meet: :math:`a` is then :math:`e^T p /
# q`, and :math:`Z` is :math:`e^T p(x)` whatever the proposal.)

thresholds = np.linspace(-7, 5, 60)
figure, panel = plt.subplots(figsize=(6, 3.2), layout="constrained")
for width, colour in ((0.4, RED), (1.8, PROPOSAL), (6.0, GREEN)):
    accepted = [pictures.curves(loc, width, t).normalizer for t in thresholds]
    panel.semilogy(thresholds, accepted, color=colour, label=f"proposal of scale {width:g}")
panel.axhline(0.1, color=TARGET)
panel.annotate("target_acceptance = 0.1", (-6.9, 0.115), color="#777777")
panel.set_xlabel("threshold T")
panel.set_ylabel("acceptance Z")
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)

# %%
# Why the proposal widens
# -----------------------
#
# The proposal is trained for what survives, not for what it looks like itself. Below is the gap,
# the divergence of :math:`r` from the posterior (which is the log evidence less the ELBO), for
# proposals of all widths, with :math:`T` solved for each.

widths = np.geomspace(0.5, 4.5, 40)
figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
for target_acceptance, colour in ((1.0, RED), (0.5, PROPOSAL), (0.3, GREEN), (0.1, FIT)):
    gaps = []
    for width in widths:
        t = pictures.threshold_for(loc, width, target_acceptance)
        gaps.append(float(pictures.curves(loc, width, t).gap))
    panel.loglog(widths, gaps, color=colour, label=f"Z = {target_acceptance:g}")
    best = int(np.argmin(gaps))
    panel.plot(widths[best], gaps[best], "o", color=colour)
panel.set_xlabel("scale of the proposal")
panel.set_ylabel("gap to the log evidence (nats)")
panel.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
panel.minorticks_off()
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)

# %%
# Without rejection (Z = 1) a wide proposal is punished for every draw that lands where the
# posterior is not, so variational inference is too narrow. With rejection such draws are thrown
# away, and cost nothing but their evaluation. What cannot be mended is a region that is hardly ever
# proposed: to the left the curves stay steep. So the best proposal is wider than without rejection,
# and a proposal that is far too wide loses little.
#
# The trained fits, which the front page shows, do just that:

figure = pictures.one_knob()

# %%
# The gradient's two terms
# ------------------------
#
# Accepted draws :math:`z = \mu + s\,\varepsilon` move with the parameters :math:`\phi = (\mu, s)`
# of the proposal. With :math:`A = \log p - \log q - \log a` and :math:`f = (A - E_r A)\, a` the
# gradient of the ELBO is
#
# .. math:: \nabla_\phi\,\mathrm{ELBO} =
#    E_r\Big[\big(\underbrace{f\,\partial_z \log a}_{\text{acceptance}}
#    + \underbrace{\partial_z f}_{\text{path}}\big)\cdot \nabla_\phi z\Big].
#
# The first term moves draws with a larger :math:`A` than average, which are too rare in :math:`r`,
# to where more is accepted, and the others away from there. The second follows the slope of
# :math:`f` along the path of a draw, as in ordinary variational inference. Here is what each
# contributes to the gradient with respect to :math:`\mu`, for a proposal that sits too far to the
# right; the areas under the curves are the terms.

loc, scale = 1.2, 1.2
t = pictures.threshold_for(loc, scale, 0.3)
shown = pictures.curves(loc, scale, t)
mean_log_ratio = pictures.integral(shown.fit * shown.log_ratio)


def log_acceptance(z):
    return jax.nn.log_sigmoid(pictures.log_target(z) - norm.logpdf(z, loc, scale) + t)


def f(z):
    log_ratio = pictures.log_target(z) - norm.logpdf(z, loc, scale) - log_acceptance(z)
    return (log_ratio - mean_log_ratio) * jnp.exp(log_acceptance(z))


acceptance_term = f(GRID) * pictures.derivative(log_acceptance, GRID)
path_term = pictures.derivative(f, GRID)

figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
panel.fill_between(GRID, 0.4 * jnp.exp(pictures.log_target(GRID)), color=TARGET, label="posterior")
panel.plot(GRID, 0.4 * shown.proposal, color=PROPOSAL, linestyle="dashed", label="proposal q")
panel.plot(GRID, shown.fit * acceptance_term, color=GREEN, label="acceptance term")
panel.plot(GRID, shown.fit * path_term, color=FIT, label="path term")
panel.axhline(0, color="black", linewidth=0.6)
panel.set_xlabel("latent variable z")
panel.set_ylabel("contribution to d ELBO / d mean")
panel.legend(frameon=False, fontsize="small")
pictures.tidy(panel)

# %%
# They add up to the gradient, which the grid can tell by itself (T held fixed):

terms = [float(pictures.integral(shown.fit * term)) for term in (acceptance_term, path_term)]
step = 1e-2
ends = [-pictures.curves(loc + way * step, scale, t).gap for way in (1, -1)]
difference = (ends[0] - ends[1]) / (2 * step)
print(f"acceptance term {terms[0]:.4f} + path term {terms[1]:.4f} = {sum(terms):.4f}")
print(f"difference quotient of the ELBO: {difference:.4f}")
assert abs(sum(terms) - difference) < 2e-3

# %%
# Why reparameterize
# ------------------
#
# The older way (VRS) is a score function: :math:`\mathrm{COV}_r[A, a\,\nabla_\phi \log q]`. It has
# the same mean but not the same noise. A score knows how good a draw is as a whole; a path knows
# which way is up in every coordinate. So it depends on the number of dimensions. Below is the
# variance of single estimates, from two accepted draws each, for products of our posterior with
# itself and the mean-field proposal.


def variance(estimator, dimension):
    algorithm = rvrs.vi.as_top_level_api(
        lambda z: pictures.log_target(z).sum(),
        optax.sgd(1.0),  # the new parameters less the old ones are the gradient
        target_acceptance=0.3,
        estimator=estimator,
        baseline="leave_one_out",
        threshold_rule="sgd",  # the paper's, for which T does not follow the proposal in a step
        init_scale=1.25,
    )
    state = algorithm.init(jnp.full(dimension, 0.43))
    keys = jax.random.split(jax.random.key(0), 2000)
    after, _ = jax.jit(jax.vmap(algorithm.step, in_axes=(0, None)))(keys, state)
    return float(np.var(after.parameters.loc - state.parameters.loc, axis=0).mean())


dimensions = [1, 4, 16, 64]
figure, panel = plt.subplots(figsize=(6, 3.2), layout="constrained")
variances = {}
for estimator, label, colour in (
    ("score", "score function (VRS)", RED),
    ("reparameterized", "reparameterized (RVRS)", FIT),
):
    variances[estimator] = [variance(estimator, dimension) for dimension in dimensions]
    panel.loglog(dimensions, variances[estimator], "o-", color=colour, label=label)
panel.set_xticks(dimensions, [str(dimension) for dimension in dimensions])
panel.minorticks_off()
panel.set_xlabel("dimensions")
panel.set_ylabel("variance of one estimate\nof d ELBO / d mean")
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)

# %%

for dimension, score, path in zip(dimensions, *variances.values(), strict=True):
    print(f"{dimension:3} dimensions: variance of VRS over that of RVRS {score / path:.2g}")
assert variances["score"][-1] > variances["reparameterized"][-1]

# %%
# In one dimension the score is the quieter one. In many it drowns, since everything that happens in
# the other coordinates is noise to it. Figure 2 of :doc:`/results` has the same for real
# posteriors. How both are derived, and where the paper errs, is in :doc:`/mathematics`.
