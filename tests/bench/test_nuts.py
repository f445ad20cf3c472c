import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from rvrs.bench.nuts import Nuts, min_ess
from rvrs.bench.works import Work

MEAN, SD = np.array([1.0, -2.0]), np.array([0.5, 2.0])


def normal():
    numpyro.sample("z", dist.Normal(MEAN, SD).to_event(1))


WORK = Work("normal", normal, (), lambda z: dist.Normal(MEAN, SD).log_prob(z).sum(), 2)


def test_nuts_draws_from_the_target_in_one_program():
    nuts = Nuts(WORK, num_warmup=200, num_samples=500, num_chains=4)
    draws = nuts.draw(jax.random.key(1))
    assert draws.shape == (500, 4, 2)
    ess = min_ess(draws)
    assert 200 < ess < 6000
    flat = np.asarray(draws, float).reshape(-1, 2)
    assert np.all(np.abs(flat.mean(axis=0) - MEAN) / SD < 4 / np.sqrt(ess))
    np.testing.assert_allclose(flat.std(axis=0), SD, rtol=0.15)
    assert nuts.warmup_seconds > 0
    again, other = nuts.draw(jax.random.key(1)), nuts.draw(jax.random.key(2))
    assert jnp.array_equal(draws, again)
    assert not jnp.array_equal(draws, other)
    assert nuts._run._cache_size() == 1


def test_all_independent_draws_are_effective_and_repeated_ones_are_not():
    draws = np.random.default_rng(0).standard_normal((1000, 4, 3))
    assert 3000 < min_ess(draws) < 5000
    draws[..., 1] = np.repeat(draws[:100, :, 1], 10, axis=0)
    assert 250 < min_ess(draws) < 650


def test_a_count_that_is_none_is_refused():
    with pytest.raises(ValueError, match="num_chains must be a whole number"):
        Nuts(WORK, num_warmup=1, num_samples=1, num_chains=0)
