r"""
My ADVI intervals look too narrow
=================================

You have fitted a regression by automatic differentiation variational inference (ADVI). It was
quick, but the intervals look too good to be true. This page finds out whether they are, and gets
better ones from the same model: with :func:`rvrs.fit`, checked against NUTS.

The reason is simple. ADVI with independent normals cannot say that two coefficients are correlated.
It answers with normals that are so narrow that they fit inside the posterior. Rejection sampling
can repair this: the normals only *propose* values, the model decides which of them are kept, and
what is kept is correlated as it should be.
"""

# %%
# The data
# --------
#
# A hundred patients from the breast-cancer data that come with scikit-learn, and six measurements
# of their cells. Radius and perimeter are nearly the same thing, which is what makes the posterior
# hard for independent normals.

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from sklearn.datasets import load_breast_cancer

import rvrs

data = load_breast_cancer()
rows = np.random.default_rng(0).choice(len(data.target), 100, replace=False)
columns = [0, 1, 2, 4, 6, 7]
names = ["intercept", *(str(data.feature_names[column])[5:] for column in columns)]

features = data.data[rows][:, columns]
features = (features - features.mean(axis=0)) / features.std(axis=0)
malignant = 1 - data.target[rows]

correlation = np.corrcoef(features.T)
print(f"{malignant.sum()} of {len(malignant)} tumours are malignant")
print(f"correlation of radius and perimeter: {correlation[0, 2]:.3f}")


# %%
# The model is an ordinary NumPyro model. Nothing in it knows of RVRS.


def model(features, malignant=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([features.shape[1]]).to_event(1))
    logits = intercept + features @ slopes
    numpyro.sample("malignant", dist.Bernoulli(logits=logits), obs=malignant)


def coefficients(draws):
    """All coefficients of every draw, one row per draw."""
    return np.column_stack([draws["intercept"], draws["slopes"]])


# %%
# The ADVI fit
# ------------
#
# This is the fit that looks too narrow: ``AutoNormal`` has one normal for each coefficient.

optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 5000))
guide = AutoNormal(model)
svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=4))
result = svi.run(jax.random.key(0), 5000, features, malignant, progress_bar=False)
draws_advi = coefficients(
    guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(10_000,))
)

# %%
# The reference
# -------------
#
# To call an interval too narrow we need one that is right. NUTS is slow on large problems, but this
# one is small. First look at whether its chains agree: ``r_hat`` has to be close to 1.

mcmc = MCMC(
    NUTS(model),
    num_warmup=500,
    num_samples=2500,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
mcmc.run(jax.random.key(2), features, malignant)
mcmc.print_summary()
draws_nuts = coefficients(mcmc.get_samples())

# %%
# Now compare standard deviations. A ratio of 1 is right, a ratio of 0.5 means intervals that are
# half as wide as they should be.

ratios_advi = draws_advi.std(axis=0) / draws_nuts.std(axis=0)
for name, ratio in zip(names, ratios_advi, strict=True):
    print(f"{name:<16} sd of ADVI / sd of NUTS = {ratio:.2f}")

# %%
# So the suspicion was right. The intercept and the slope of texture, which have little to do with
# the others, are nearly as wide as they should be; the five that go together are a quarter too
# narrow. The picture shows why, for the two measurements that are nearly the same. A large slope of
# one goes with a small slope of the other. The normals of ADVI know nothing of this, and so they
# cover only the middle of the ridge.

figure, panel = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
panel.scatter(draws_nuts[:2000, 1], draws_nuts[:2000, 3], s=4, color="#c9c9c9", label="NUTS")
panel.scatter(draws_advi[:2000, 1], draws_advi[:2000, 3], s=4, color="#d6453d", label="ADVI")
panel.set(xlabel="slope of radius", ylabel="slope of perimeter", title="Two correlated slopes")
panel.legend(markerscale=3)
plt.show()

# %%
# The same normals, with rejection
# --------------------------------
#
# ``proposal="diagonal"`` is the family that ADVI has used: independent normals. What is new is
# ``target_acceptance=0.1``, which is also the default: a tenth of the proposals is kept, those that
# the model finds best. Training takes account of that, so the normals become wider than before.

fit_diagonal = rvrs.fit(
    jax.random.key(3),
    model,
    features,
    malignant,
    proposal="diagonal",
    target_acceptance=0.1,
    progress=False,
)
print(fit_diagonal.summary())

# %%
# How to read the summary
# -----------------------
#
# Read it from the top:
#
# * **ELBO** is a lower bound of the log evidence, and **log evidence** is an estimate of the value
#   itself. Their difference is the divergence :math:`\mathrm{KL}(r \,\|\, p(z \mid x))` of the fit
#   from the posterior, in nats. Close to 0 is good, and more than 0.1 gives a warning.
# * **acceptance** should be near the target. Its inverse is the number of proposals that a draw
#   costs.
# * **k-hat** describes the tail of the importance weights of the draws against the posterior. Up to
#   0.7 the weights can be relied on. Above, the posterior may have tails that the fit misses.
# * **ESS** says how many draws are left when they are weighted against the posterior. If that is
#   nearly all of them, then the weights are nearly equal, which is what a good fit has. k-hat looks
#   at the largest weights only, so read the two together.
# * The **table** has moments and quantiles of every coefficient.
# * Lines that begin with **WARNING** would come last. The same words are in ``fit.warnings``.

gap = fit_diagonal.log_evidence - fit_diagonal.elbo
print(f"divergence from the posterior: {gap:.3f} nats")
print(f"warnings: {fit_diagonal.warnings}")

# %%
# The default
# -----------
#
# Without ``proposal`` we get a normal with a full covariance in problems of this size, again
# followed by rejection. This is what you should do first with a model of your own.

fit_default = rvrs.fit(jax.random.key(4), model, features, malignant, progress=False)
print(fit_default.summary())

# %%
# Was it the rejection?
# ---------------------
#
# A fair question, as a full covariance alone helps as well. NumPyro has it as
# ``AutoMultivariateNormal``, so we can tell the two apart. The table shows the narrowest and the
# widest coefficient, and the largest error of a mean in standard deviations of NUTS.

guide = AutoMultivariateNormal(model)
svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=4))
result = svi.run(jax.random.key(5), 5000, features, malignant, progress_bar=False)
draws_full_rank = coefficients(
    guide.sample_posterior(jax.random.key(6), result.params, sample_shape=(10_000,))
)
draws_diagonal = coefficients(fit_diagonal.sample(jax.random.key(7), 10_000))
draws_default = coefficients(fit_default.sample(jax.random.key(8), 10_000))

methods = {
    "ADVI": draws_advi,
    "ADVI, full rank": draws_full_rank,
    "RVRS, diagonal": draws_diagonal,
    "RVRS, default": draws_default,
}
print(f"{'method':<16}{'least sd ratio':>16}{'largest':>10}{'mean error':>12}")
for method, draws in methods.items():
    ratios = draws.std(axis=0) / draws_nuts.std(axis=0)
    errors = np.abs(draws.mean(axis=0) - draws_nuts.mean(axis=0)) / draws_nuts.std(axis=0)
    print(f"{method:<16}{ratios.min():>16.2f}{ratios.max():>10.2f}{errors.max():>12.2f}")

# %%
# Rejection on its own, with the normals of ADVI, has brought back most of the width. Full-rank ADVI
# has done so too: where correlation is all that is wrong, a full covariance is a good and cheap
# answer. What it cannot do is bend or skew. The default has both, a full covariance and rejection,
# and its widths agree with NUTS.
#
# The same as a picture: intervals that hold 90 % of the posterior.

colours = {"NUTS": "black", "ADVI": "#d6453d", "RVRS, default": "#1f4fbf"}
shown = {"NUTS": draws_nuts} | methods
places = np.arange(len(names))
figure, panel = plt.subplots(figsize=(7.0, 4.5), layout="constrained")
for number, (method, colour) in enumerate(colours.items()):
    low, middle, high = np.quantile(shown[method], [0.05, 0.5, 0.95], axis=0)
    height = places + 0.22 * (number - 1)
    panel.hlines(height, low, high, color=colour, linewidth=2.5, label=method)
    panel.plot(middle, height, "o", color=colour, markersize=4)
panel.axvline(0.0, color="#c9c9c9", zorder=0)
panel.set_yticks(places, names)
panel.invert_yaxis()
panel.set(xlabel="coefficient", title="Medians and 90 % intervals")
figure.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %%
# A check to keep
# ---------------
#
# In real work there is no NUTS to compare with, or you would not be here. Then the figures of the
# fit have to do: no warnings, a small difference between ELBO and log evidence, a k-hat below 0.7.
# :doc:`tutorial_7_diagnostics` is about these. Here we can check
# that the figures told the truth.

ratios_default = draws_default.std(axis=0) / draws_nuts.std(axis=0)
assert not fit_default.warnings
assert np.all(np.abs(ratios_default - 1) < 0.08), "the fit does not agree with NUTS"
assert ratios_advi.min() < 0.85, "ADVI is not too narrow here"
