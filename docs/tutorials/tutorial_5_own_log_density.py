r"""
Bring your own log density
==========================

Not every model is written in NumPyro. A differential equation in a loop, a simulator that somebody
else has written, an energy from physics: if JAX can compute a log density, :mod:`rvrs.vi` can draw
from an approximation of it. The interface is that of BlackJAX's variational algorithms: ``init``,
``step``, ``sample``.

In January 1978 influenza broke out in an English boarding school with 763 boys. How fast did it
spread? Three unknowns are few enough to put on a grid, so that everything on this page can be
compared with the exact answer.
"""

# %%
# A model without a modelling language
# ------------------------------------
#
# How many boys were in bed, on fourteen days, and the SIR equations of an epidemic: who is
# susceptible becomes infected at a rate :math:`\beta I / N`, and recovers at a rate
# :math:`\gamma`. They are solved by plain JAX, with five Runge-Kutta steps a day.

import blackjax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.scipy import stats
from jax.scipy.special import gammaln

import rvrs

NUM_BOYS = 763
STEPS_PER_DAY = 5
in_bed = jnp.array([3, 8, 26, 76, 225, 298, 258, 233, 189, 128, 68, 29, 14, 4])


def infected(beta, gamma):
    """Infected boys at the end of every day; one was ill at the beginning."""
    length = 1 / STEPS_PER_DAY

    def slope(state):
        susceptible, ill = state
        new = beta * susceptible * ill / NUM_BOYS
        return jnp.array([-new, new - gamma * ill])

    def step(state, _):
        k1 = slope(state)
        k2 = slope(state + length / 2 * k1)
        k3 = slope(state + length / 2 * k2)
        k4 = slope(state + length * k3)
        state = state + length / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state, state[1]

    start = jnp.array([NUM_BOYS - 1.0, 1.0])
    _, ill = jax.lax.scan(step, start, length=len(in_bed) * STEPS_PER_DAY)
    return ill[STEPS_PER_DAY - 1 :: STEPS_PER_DAY]


# %%
# The log density is a function of a *position*, which may be any pytree of arrays, here a
# dictionary. Positions have to be unconstrained: proposals are normal. The rates are positive, so
# the position holds their logarithms. The priors are of the rates themselves, and that asks for the
# log-Jacobian of the exponential, which is the position itself.
#
# Leave it out and you fit another model, without an error from anybody. (In NumPyro and PyMC models
# it is taken care of.)


def constrained(position):
    return {name.removeprefix("log_"): jnp.exp(value) for name, value in position.items()}


def log_density(position):
    rates = constrained(position)
    beta, gamma, spread = rates["beta"], rates["gamma"], rates["spread"]
    log_prior = (
        stats.norm.logpdf(beta, 2.0, 1.0)
        + stats.norm.logpdf(gamma, 0.4, 0.5)
        + stats.expon.logpdf(spread, scale=0.2)
    )
    log_jacobian = sum(position.values())
    # Negative binomial counts, of variance mean + spread * mean^2.
    mean, size = infected(beta, gamma), 1 / spread
    log_likelihood = jnp.sum(
        gammaln(in_bed + size)
        - gammaln(size)
        - gammaln(in_bed + 1.0)
        + in_bed * jnp.log(mean)
        + size * jnp.log(size)
        - (in_bed + size) * jnp.log(mean + size)
    )
    return log_prior + log_jacobian + log_likelihood


start = {"log_beta": jnp.log(2.0), "log_gamma": jnp.log(0.4), "log_spread": jnp.log(0.2)}
print(f"log density at the start: {log_density(start):.2f}")

# %%
# Before you go on, two things are worth a look. Is the gradient finite? And what happens far away?
# Here an absurd rate makes the solver explode.

absurd = start | {"log_beta": jnp.log(1e4)}
print("gradient:", {name: f"{value:.1f}" for name, value in jax.grad(log_density)(start).items()})
print("density of an absurd rate:", log_density(absurd))

# %%
# That is no problem. A proposal whose density is not finite is a rejected proposal.
#
# The exact answer
# ----------------
#
# On a grid of 64 by 64 by 64 positions. (The density need not be normalised. This one is, so its
# integral is the evidence :math:`p(x)`.)

axes = {
    "log_beta": jnp.linspace(0.25, 0.95, 64),
    "log_gamma": jnp.linspace(-1.1, -0.3, 64),
    "log_spread": jnp.linspace(-4.2, 0.8, 64),
}
grid = dict(zip(axes, map(jnp.ravel, jnp.meshgrid(*axes.values(), indexing="ij")), strict=True))
log_grid = jax.lax.map(log_density, grid, batch_size=4096)
cell = np.prod([axis[1] - axis[0] for axis in axes.values()])
exact_log_evidence = float(jax.nn.logsumexp(log_grid) + np.log(cell))
exact_weights = np.asarray(jax.nn.softmax(log_grid), np.float64)
exact_weights /= exact_weights.sum()


def quantities(position):
    """What we want to know: days until half have recovered, and the reproduction number."""
    rates = constrained(position)
    return {
        "recovery time (days)": np.log(2) / rates["gamma"],
        "reproduction number": rates["beta"] / rates["gamma"],
        "spread": rates["spread"],
    }


exact = {}
for name, values in quantities(grid).items():
    mean = np.sum(exact_weights * values)
    exact[name] = mean, np.sqrt(np.sum(exact_weights * (values - mean) ** 2))
print(f"exact log evidence {exact_log_evidence:.3f}")
for name, (mean, sd) in exact.items():
    print(f"{name:22}{mean:8.3f} ± {sd:.3f}")

# %%
# Three algorithms, one loop
# --------------------------
#
# Two of BlackJAX, and ours. Each is a triple of functions, and one loop serves them all.

NUM_STEPS = 5000
optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, NUM_STEPS))
algorithms = {
    "meanfield_vi": blackjax.meanfield_vi(log_density, optimizer, num_samples=5),
    "fullrank_vi": blackjax.fullrank_vi(log_density, optimizer, num_samples=5),
    "RVRS": rvrs.vi.as_top_level_api(log_density, optimizer, proposal="mvn", target_acceptance=0.1),
}
first = {name: algorithm.init(start) for name, algorithm in algorithms.items()}

# BlackJAX takes no more than the shape from the position; we put its normals where ours is. The
# full-rank one begins with a standard deviation of 1 in every direction. That is wide enough for
# the solver to explode, and a single NaN would stay in its parameters for ever.
first["meanfield_vi"] = first["meanfield_vi"]._replace(mu=start)
log_diagonal = jnp.array([-2.0, -2.0, -2.0, 0.0, 0.0, 0.0])
first["fullrank_vi"] = first["fullrank_vi"]._replace(mu=start, chol_params=log_diagonal)


def train(name, rng_key):
    """One compiled scan, with whatever the algorithm tells of itself after every step."""
    algorithm = algorithms[name]

    def step(state, key):
        return algorithm.step(key, state)

    keys = jax.random.split(rng_key, NUM_STEPS)
    return jax.jit(lambda: jax.lax.scan(step, first[name], keys))()


states, infos, draws = {}, {}, {}
for name, algorithm in algorithms.items():
    states[name], infos[name] = train(name, jax.random.key(0))
    positions = algorithm.sample(jax.random.key(1), states[name], 20_000)
    draws[name] = quantities(positions)

print({name: value.shape for name, value in positions.items()})

# %%
# ``step`` is pure, so the loop was ours. If you do not want to write one, :func:`rvrs.vi.run` takes
# the steps in compiled chunks, with a callback after each.
#
# What a step says
# ----------------
#
# ``info`` has an estimate of the ELBO, the acceptance, the threshold :math:`T` and the number of
# proposals of every step. Is the training over? Is the acceptance where it should be?

info = infos["RVRS"]


def averaged(values, width=100):
    return np.convolve(values, np.ones(width) / width, "valid")


figure, panels = plt.subplots(1, 2, figsize=(9.0, 3.2), layout="constrained")
panels[0].plot(averaged(info.elbo), color="#1f4fbf")
panels[0].axhline(exact_log_evidence, color="black", linestyle="dotted", label="log evidence")
panels[0].set_ylim(exact_log_evidence - 1.5, exact_log_evidence + 0.5)
panels[0].set_ylabel("ELBO (nats)")
panels[1].plot(averaged(info.acceptance), color="#1f4fbf")
panels[1].axhline(0.1, color="black", linestyle="dotted", label="target")
panels[1].set_ylim(0, 0.2)
panels[1].set_ylabel("acceptance of proposals")
for panel in panels:
    panel.set_xlabel("step (averages over the next 100)")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)

print(f"proposals per step: {info.num_proposals.mean():.1f}")
print(f"steps that hit max_proposals: {info.capped.sum()}, steps skipped: {info.skipped.sum()}")

# %%
# How good is it?
# ---------------
#
# Without a grid, this is what you would look at: ``evaluate`` makes fresh proposals and estimates
# the ELBO and the log evidence, with standard errors. Their distance is the divergence from the
# target.

quality = algorithms["RVRS"].evaluate(jax.random.key(2), states["RVRS"])
print(f"ELBO          {quality.elbo:.4f} ± {quality.elbo_error:.4f}")
print(f"log evidence  {quality.log_evidence:.4f} ± {quality.log_evidence_error:.4f}")
print(f"by the grid   {exact_log_evidence:.4f}")

# %%
# The grid tells whether the means and standard deviations are right, of all three:

print(f"{'':22}{'exact':>16}" + "".join(f"{name:>16}" for name in draws))
for name, (mean, sd) in exact.items():
    found = [(each[name].mean(), each[name].std()) for each in draws.values()]
    columns = [f"{m:.3f} ± {s:.3f}" for m, s in [(mean, sd), *found]]
    print(f"{name:22}" + "".join(f"{column:>16}" for column in columns))

# %%
# The normals are about a tenth too narrow: peaks a little too high, tails a little too thin. It
# does not look like much. Rejection puts it right:

# Draws from the grid, and from within the cells around its points.
rng = np.random.default_rng(0)
places = rng.choice(exact_weights.size, 200_000, p=exact_weights)
draws_grid = {
    name: np.asarray(grid[name])[places] + (axis[1] - axis[0]) * rng.uniform(-0.5, 0.5, len(places))
    for name, axis in axes.items()
}

figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.0), layout="constrained")
colours = {"meanfield_vi": "#d6453d", "fullrank_vi": "#f5842f", "RVRS": "#1f4fbf"}
for panel, (name, (mean, sd)) in zip(panels, exact.items(), strict=True):
    edges = np.linspace(max(0, mean - 3.5 * sd), mean + 4.5 * sd, 46)
    panel.hist(quantities(draws_grid)[name], edges, density=True, color="#c9c9c9", label="exact")
    for method, colour in colours.items():
        found = np.asarray(draws[method][name])
        panel.hist(found, edges, density=True, histtype="step", color=colour, label=method)
    panel.set_xlabel(name)
    panel.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("density")
panels[-1].legend(frameon=False, fontsize="small")

# %%
# And this is the epidemic, with what the posterior knows of its course:

curves = jax.vmap(lambda rates: infected(rates["beta"], rates["gamma"]))(constrained(positions))
low, high = np.quantile(curves, [0.05, 0.95], axis=0)
days = np.arange(1, len(in_bed) + 1)
figure, panel = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
panel.fill_between(days, low, high, color="#1f4fbf", alpha=0.25, label="90 % of expected numbers")
panel.plot(days, np.median(curves, axis=0), color="#1f4fbf", label="median")
panel.plot(days, in_bed, "ko", label="boys in bed")
panel.set(xlabel="day", ylabel="boys")
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)

# %%
# After the peak more boys are in bed than the equations expect: who is no longer infectious may
# still be in bed. No inference can repair that, but with a posterior that can be relied on we know
# that it is the model, and not the inference, which needs repair.
#
# Where to go from here
# ---------------------
#
# - ``target_acceptance`` is the knob (:doc:`/guide/choosing`), ``proposal`` the family: also a flow
#   (:doc:`tutorial_6_flow_proposal`).
# - ``step`` can be vmapped over keys and states, for several starts at once.
# - :func:`rvrs.diagnostics.smooth` gives k-hat of any log weights that you compute yourself.
# - A start, step sizes, a stopping point and warnings in words are what :func:`rvrs.fit` adds, for
#   models in NumPyro. A log density becomes one with ``numpyro.factor``.
#
# What was claimed, checked:

assert abs(quality.log_evidence - exact_log_evidence) < 4 * quality.log_evidence_error + 0.005
assert 0 <= exact_log_evidence - quality.elbo + 4 * quality.elbo_error < 0.05
for name, (mean, sd) in exact.items():
    assert abs(draws["RVRS"][name].mean() - mean) < 0.05 * sd
    assert abs(draws["RVRS"][name].std() / sd - 1) < 0.05
