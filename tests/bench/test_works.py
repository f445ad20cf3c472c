import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density

from rvrs.bench import works


def log_joint(work, latent, parameters):
    (site,) = {"weights", "v"} & set(latent)
    return log_density(work.model, work.args, {}, {site: latent[site], **parameters})[0]


def test_the_log_density_of_a_regression_is_that_of_its_model():
    work = works.made_up_logistic(30, 4)
    z = jnp.array([0.3, -1.0, 0.7, 2.0])
    expected = log_joint(work, {"weights": z}, {})
    np.testing.assert_allclose(work.log_density(z), expected, rtol=1e-6)
    assert work.dimension == 4
    assert work.parameters is None


def test_the_log_density_of_a_process_is_that_of_its_model():
    work = works.gaussian_process(7)
    v = jnp.linspace(-1.0, 1.5, 7)
    start = {"amplitude": jnp.ones(()), "length_scales": jnp.ones(5)}
    expected = log_joint(work, {"v": v}, start)
    np.testing.assert_allclose(work.log_density(v), expected, rtol=1e-5)
    np.testing.assert_allclose(work.log_joint(work.parameters, v), expected, rtol=1e-5)


def test_the_log_joint_of_a_process_at_other_parameters_is_that_of_its_model():
    work = works.gaussian_process(7)
    v = jnp.linspace(-1.0, 1.5, 7)
    unconstrained = {"amplitude": jnp.array(0.4), "length_scales": jnp.linspace(-0.5, 0.5, 5)}
    constrained = {name: jnp.exp(value) for name, value in unconstrained.items()}
    np.testing.assert_allclose(
        work.log_joint(unconstrained, v), log_joint(work, {"v": v}, constrained), rtol=1e-5
    )


def test_made_up_data_are_the_same_every_time():
    first, second = (works.made_up_logistic(10, 2) for _ in range(2))
    for one, other in zip(first.args, second.args, strict=True):
        np.testing.assert_array_equal(one, other)


def test_made_up_labels_are_of_both_kinds():
    for work in (works.made_up_logistic(100, 17), works.gaussian_process(64)):
        assert 0.2 < float(jnp.mean(work.args[1])) < 0.8


def test_a_regression_takes_a_hundred_rows_of_a_data_set(monkeypatch):
    rng = np.random.default_rng(0)
    asked = {}

    def load(name, *, num_rows):
        asked.update(name=name, num_rows=num_rows)
        covariates = rng.standard_normal((num_rows, 3)).astype(np.float32)
        return works.datasets.Dataset(name, covariates, np.ones(num_rows, np.float32), ("a",) * 3)

    monkeypatch.setattr(works.datasets, "load", load)
    work = works.logistic("bank")
    assert asked == {"name": "bank", "num_rows": 100}
    assert (work.name, work.dimension, len(work.args[1])) == ("bank", 3, 100)


def test_a_data_set_that_is_not_there_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("RVRS_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RVRS_DATA_URL", raising=False)
    with pytest.raises(FileNotFoundError, match="set RVRS_DATA"):
        works.logistic("bank")


def test_single_precision_is_enough_for_the_largest_process():
    work = works.gaussian_process()
    assert bool(jnp.isfinite(work.log_density(jax.random.normal(jax.random.key(0), (256,)))))
