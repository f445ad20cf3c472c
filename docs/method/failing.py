r"""
When it fails
=============

No approximation is always good. RVRS says what it can see, and this page says what it cannot. Every
example is run when the site is built; the warnings are what you would get.

.. list-table::
   :header-rows: 1
   :widths: 34 33 33

   * - The warning begins with
     - It means
     - What to do
   * - *k-hat is ... (above 0.7)*
     - The weights of draws against the posterior have a heavy tail: somewhere the posterior is
       much higher than the fit.
     - Look at the ELBO next. If it is far below the log evidence: reparameterise the model; a
       richer proposal; a smaller Z. If it is not, only far tails are missed (see below). In both
       cases, do not use ``resample=True``.
   * - *the ELBO is ... below the log evidence*
     - That number is the divergence of the fit from the posterior. Means and intervals may be
       off by tenths of a standard deviation.
     - A smaller Z, or a richer proposal.
   * - *acceptance is ..., off its target*
     - Much of the proposal lies where the density is not finite (NaN, or outside of the
       support), so that T cannot reach the target.
     - Look for NaN in the model; give the parameters their proper support.
   * - *max_proposals was hit*
     - A step did not find its draws and was skipped, mostly at the start, far from the posterior.
     - Nothing, if these are a few early steps. Otherwise more steps, or a larger ``max_proposals``.
   * - *steps had no finite gradient*
     - The density is finite there, but its derivative is not (a square root at 0, an unused
       branch of ``jnp.where``).
     - Mend the model: the fit may have stopped where it was.
"""

import warnings

import _pictures as pictures
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from _pictures import FIT, PROPOSAL, TARGET
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from scipy.stats import gamma

import rvrs

# %%
# k-hat: a funnel
# ---------------
#
# A scale and what it scales, centered. The neck of the funnel is too narrow for any one normal
# proposal, and rejection cannot add what is never proposed.


def centered():
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 3.0))
    with numpyro.plate("parts", 9):
        numpyro.sample("x", dist.Normal(0.0, jnp.exp(log_scale / 2)))


def fitted(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = rvrs.fit(jax.random.key(0), model, num_steps=3000, progress=False)
    scale = fit.sample(jax.random.key(1), 10_000)["log_scale"]
    print(f"k-hat {fit.khat:.2f}, log_scale {scale.mean():.2f} ± {scale.std():.2f} (exact: 0 ± 3)")
    for warning in caught:
        print("-", warning.message)
    return fit


bad = fitted(centered)

# %%
# The remedy is the old one. Non-centered, the same model is no problem at all:


def non_centered():
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 3.0))
    with numpyro.plate("parts", 9):
        standard = numpyro.sample("standard", dist.Normal(0.0, 1.0))
        numpyro.deterministic("x", jnp.exp(log_scale / 2) * standard)


good = fitted(non_centered)
assert bad.warnings
assert not good.warnings

# %%
# k-hat: a thin tail
# ------------------
#
# There is another kind of large k-hat, and it is harmless more often than not. A count of 1 with a
# Gamma prior for its rate has the posterior Gamma(3, 2), so that everything can be compared with
# the exact answer.


def counted(count):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("count", dist.Poisson(rate), obs=count)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    fit = rvrs.fit(jax.random.key(0), counted, 1, progress=False)
print(f"k-hat {fit.khat:.2f}, ELBO below the log evidence by {fit.log_evidence - fit.elbo:.4f}")

rates = np.asarray(fit.sample(jax.random.key(1), 100_000)["rate"])
exact_rate = gamma(3, scale=1 / 2)
print(f"mean {rates.mean():.3f} (exact: {exact_rate.mean():.3f})")
print(f"standard deviation {rates.std():.3f} (exact: {exact_rate.std():.3f})")
print("share of draws below a quantile of the posterior, over what it should be:")
for share in (0.0001, 0.001, 0.01, 0.05, 0.5):
    ratio = np.mean(rates < exact_rate.ppf(share)) / share
    print(f"  {100 * share:5.2f} %: {ratio:.2f}")

# %%
# The rate is positive, so the fit is of its logarithm. Towards small rates the posterior falls like
# a power of the rate, which in the logarithm is an exponential tail. That of a normal proposal is
# thinner, and what is hardly ever proposed cannot be accepted. Somewhere out there, beyond the
# first draw in a hundred, the ratio of the two grows without end, and k-hat finds it. Means,
# standard deviations and the usual intervals do not notice.
#
# How to tell the two kinds apart: here the ELBO agrees with the log evidence to a thousandth of a
# nat, above it was off by more than one. A smaller Z does not help, as it only makes everything
# *else* more exact. If you need the far tail, take a prior whose tails are those of a normal in the
# unconstrained space (as in :doc:`start`), or MCMC.

assert fit.khat > 0.7
assert fit.log_evidence - fit.elbo < 0.01
assert abs(rates.mean() / exact_rate.mean() - 1) < 0.02
assert abs(rates.std() / exact_rate.std() - 1) < 0.03

# %%
# Modes that no draw has seen
# ---------------------------
#
# The check by weights knows only what was proposed. Here are two equal modes, far apart, and a fit
# that starts at one of them.


def log_density(z, distance):
    modes = norm.logpdf(z[0], jnp.array([-distance, distance]), 0.5)
    return logsumexp(modes) - jnp.log(2.0)


def two_modes(distance, init_scale):
    algorithm = rvrs.vi.as_top_level_api(
        lambda z: log_density(z, distance),
        optax.adam(optax.cosine_decay_schedule(2e-2, 3000)),
        init_scale=init_scale,
    )
    state = algorithm.init(jnp.array([-distance]))
    state, _ = rvrs.vi.run(jax.random.key(0), algorithm, state, 3000)
    evidence = algorithm.evaluate(jax.random.key(1), state)
    draws = np.asarray(algorithm.sample(jax.random.key(2), state, 5000))[:, 0]
    title = (
        f"start of scale {init_scale:g}: {100 * np.mean(draws > 0):.0f} % right\n"
        f"log evidence {evidence.log_evidence:.2f} ± {evidence.log_evidence_error:.2f} (exact: 0)"
    )
    return draws, title


figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.2), sharey=True, layout="constrained")
z = np.linspace(-9, 9, 721)
exact = np.exp(jax.vmap(lambda z: log_density(z[None], 6.0))(z))
for panel, init_scale in zip(panels, (0.5, 6.0), strict=True):
    draws, title = two_modes(6.0, init_scale)
    panel.fill_between(z, exact, color=TARGET, label="posterior")
    panel.hist(
        draws, 90, range=(-9, 9), density=True, histtype="step", color=FIT, label="draws of r"
    )
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel("latent variable z")
panels[0].set_ylabel("density")
panels[0].legend(frameon=False)
pictures.tidy(panels, -9, 9)

# %%
# On the left half of the posterior is missing, and nothing says so: the ELBO and the log evidence
# agree, and both are :math:`\log 2` too low. A wider start, on the right, sees both modes, and
# rejection then *can* represent them with a single normal proposal, which ordinary variational
# inference cannot. But nobody tells how wide is enough.
#
# **So if you expect several modes**, fit from several seeds and starts (``init_loc_fn``,
# ``init_scale``), compare their log evidence (the largest is the nearest to the truth) and compare
# with MCMC or, better, with something that knows of modes, such as tempering.
#
# Many dimensions
# ---------------
#
# Rejection works on all latent variables at once. Below, D independent copies of the posterior of
# :doc:`pictures`, each of which a normal distribution fits equally badly.

dimensions = (1, 4, 16, 64)
gaps = {1.0: [], 0.1: []}
for target_acceptance, found in gaps.items():
    for dimension in dimensions:
        algorithm = rvrs.vi.as_top_level_api(
            lambda z: pictures.log_target(z).sum(),
            optax.adam(optax.cosine_decay_schedule(2e-2, 3000)),
            target_acceptance=target_acceptance,
        )
        state = algorithm.init(jnp.zeros(dimension))
        state, _ = rvrs.vi.run(jax.random.key(0), algorithm, state, 3000)
        evidence = algorithm.evaluate(jax.random.key(1), state, 1_000_000)
        found.append(-float(evidence.elbo))

figure, panel = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (target_acceptance, found), colour in zip(gaps.items(), (PROPOSAL, FIT), strict=True):
    panel.loglog(dimensions, found, "o-", color=colour, label=f"Z = {target_acceptance:g}")
    print(f"Z = {target_acceptance}:", ", ".join(f"{gap:.3f}" for gap in found), "nats")
panel.set_xticks(dimensions, [str(dimension) for dimension in dimensions])
panel.minorticks_off()
panel.set_xlabel("dimensions")
panel.set_ylabel("gap to the log evidence (nats)")
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)
assert gaps[0.1][0] / gaps[1.0][0] < gaps[0.1][-1] / gaps[1.0][-1]

# %%
# In one dimension nearly all of the gap is closed, in 64 far from it. This is no flaw of the
# training: log weights in D dimensions are sums of D terms, and the same acceptance has to make up
# for all of them. **What helps** is a proposal that is good by itself (full-rank, low-rank, a
# flow), or to reject in few dimensions at a time, where the model allows it: with a latent variable
# per data point, :class:`rvrs.AutoSemiRVRS` has an acceptance of its own for every point, and no
# such limit.
#
# When to use something else
# --------------------------
#
# - A cheap model, few dimensions, and time: NUTS is asymptotically exact, and for a single
#   posterior often as fast (see :doc:`/performance`). RVRS gives independent draws, a bound and the
#   log evidence; NUTS does not.
# - Discrete latent variables: there is no gradient through them. Sum them out in the model, for
#   example with ``dist.MixtureSameFamily``; where that cannot be done, use a sampler for them.
# - A posterior that is wanted only roughly: ``target_acceptance=1`` is ordinary variational
#   inference with our start and step sizes.
