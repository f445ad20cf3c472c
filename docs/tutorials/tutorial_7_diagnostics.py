r"""
Is this fit any good? And is this model?
========================================

Every fit comes with figures about itself. This page reads them on a fit that is bad, repairs it,
and then uses one of them, the log evidence, to compare two models.

A bad fit
---------

Twelve clinics treat patients, with few of them each, and we want the spread of their success rates.
Written in the way that comes to mind first, the spread ``tau`` is the scale of the clinics' effects
``theta``:
"""

import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

import rvrs

PROPOSAL, FIT, BLACK, RED = "#f5842f", "#1f4fbf", "black", "#d6453d"

rng = np.random.default_rng(2)
patients = rng.integers(3, 9, size=12)
successes = rng.binomial(patients, 1 / (1 + np.exp(-rng.normal(0.5, 0.3, size=12))))
print("patients: ", patients)
print("successes:", successes)


def centered(patients, successes):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.5))
    log_tau = numpyro.sample("log_tau", dist.Normal(-1.0, 1.5))
    with numpyro.plate("clinics", len(patients)):
        theta = numpyro.sample("theta", dist.Normal(mu, jnp.exp(log_tau)))
        numpyro.sample("y", dist.Binomial(patients, logits=theta), obs=successes)


# %%
# The fit warns as it ends. Here the warnings are caught, to print them in the right place; they are
# kept in ``fit.warnings`` as well.

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bad = rvrs.fit(jax.random.key(0), centered, patients, successes, num_steps=3000, progress=False)
print("\n".join(bad.summary().splitlines()[:6]))
for warning in bad.warnings:
    print("-", warning)

# %%
# What the figures say, one after the other:
#
# - **ELBO and log evidence** should nearly agree. Their distance is the divergence of the fit from
#   the posterior, in nats.
# - **k-hat** is about the weights of draws against the posterior. The larger it is, the more of the
#   posterior sits where the fit hardly ever goes. The log evidence is an average of such weights,
#   so it deserves no trust either when k-hat is above 0.7: see its error.
# - **ESS** is how many draws would count if they were weighted.
# - **acceptance** is what was asked for: nothing is wrong with the rejection as such.
#
# Where is the posterior missed? A small ``tau`` ties all ``theta`` closely together, a large one
# lets them go: a funnel, too narrow at one end for a proposal that is wide enough at the other.
#
# The remedy
# ----------
#
# Say the same in other variables, of which none sets the scale of another:


def non_centered(patients, successes):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.5))
    log_tau = numpyro.sample("log_tau", dist.Normal(-1.0, 1.5))
    with numpyro.plate("clinics", len(patients)):
        standard = numpyro.sample("standard", dist.Normal(0.0, 1.0))
        theta = numpyro.deterministic("theta", mu + jnp.exp(log_tau) * standard)
        numpyro.sample("y", dist.Binomial(patients, logits=theta), obs=successes)


good = rvrs.fit(
    jax.random.key(0), non_centered, patients, successes, num_steps=3000, progress=False
)
print("\n".join(good.summary().splitlines()[:6]))
assert bad.warnings
assert not good.warnings

# %%
# Both fits are of the same posterior, so they can be drawn into one figure:

figure, panel = plt.subplots(figsize=(7, 3.8), layout="constrained")
for fit, label, colour in ((bad, "centered", RED), (good, "non-centered", FIT)):
    draws = fit.sample(jax.random.key(1), 3000)
    panel.plot(draws["log_tau"], draws["theta"][:, 0], ".", ms=3, alpha=0.4, color=colour)
    panel.plot([], [], "o", color=colour, label=f"{label}, k-hat {fit.khat:.2f}")
panel.set_xlabel("log_tau, the log of the spread between clinics")
panel.set_ylabel("theta of the first clinic")
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)

# %%
# The centered fit leaves out the narrow end, where all clinics are alike.
#
# The last bit: resampling
# ------------------------
#
# Where k-hat is low, weights can be trusted, and what is left of the divergence can be taken away:
# ``resample=True`` draws more and keeps them by their (Pareto-smoothed) weights. Some of the kept
# draws are then the same, so ask for fewer than ``fit.ess`` suggests.

plain = good.sample(jax.random.key(2), 4000)["log_tau"]
weighted = good.sample(jax.random.key(2), 4000, resample=True)["log_tau"]
print(f"log_tau: {plain.mean():.2f} ± {plain.std():.2f}, ", end="")
print(f"resampled {weighted.mean():.2f} ± {weighted.std():.2f}")

# %%
# ArviZ gets the same: independent draws as one chain, with the log weight of each.

inference_data = good.to_arviz(num_samples=1000)
print(sorted(inference_data.posterior.data_vars), sorted(inference_data.sample_stats.data_vars))

# %%
# Which model? The log evidence
# -----------------------------
#
# :math:`p(x)`, the evidence, is how probable a model held the data to be before it saw them. The
# ratio of two is a Bayes factor. MCMC has it only with effort; here it comes with every fit. First
# a model whose evidence is known: a normal mean with a normal prior.

y = np.array([0.9, 1.8, 0.2, 1.1, 1.6])


def conjugate(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


fit = rvrs.fit(jax.random.key(3), conjugate, y, num_steps=1000, progress=False)
covariance = np.eye(5) + 2.0**2  # of the data, with the mean integrated out
exact = float(dist.MultivariateNormal(np.zeros(5), covariance).log_prob(y))
print(f"log evidence {fit.log_evidence:.4f} ± {fit.log_evidence_error:.4f}, exact {exact:.4f}")
assert abs(fit.log_evidence - exact) < 4 * fit.log_evidence_error + 1e-3

# %%
# Now the clinics. Do they differ at all? The rival model has one rate for all of them:


def all_alike(patients, successes):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.5))
    with numpyro.plate("clinics", len(patients)):
        numpyro.sample("y", dist.Binomial(patients, logits=mu), obs=successes)


alike = rvrs.fit(jax.random.key(4), all_alike, patients, successes, num_steps=1000, progress=False)
difference = good.log_evidence - alike.log_evidence
error = np.hypot(good.log_evidence_error, alike.log_evidence_error)
print(f"clinics differ: log evidence {good.log_evidence:.3f} ± {good.log_evidence_error:.3f}")
print(f"all alike:      log evidence {alike.log_evidence:.3f} ± {alike.log_evidence_error:.3f}")
print(f"Bayes factor of 'differ' over 'alike': {np.exp(difference):.2f}", end="")
print(f" (from {np.exp(difference - 2 * error):.2f} to {np.exp(difference + 2 * error):.2f})")

# %%
# One latent variable is few enough to integrate by hand, which checks the second number:

grid = np.linspace(-6, 6, 4001)
log_joint = norm.logpdf(grid, 0.0, 1.5) + jnp.sum(
    dist.Binomial(patients, logits=grid[:, None]).log_prob(successes), axis=1
)
by_hand = float(jax.scipy.special.logsumexp(log_joint) + np.log(grid[1] - grid[0]))
print(f"all alike, by quadrature: {by_hand:.3f}")
assert abs(alike.log_evidence - by_hand) < 4 * alike.log_evidence_error + 2e-3

# %%
# Before you report a Bayes factor:
#
# - k-hat has to be low for both fits. Compare the log evidence of the bad fit above with that of
#   the good one, of the same model and data: it is off by more than the two models differ.
# - The error bars are those of Monte Carlo. They say nothing of the prior, on which a Bayes factor
#   depends more than a posterior does: try another one.
# - The ELBO is a lower bound of the log evidence, whatever k-hat says. If the ELBO of one model is
#   above a log evidence of another that you trust, the question is settled.
