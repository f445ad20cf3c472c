"""
Start here
==========

In ten minutes: install, fit a model, and know how far to trust the result.

Install
-------

From a checkout, with Python 3.11 or later:

.. code-block:: console

    $ python3 -m venv .venv
    $ .venv/bin/pip install '.[arviz,cli]'

or, with exactly the versions that were tested and everything that developers need, ``make
install``. ``arviz`` brings the check of a fit (k-hat), ``cli`` the command ``rvrs``, figures and
scikit-learn's data sets. Further extras are ``flows`` (flowjax), ``pymc`` and ``experiments``.

To see it work before you write anything: ``.venv/bin/rvrs demo`` (or ``make demo``, which installs
as well) fits a logistic regression by six methods and puts them into one table.

A first fit
-----------

Eight schools tried a coaching program. For each we have the measured effect ``y`` and its standard
error ``sigma``. The model is a NumPyro model like any other:
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import rvrs


def model(sigma, y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.LogNormal(1.5, 1.0))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
    theta = numpyro.deterministic("theta", mu + tau * z)
    numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])

fit = rvrs.fit(jax.random.key(0), model, sigma, y, progress=False)
print(fit.summary())

# %%
# Most of the seconds are compilation. (Without ``progress=False`` there is a bar, first of a short
# warm-up and then of the training.) The proposal was not named, so it is a normal with a full
# covariance, ``"mvn"``; beyond a hundred dimensions it would be another (see ``proposal`` in
# :func:`rvrs.fit`).
#
# How to read the summary
# -----------------------
#
# **ELBO** and **log evidence.** The ELBO is a lower bound of the log evidence :math:`\log p(x)`,
# and the distance between them is the divergence of the fit from the posterior: less than 0.1 nats
# is close. Both are estimates, with their standard errors.
#
# **acceptance** is how many proposals are accepted, and the proposals per draw are what you pay. It
# is what you asked for by ``target_acceptance`` (0.1, if you do not say); the threshold T is
# adapted to it.
#
# **k-hat** says how heavy a tail the weights of the draws against the posterior have. Up to 0.5 is
# good, up to 0.7 fair; above, the posterior has mass or tails that the fit misses. (The half-Cauchy
# prior that is often used for ``tau`` has such tails. Try it, and see :doc:`failing`.)
#
# **ESS** is how many draws would be left if they were weighted to follow the posterior exactly.
# Close to all of them: there is nothing to correct.
#
# Below are the latent variables, one line for every number. At the end come the warnings, if there
# are any, in words. They are in ``fit.warnings`` too, and :doc:`failing` says what to do about
# each.

print(fit.warnings)

# %%
# Use it
# ------
#
# Draws are independent of each other, so there is nothing to thin and no chain to check.
# Deterministic sites come along:

draws = fit.sample(jax.random.key(1), 4000)
print({name: value.shape for name, value in draws.items()})
print("P(theta of the first school > 10) =", jnp.mean(draws["theta"][:, 0] > 10))

# %%
# How training went, and what rejection changed, is one figure:

figure = fit.plot()

# %%
# ``fit.save("fit.npz")`` stores the fit in a file without pickle, and ``rvrs.load("fit.npz", model,
# sigma, y)`` brings it back. ``fit.to_arviz()`` gives ArviZ's ``InferenceData``.
#
# If the fit is not close enough
# ------------------------------
#
# Turn the knob. Half the acceptance costs twice the proposals per draw, and closes part of what is
# left, as long as there is something left: of the three below, the last two are as close to the log
# evidence as its error lets us see. (The second one is quick, since it has been compiled above.)

for target_acceptance in (0.5, 0.1, 0.02):
    fit = rvrs.fit(
        jax.random.key(0), model, sigma, y, target_acceptance=target_acceptance, progress=False
    )
    print(
        f"Z = {target_acceptance:<5} ELBO {fit.elbo:.4f}   below the log evidence by "
        f"{fit.log_evidence - fit.elbo:.4f}   k-hat {fit.khat:.2f}   {fit.seconds:.1f} s"
    )

# %%
# If something is wrong
# ---------------------
#
# A wrong argument is refused before any long work, in words:

try:
    rvrs.fit(jax.random.key(0), model, sigma, y, target_acceptance=10)
except ValueError as error:
    print(error)

# %%
# What cannot be known to be wrong: in a model with ``y=None`` as a default, data that were
# forgotten are a latent variable like any other. The table of the summary shows it, so have a look
# at its names.
#
# Where to go next
# ----------------
#
# - :doc:`pictures` shows what happens inside, :doc:`/mathematics` derives it.
# - :doc:`choosing` measures what the knob costs and what it buys.
# - :doc:`/examples/index` have a task each, from a logistic regression beside ADVI and NUTS to
#   flows and minibatches.
# - :doc:`/neighbours` is for those who have a model in PyMC or a log density in JAX already.
