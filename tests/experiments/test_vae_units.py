"""Units of Table 1 on autoencoders so small that they can be integrated over."""

import jax
import numpy as np
import pytest

from rvrs import datasets, vae_training
from rvrs.experiments import vae_units
from rvrs.experiments.experiment import DivergedError, Unit
from rvrs.experiments.vae_units import Kind, own_bound, parse
from tests.test_vae import IMAGES, TINY, params
from tests.test_vae_training import quadrature_elbo

SETTINGS = {
    "num_latent": 2,
    "num_hidden": 4,
    "batch_size": 10,
    "num_epochs": 2,
    "schedule": "cosine",
    "learning_rate": 1e-3,
    "warm_learning_rate": 1e-4,
    "uha_learning_rate": 1e-4,
    "num_evaluated": 5,
    "num_bound_draws": 20,
    "num_importance_draws": 20,
    "num_timed": 40,
    "steps_per_turn": 2,
    "timed": ["standard", "iwae-10"],
}


@pytest.fixture
def digits(monkeypatch):
    """Forty training images of the real ones."""
    whole = datasets.load_images("digits")
    few = whole._replace(train=whole.train[:40], test=whole.test[:8])
    monkeypatch.setattr(datasets, "load_images", lambda name: few)


def run(method, arrays=None, checkpoint=None, settings=SETTINGS):
    unit = Unit("vae", "digits", method, 0)
    return vae_units.run(unit, settings, arrays or {}, lambda *_: None, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("standard", Kind("standard", 1.0, False)),
        ("iwae-20", Kind("iwae", 20.0, False)),
        ("iwae-20-warm", Kind("iwae", 20.0, True)),
        ("uha-10", Kind("uha", 10.0, True)),
        ("rvrs-0.025", Kind("rvrs", 0.025, True)),
    ],
)
def test_names_are_taken_apart(method, expected):
    assert parse(method) == expected


@pytest.mark.slow
def test_bounds_rise_from_the_elbo_to_the_evidence():
    """The ELBO and the evidence are those of quadrature: all is accepted, and nearly nothing."""
    elbos, _ = quadrature_elbo(np.full(3, 200.0), epsilon=0.0)
    evidences, _ = quadrature_elbo(np.full(3, -6.0), epsilon=0.0)
    bound = lambda kind: own_bound(  # noqa: E731
        jax.random.key(0), TINY, parse(kind), params(), IMAGES, num_draws=20_000
    )
    value, error = bound("standard")
    assert abs(value - elbos.mean()) < 4 * error
    assert error < 0.02
    one, one_error = bound("iwae-1")
    assert abs(one - elbos.mean()) < 4 * one_error
    several, several_error = bound("iwae-5")
    assert elbos.mean() + 4 * several_error < several < evidences.mean() + 4 * several_error
    rejecting, rejecting_error = bound("rvrs-0.1")
    assert several < rejecting < evidences.mean() + 4 * rejecting_error


@pytest.mark.parametrize("name", ["cosine", "thirds"])
def test_rates_fall_in_the_way_that_the_settings_say(name):
    settings = SETTINGS | {"schedule": name}
    rates = [float(vae_units.schedule(settings, parse("uha-10"), 30)(s)) for s in (0, 15, 29)]
    expected = [1e-4, 5e-5, 2.7e-7] if name == "cosine" else [1e-4, 1e-5, 1e-6]
    np.testing.assert_allclose(rates, expected, rtol=0.02)
    assert float(vae_units.schedule(settings, parse("iwae-10"), 30)(0)) == pytest.approx(1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_warm_methods_start_from_the_networks_that_the_standard_one_leaves(monkeypatch):
    reference = run("standard")
    assert reference.figures["test_bound"] < reference.figures["log_likelihood"] < 0
    assert vae_units.pictures(reference.figures).shape == (25, 8, 8)
    starts = []
    train = vae_training.train

    def watched(*args, **kwargs):
        starts.append(kwargs["params"])
        return train(*args, **kwargs)

    monkeypatch.setattr(vae_training, "train", watched)
    warm = run("iwae-10-warm", reference.arrays)
    assert warm.arrays == {}
    np.testing.assert_array_equal(
        starts[0]["decoder"][2].weights, reference.arrays["decoder-2-weights"]
    )
    run("iwae-10", reference.arrays)
    assert starts[1] is None
    with pytest.raises(DivergedError, match="starts from standard, which has failed"):
        run("rvrs-0.1")


@pytest.mark.usefixtures("digits")
def test_a_stopped_unit_goes_on_to_the_same_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(vae_training, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    whole = run("standard")
    path = tmp_path / "unit.npz"
    calls = []

    def stop(share, _words):
        calls.append(share)
        if len(calls) == 2:
            raise KeyboardInterrupt

    unit = Unit("vae", "digits", "standard", 0)
    with pytest.raises(KeyboardInterrupt):
        vae_units.run(unit, SETTINGS, {}, stop, checkpoint=path)
    assert path.is_file()
    resumed = run("standard", checkpoint=path)
    same = {name: value for name, value in whole.figures.items() if name != "seconds_per_step"}
    assert same.items() <= resumed.figures.items()
    # A checkpoint of other settings is refused, and stays.
    with pytest.raises(ValueError, match="description"):
        run("standard", checkpoint=path, settings=SETTINGS | {"num_latent": 3})
    assert path.is_file()


@pytest.mark.usefixtures("digits")
def test_a_loss_that_is_not_finite_is_told_and_its_checkpoint_deleted(tmp_path, monkeypatch):
    path = tmp_path / "unit.npz"
    broken = lambda *_: jax.numpy.nan * jax.numpy.zeros(())  # noqa: E731
    monkeypatch.setattr(
        vae_units, "build", lambda networks, _: vae_training.Method(networks.init, broken)
    )
    with pytest.raises(DivergedError, match="steps had no finite loss"):
        run("standard", checkpoint=path)
    assert not path.exists()


@pytest.mark.usefixtures("digits")
def test_step_times_are_those_of_the_methods_asked_for():
    milliseconds = run("step-times").figures["milliseconds"]
    assert list(milliseconds) == ["standard", "iwae-10"]
    assert all(value > 0 for value in milliseconds.values())
