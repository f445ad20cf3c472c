"""Small models with one global and a few local latents, whose ELBO is known by quadrature.

Every hierarchy is written twice: as a NumPyro program, and as log densities over unconstrained
values for a grid.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import betaln, gammaln, logsumexp
from numpyro.distributions import constraints

import rvrs

NUM_POINTS = 3
X = np.array([0.4, -1.3, 2.2])
COUNTS = np.array([2.0, 7.0, 5.0])
TRIALS = 8.0
THETA = 0.3


class Hierarchy(NamedTuple):
    global_model: Callable
    local_model: Callable
    local_guide: Callable | None
    log_local: Callable[[Any, Any, Any, Any], jax.Array]
    """``(n, theta, g, u)``: log density of a data point and its unconstrained latent."""
    log_proposal: Callable[[Any, Any, Any], jax.Array]
    """``(parameters, g, u)``: log density of the proposal over unconstrained values."""
    start: dict[str, np.ndarray]
    """Parameters of the local guide, one row per data point (or shared, if one row)."""

    def model(self, size: int | None = None) -> None:
        self.local_model(self.global_model(), size)

    def guide(self, size: int | None = None, **settings: Any) -> rvrs.AutoSemiRVRS:
        local = lambda g: self.local_model(g, size)  # noqa: E731
        guide = None if self.local_guide is None else (lambda g: self.local_guide(g, size))
        model = lambda: local(self.global_model())  # noqa: E731
        return rvrs.AutoSemiRVRS(model, local, global_guide(self.global_model), guide, **settings)

    def parameters(self) -> dict[str, Any]:
        start = {"g_loc": np.array(0.2), "g_scale": np.array(0.6), "theta": np.array(THETA)}
        return {name: jnp.asarray(value, float) for name, value in (start | self.start).items()}


def global_guide(global_model: Callable) -> Callable:
    def guide() -> None:
        loc = numpyro.param("g_loc", 0.0)
        scale = numpyro.param("g_scale", 1.0, constraint=constraints.positive)
        numpyro.sample("g", dist.Normal(loc, scale))

    guide.model = global_model  # ty: ignore
    return guide


def normal_global() -> tuple[Any, Any]:
    theta = numpyro.param("theta", jnp.asarray(THETA))
    return numpyro.sample("g", dist.Normal(0.0, 1.0)), theta


def plate(size: int | None) -> Any:
    return numpyro.plate("data", NUM_POINTS, subsample_size=size)


def scale_mixture(outputs, size):
    g, theta = outputs
    with plate(size) as index:
        tau = numpyro.sample("tau", dist.Gamma(1.5, jnp.exp(theta)))
        numpyro.sample("x", dist.Normal(g, tau**-0.5), obs=jnp.asarray(X)[index])


def log_scale_mixture(n, theta, g, u):
    tau = jnp.exp(u)
    prior = 1.5 * theta - gammaln(1.5) + 0.5 * u - jnp.exp(theta) * tau
    likelihood = 0.5 * (u - jnp.log(2 * jnp.pi)) - 0.5 * tau * (jnp.asarray(X)[n] - g) ** 2
    return prior + likelihood + u


def normal_normal(outputs, size):
    g, theta = outputs
    with plate(size):
        x = numpyro.subsample(jnp.asarray(X), event_dim=0)
        z = numpyro.sample("z", dist.Normal(g, 0.8))
        numpyro.sample("x", dist.Normal(z, jnp.exp(theta)), obs=x)


def log_normal_normal(n, theta, g, u):
    x = jnp.asarray(X)[n]
    return log_normal(u, g, 0.8) + log_normal(x, u, jnp.exp(theta))


def log_normal(x, loc, scale):
    return -0.5 * ((x - loc) / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi)


def beta_binomial(outputs, size):
    g, theta = outputs
    with plate(size) as index:
        p = numpyro.sample("p", dist.Beta(jnp.exp(g), jnp.exp(theta)))
        numpyro.sample("x", dist.Binomial(int(TRIALS), p), obs=jnp.asarray(COUNTS)[index])


def log_beta_binomial(n, theta, g, u):
    a, b, x = jnp.exp(g), jnp.exp(theta), jnp.asarray(COUNTS)[n]
    log_p, log_1_p = jax.nn.log_sigmoid(u), jax.nn.log_sigmoid(-u)
    binomial = gammaln(TRIALS + 1) - gammaln(x + 1) - gammaln(TRIALS - x + 1)
    prior = (a - 1) * log_p + (b - 1) * log_1_p - betaln(a, b)
    return prior + binomial + x * log_p + (TRIALS - x) * log_1_p + log_p + log_1_p


def log_own_normal(parameters, g, u):
    return log_normal(u, *parameters)


def gamma_guide(outputs, size):
    with plate(size):
        alpha = numpyro.param("alpha", jnp.ones(NUM_POINTS), event_dim=0)
        beta = numpyro.param("beta", jnp.ones(NUM_POINTS), event_dim=0)
        numpyro.sample("tau", dist.Gamma(alpha, beta))


def log_gamma(parameters, g, u):
    alpha, beta = parameters
    return alpha * jnp.log(beta) - gammaln(alpha) + alpha * u - beta * jnp.exp(u)


def beta_guide(outputs, size):
    with plate(size) as index:
        alpha = numpyro.param("alpha", jnp.ones(NUM_POINTS))[index]
        beta = numpyro.param("beta", jnp.ones(NUM_POINTS))[index]
        numpyro.sample("p", dist.Beta(alpha, beta))


def log_beta(parameters, g, u):
    alpha, beta = parameters
    return alpha * jax.nn.log_sigmoid(u) + beta * jax.nn.log_sigmoid(-u) - betaln(alpha, beta)


def follower_guide(outputs, size):
    # The proposal follows the global draw; its weights are shared by all points.
    g, _ = outputs
    slope, scale = numpyro.param("slope", jnp.zeros(1)), numpyro.param("scale", jnp.ones(1))
    with plate(size):
        numpyro.sample("z", dist.Normal(slope[0] * g, scale[0]))


def log_follower(parameters, g, u):
    slope, scale = parameters
    return log_normal(u, slope * g, scale)


HIERARCHIES = {
    "scale mixture": Hierarchy(
        normal_global,
        scale_mixture,
        None,
        log_scale_mixture,
        log_own_normal,
        {
            "auto_tau_loc": np.array([0.1, -0.3, -0.4]),
            "auto_tau_scale": np.array([0.7, 0.9, 0.8]),
        },
    ),
    "scale mixture, Gamma": Hierarchy(
        normal_global,
        scale_mixture,
        gamma_guide,
        log_scale_mixture,
        log_gamma,
        {"alpha": np.array([1.4, 2.2, 1.8]), "beta": np.array([1.1, 2.4, 3.0])},
    ),
    "normal": Hierarchy(
        normal_global,
        normal_normal,
        None,
        log_normal_normal,
        log_own_normal,
        {"auto_z_loc": np.array([0.3, -0.5, 1.0]), "auto_z_scale": np.array([0.9, 0.6, 0.8])},
    ),
    "beta-binomial": Hierarchy(
        normal_global,
        beta_binomial,
        beta_guide,
        log_beta_binomial,
        log_beta,
        {"alpha": np.array([2.5, 6.0, 5.0]), "beta": np.array([5.0, 2.5, 4.0])},
    ),
    "proposal follows": Hierarchy(
        normal_global,
        normal_normal,
        follower_guide,
        log_normal_normal,
        log_follower,
        {"slope": np.array([0.7]), "scale": np.array([1.1])},
    ),
}


def exact_elbo(case: Hierarchy, parameters: dict[str, Any], t: Any, epsilon: float) -> jax.Array:
    """The ELBO of all points by quadrature; run it in float64."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    g = parameters["g_loc"] + parameters["g_scale"] * jnp.asarray(nodes)
    outside = log_normal(g, 0.0, 1.0) - log_normal(g, parameters["g_loc"], parameters["g_scale"])
    inside = jax.vmap(lambda g: local_elbos(case, parameters, g, t, epsilon).sum())(g)
    return jnp.asarray(weights) @ (outside + inside)


def local_elbos(
    case: Hierarchy, parameters: dict[str, Any], g: Any, t: Any, epsilon: float
) -> jax.Array:
    """``E_r[A] + log Z`` of every point at one value of the global latent."""
    u = jnp.linspace(-12.0, 12.0, 2001)
    step = u[1] - u[0]
    t = jnp.broadcast_to(t, (NUM_POINTS,))

    def one(n: Any) -> jax.Array:
        own = [jnp.broadcast_to(parameters[name], (NUM_POINTS,))[n] for name in case.start]
        log_q = case.log_proposal(own, g, u)
        lw = case.log_local(n, parameters["theta"], g, u) - log_q
        log_a = jnp.log(epsilon + (1 - epsilon) * jax.nn.sigmoid(lw + t[n]))
        log_z = logsumexp(log_q + log_a) + jnp.log(step)
        r = jnp.exp(log_q + log_a - log_z) * step
        return jnp.sum(r * (lw - log_a)) + log_z

    return jax.vmap(one)(jnp.arange(NUM_POINTS))
