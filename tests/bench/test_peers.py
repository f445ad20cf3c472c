"""Peers on a conjugate model, whose evidence and best mean-field ELBO are known."""

import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from rvrs.bench import peers
from rvrs.bench.works import Work

X = np.array([[1.0, 0.8], [0.5, 1.1], [-0.3, 0.4], [1.2, 1.0]])
Y = np.array([1.0, 0.3, -0.4, 1.4])
NOISE = 0.5


def regression(x, y):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ z, NOISE).to_event(1), obs=y)


def log_density(z):
    log_prior = dist.Normal(0.0, 1.0).log_prob(z).sum()
    return log_prior + dist.Normal(jnp.asarray(X) @ z, NOISE).log_prob(jnp.asarray(Y)).sum()


WORK = Work("conjugate", regression, (jnp.asarray(X), jnp.asarray(Y)), log_density, 2)


def exact():
    """Log evidence, and the ELBO of the best independent normals."""
    covariance = X @ X.T + NOISE**2 * np.eye(len(Y))
    log_evidence = -0.5 * Y @ np.linalg.solve(covariance, Y)
    log_evidence -= 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    precision = X.T @ X / NOISE**2 + np.eye(2)
    divergence = 0.5 * (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1])
    return log_evidence, log_evidence - divergence


def trained(name, num_steps=2000, learning_rate=3e-2):
    peer = peers.trainer(name, WORK)
    state = peer.start(jax.random.key(0), learning_rate=learning_rate, horizon=num_steps)
    state = peer.advance(state, num_steps // 2)
    state = peer.advance(state, num_steps - num_steps // 2)
    assert peer._advance._cache_size() == 1
    return peer.bound(jax.random.key(1), peer.parameters(state))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AutoMultivariateNormal", "fullrank_vi"])
def test_a_full_rank_normal_reaches_the_evidence(name):
    bound = trained(name)
    assert abs(bound.value - exact()[0]) < 0.01
    assert bound.error < 0.005


@pytest.mark.parametrize("name", ["AutoDiagonalNormal", "meanfield_vi"])
def test_a_mean_field_normal_reaches_its_best_elbo_and_no_more(name):
    bound = trained(name)
    assert abs(bound.value - exact()[1]) < 4 * bound.error + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["IWAE-8", "AutoDAIS-24"])
def test_methods_beyond_mean_field_are_judged_by_their_own_tighter_bounds(name):
    log_evidence, mean_field = exact()
    bound = trained(name)
    assert mean_field + 6 * bound.error < bound.value < log_evidence + 4 * bound.error


@pytest.mark.slow
def test_a_flow_reaches_the_evidence_nearly():
    log_evidence, mean_field = exact()
    bound = trained("AutoBNAFNormal", num_steps=10_000, learning_rate=5e-3)
    assert 0.9 < (bound.value - mean_field) / (log_evidence - mean_field) < 1.05


def test_a_rate_that_has_decayed_moves_nothing():
    peer = peers.trainer("meanfield_vi", WORK)
    start = peer.start(jax.random.key(0), learning_rate=1e-2, horizon=20)
    at_horizon = peer.advance(start, 20)
    later = peer.advance(at_horizon, 30)
    constant = peer.advance(peer.start(jax.random.key(0), learning_rate=1e-2), 20)
    first, last, other = (peer.parameters(s).mu for s in (at_horizon, later, constant))
    assert jnp.array_equal(first, last)
    # Adam's steps are about as long as the rate: half of it on average, or all of it.
    assert 0.4 < jnp.max(jnp.abs(first)) / jnp.max(jnp.abs(other)) < 0.6


@pytest.mark.parametrize("name", peers.BLACKJAX_NAMES)
def test_steps_of_blackjax_move_towards_the_target(name):
    target = WORK._replace(log_density=lambda z: -0.5 * jnp.sum((z - 3.0) ** 2))
    result = peers.blackjax_steps(name, target, 1000)(jax.random.key(0)).state
    assert jnp.all(result.mu > 0.5)
    assert jnp.all(result.mu < 1.1)  # 1000 steps of 1e-3


def test_steps_of_svi_depend_on_the_key_alone():
    run = peers.svi_steps("AutoDiagonalNormal", WORK, 5)
    first, again, other = (run(jax.random.key(seed)).optim_state for seed in (1, 1, 2))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, first, again))
    assert not jax.tree.all(jax.tree.map(jnp.array_equal, first, other))
    assert int(first[0]) == 5


@pytest.mark.parametrize("name", ["AutoNormal", "IWAE", "IWAE-0", "AutoDAIS-x", "hmc-3"])
@pytest.mark.parametrize(
    ("make", "choices"),
    [
        (partial(peers.svi_steps, num_steps=1), peers.SVI_NAMES),
        (partial(peers.blackjax_steps, num_steps=1), peers.BLACKJAX_NAMES),
        (peers.trainer, (*peers.SVI_NAMES, *peers.BLACKJAX_NAMES)),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_are_known(make, choices, name):
    with pytest.raises(ValueError, match="name must be one of") as error:
        make(name, work=WORK)
    assert all(repr(choice) in str(error.value) for choice in choices)


def test_a_name_whose_number_is_left_open_is_refused():
    with pytest.raises(ValueError, match="K in 'IWAE-K' stands for a whole number"):
        peers.trainer("IWAE-K", WORK)


def test_blackjax_that_is_missing_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[bench\]'"):
        peers.trainer("meanfield_vi", WORK)


def test_the_density_that_blackjax_gets_is_that_of_the_model():
    z = jnp.array([0.3, -0.7])
    energy = numpyro.infer.util.potential_energy(regression, WORK.args, {}, {"z": z})
    assert math.isclose(-energy, log_density(z), rel_tol=1e-5)
