r"""
A latent variable for every data point
======================================

Hospitals differ. So we give each of them a death rate of its own, and let all rates come from one
distribution whose mean and spread we want to know. There are as many latent variables as hospitals,
and two *global* ones above them.

Two things go wrong here with ordinary variational inference. It makes the local variables
independent of the global ones, and therefore takes the spread for better known than it is. And a
fit of all variables at once does not scale. :class:`rvrs.AutoSemiRVRS` answers both: every hospital
has its own rejection step, which looks at the global variables of the moment, and training visits
only a minibatch of hospitals at a time.

The model is small enough that we can compute the exact answer next to it.
"""

# %%
# Simulated hospitals
# -------------------
#
# Three hundred hospitals, some with only three patients, some with about forty. The seed is fixed.

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy.special import logsumexp
from scipy.stats import binom, halfnorm, norm

import rvrs

generator = np.random.default_rng(1)
num_hospitals = 300
patients = generator.integers(3, 40, num_hospitals)
true_logits = generator.normal(-2.2, 0.6, num_hospitals)
deaths = generator.binomial(patients, 1 / (1 + np.exp(-true_logits)))
print(f"{patients.sum()} patients, {deaths.sum()} deaths")
print(f"{np.sum(deaths == 0)} of {num_hospitals} hospitals had no death at all")

# %%
# The model in two parts
# ----------------------
#
# ``global_model`` draws what all hospitals share and returns everything that the rest needs.
# ``local_model`` takes that and has the plate. The model is one after the other. It takes its rows
# as arguments, so it works for a batch as well as for all hospitals.


def global_model(deaths, patients):
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    spread = numpyro.sample("spread", dist.HalfNormal(2.0))
    return mean, spread, deaths, patients


def local_model(shared):
    mean, spread, deaths, patients = shared
    with numpyro.plate("hospitals", len(deaths)):
        logit = numpyro.sample("logit", dist.Normal(mean, spread))
        numpyro.sample("deaths", dist.Binomial(patients, logits=logit), obs=deaths)


def model(deaths, patients):
    local_model(global_model(deaths, patients))


# %%
# The exact answer
# ----------------
#
# Given mean and spread the hospitals are independent, and each has one unknown number. That can be
# integrated by quadrature. Then mean and spread are two numbers, which we put on a grid. This gives
# the exact posterior, and the exact log evidence :math:`\log p(x)`. It works for few latent
# variables per data point only, but where it works it is the best check there is.

nodes, node_weights = np.polynomial.hermite_e.hermegauss(31)
log_node_weights = np.log(node_weights / node_weights.sum())
grid_means, grid_spreads = np.meshgrid(
    np.linspace(-2.6, -1.8, 41), np.linspace(0.05, 1.25, 49), indexing="ij"
)
cell = (grid_means[1, 0] - grid_means[0, 0]) * (grid_spreads[0, 1] - grid_spreads[0, 0])
grid_logits = grid_means[..., None] + grid_spreads[..., None] * nodes


def log_terms(deaths, patients):
    """Log of prior times likelihood of one hospital's logit, at all nodes of all grid points."""
    rates = 1 / (1 + np.exp(-grid_logits))
    return log_node_weights + binom.logpmf(deaths, patients, rates)


log_joint = norm.logpdf(grid_means, 0, 3) + halfnorm.logpdf(grid_spreads, scale=2)
for row in zip(deaths, patients, strict=True):
    log_joint += logsumexp(log_terms(*row), axis=-1)
exact_log_evidence = logsumexp(log_joint) + np.log(cell)
exact = np.exp(log_joint - logsumexp(log_joint))
exact_moments = {}
for name, values in {"mean": grid_means, "spread": grid_spreads}.items():
    average = np.sum(exact * values)
    exact_moments[name] = average, np.sqrt(np.sum(exact * (values - average) ** 2))


def exact_logit(deaths, patients):
    """Exact mean and standard deviation of one hospital's logit, whatever mean and spread are."""
    log_weights = log_terms(deaths, patients)
    log_weights -= logsumexp(log_weights, axis=-1, keepdims=True)
    weights = exact[..., None] * np.exp(log_weights)
    average = np.sum(weights * grid_logits)
    return average, np.sqrt(np.sum(weights * (grid_logits - average) ** 2))


# %%
# Ordinary variational inference
# ------------------------------
#
# For comparison: independent normals for all variables, all hospitals in every step.

guide = AutoNormal(model)
optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, 5000))
svi = SVI(model, guide, optimizer, Trace_ELBO())
result = svi.run(jax.random.key(0), 5000, deaths, patients, progress_bar=False)
draws_advi = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(4000,))

# %%
# Two guides
# ----------
#
# RVRS needs a guide for the global variables and one for the local ones.
#
# The global guide is an autoguide of ``global_model``. It is ordinary variational inference, so
# let it be a good one: a normal with full covariance.
#
# The local guide only *proposes* logits. Without ``local_guide`` every hospital would have a normal
# with two parameters of its own. Here we write an encoder instead: a formula that computes the
# normal from the data of the hospital. It has eight numbers to learn, however many hospitals there
# are, and it can propose for a hospital that it has never seen. It does not have to be good, as
# rejection comes after it.


def local_guide(shared):
    _, _, deaths, patients = shared
    observed = jnp.log((deaths + 0.5) / (patients - deaths + 0.5))
    size = jnp.log(patients)
    features = jnp.stack([jnp.ones_like(observed), observed, size, observed * size], axis=-1)
    loc_weights = numpyro.param("loc_weights", jnp.zeros(4))
    scale_weights = numpyro.param("scale_weights", jnp.zeros(4))
    with numpyro.plate("hospitals", len(deaths)):
        proposal = dist.Normal(features @ loc_weights, jnp.exp(features @ scale_weights))
        numpyro.sample("logit", proposal)


guide = rvrs.AutoSemiRVRS(
    model,
    local_model,
    global_guide=AutoMultivariateNormal(global_model),
    local_guide=local_guide,
    target_acceptance=0.1,
)

# %%
# Minibatches
# -----------
#
# Pass all of the data and say how many rows a step may look at. Batches are drawn without
# replacement, so every hospital is seen once in an epoch. With three hundred hospitals we could do
# without; with a million the call would be the same.

fit = rvrs.fit(
    jax.random.key(2),
    model,
    deaths,
    patients,
    guide=guide,
    batch_size=100,
    num_steps=3000,
    progress=False,
)
print(fit.summary())

# %%
# The **marginal ELBO** is what the ELBO would be if the local posteriors were exact. So the summary
# splits what is missing from the log evidence into two parts. From ELBO to marginal ELBO is what
# more rejection of local proposals could gain. From marginal ELBO to log evidence is up to the
# global guide. As we know the log evidence here, we can print both.

print(f"exact log evidence               {exact_log_evidence:.2f}")
print(f"missing, by the local proposals  {fit.marginal_elbo - fit.elbo:.2f}")
print(f"missing, by the global guide     {exact_log_evidence - fit.marginal_elbo:.2f}")
print(f"Monte Carlo error                {fit.elbo_error:.2f}")

# %%
# Mean and spread
# ---------------
#
# Now draw from the fit. A draw of all three hundred logits is possible, but nobody needs to pay for
# it: ``indices`` names the hospitals that we want. Here they are the twelve smallest and the twelve
# largest.

order = np.argsort(patients, kind="stable")
chosen = np.concatenate([order[:12], order[-12:]])
draws = fit.sample(jax.random.key(3), 4000, indices=chosen)
print({name: value.shape for name, value in draws.items()})

print(f"\n{'':8}{'exact':>18}{'ADVI':>18}{'RVRS':>18}")
for name, (average, deviation) in exact_moments.items():
    found = [(each[name].mean(), each[name].std()) for each in (draws_advi, draws)]
    columns = [f"{mean:.3f} ± {sd:.3f}" for mean, sd in [(average, deviation), *found]]
    print(f"{name:8}" + "".join(f"{column:>18}" for column in columns))

# %%
# ADVI finds the right place, but its uncertainty about the spread is far too small. It has to
# choose one width for each logit before it knows the spread, and this ties the spread down. RVRS
# proposes logits without knowing the spread as well, but then accepts them with knowledge of it.

figure, panels = plt.subplots(1, 2, figsize=(7.0, 3.2), layout="constrained")
for panel, name, axis in zip(panels, exact_moments, (1, 0), strict=True):
    values = (grid_means[:, 0], grid_spreads[0])[1 - axis]
    density = exact.sum(axis=axis) / (values[1] - values[0])
    panel.fill_between(values, density, color="#c9c9c9", label="exact")
    for method, found, colour in (("ADVI", draws_advi, "#d6453d"), ("RVRS", draws, "#1f4fbf")):
        panel.hist(
            np.asarray(found[name]), 40, density=True, histtype="step", color=colour, label=method
        )
    average, deviation = exact_moments[name]
    panel.set_xlim(average - 4 * deviation, average + 4 * deviation)
    panel.set(xlabel=f"{name} of the logits", ylabel="density")
panels[0].legend(fontsize="small")
figure.suptitle("The two global variables")
plt.show()

# %%
# The hospitals
# -------------
#
# Means and 90 % intervals of the chosen hospitals. Small hospitals are drawn to the mean of all,
# large ones have a say of their own.

exact_chosen = np.array([exact_logit(deaths[n], patients[n]) for n in chosen])
places = np.arange(len(chosen))
low, high = np.quantile(draws["logit"], [0.05, 0.95], axis=0)
figure, panel = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
panel.vlines(places, low, high, color="#1f4fbf", linewidth=2.5, label="RVRS, 90 % interval")
panel.plot(places, draws["logit"].mean(axis=0), "o", color="#1f4fbf", label="RVRS, mean")
panel.plot(places, exact_chosen[:, 0], "_", color="black", markersize=12, label="exact mean")
panel.axhline(exact_moments["mean"][0], color="#c9c9c9", zorder=0, label="mean of all hospitals")
panel.set_xticks(places, [f"{deaths[n]}/{patients[n]}" for n in chosen], rotation=90)
panel.set(xlabel="deaths / patients", ylabel="logit of the death rate", title="Chosen hospitals")
figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
plt.show()

# %%
# As ratios to the exact standard deviations:

logits_advi = draws_advi["logit"][:, chosen]
ratios = draws["logit"].std(axis=0) / exact_chosen[:, 1]
ratios_advi = logits_advi.std(axis=0) / exact_chosen[:, 1]
print(f"sd of the logits over the exact one, RVRS: {ratios.min():.2f} to {ratios.max():.2f}")
print(
    f"sd of the logits over the exact one, ADVI: {ratios_advi.min():.2f} to {ratios_advi.max():.2f}"
)

# %%
# For the single hospital ADVI does nearly as well: a logit's uncertainty comes mostly from its own
# few patients. If hospitals were all that you wanted, ADVI would do. It is the spread, and all that
# is concluded from it, which needs the dependence between local and global variables.
#
# A new hospital
# --------------
#
# The encoder can propose for any hospital. With these parameters and new data the guide draws from
# the new hospital's posterior, at the mean and spread that the others have taught.

new_deaths, new_patients = np.array([6]), np.array([12])
new_draws = guide.sample_posterior(
    jax.random.key(4), fit.params, new_deaths, new_patients, sample_shape=(4000,)
)
new_logit = np.asarray(new_draws["logit"][:, 0])
print(f"observed share of deaths    {new_deaths[0] / new_patients[0]:.2f}")
print(f"posterior mean of the rate  {np.mean(1 / (1 + np.exp(-new_logit))):.2f}")
new_exact = exact_logit(new_deaths[0], new_patients[0])
print(f"logit    {new_logit.mean():.2f} ± {new_logit.std():.2f}")
print(f"by quadrature  {new_exact[0]:.2f} ± {new_exact[1]:.2f}")

# %%
# (The quadrature does not count the new hospital among those that mean and spread are learned
# from, and neither does the guide.)
#
# The fit agrees with the exact posterior within these limits:

average, deviation = exact_moments["spread"]
assert abs(draws["spread"].mean() - average) < 0.4 * deviation
assert 0.85 < draws["spread"].std() / deviation < 1.15
assert draws_advi["spread"].std() / deviation < 0.7, "ADVI is not too narrow here"
assert np.all(np.abs(ratios - 1) < 0.15)
assert abs(new_logit.mean() - new_exact[0]) < 0.2 * new_exact[1]
