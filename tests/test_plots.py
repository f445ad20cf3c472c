import sys

import numpy as np
import pytest

from rvrs import plots


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def plot(rng, **changes):
    number = 500
    arguments = {
        "losses": 3.0 + rng.normal(size=number) + 50.0 / np.arange(1, number + 1),
        "acceptances": np.full(number, 0.1),
        "target_acceptance": 0.1,
        "elbo": -3.0,
        "proposal": {"a": rng.normal(size=1000), "b": 2 * rng.normal(size=(1000, 2, 3))},
        "fitted": {"a": rng.normal(size=1000), "b": rng.normal(size=(1000, 2, 3))},
    }
    return plots.plot_fit(**arguments | changes)


def axes(figure) -> list:
    return figure.axes


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda item: hasattr(item, "get_text"))]


def test_fit_has_traces_and_a_labelled_panel_for_every_scalar(rng):
    figure = plot(rng)
    labels = [panel.get_xlabel() for panel in axes(figure)]
    assert labels == ["step", "step", "a", *(f"b[{i},{j}]" for i in range(2) for j in range(3))]
    assert [panel.get_ylabel() for panel in axes(figure)][:3] == [
        "ELBO",
        "acceptance $Z$",
        "density",
    ]
    found = texts(figure)
    for text in ("final ELBO \N{MINUS SIGN}3.000", "target 0.1", "fit $r$", "proposal $q$"):
        assert text in found
    assert "Marginals of all latent scalars" in found


def test_fit_says_when_it_leaves_scalars_out(rng):
    draws = {"x": rng.normal(size=(100, 20))}
    figure = plot(rng, proposal=draws, fitted=draws)
    assert len(axes(figure)) == 2 + plots.MAX_PANELS
    assert f"Marginals of the first {plots.MAX_PANELS} of 20 latent scalars" in texts(figure)


def test_fit_of_one_scalar_is_saved(rng, tmp_path):
    draws = {"x": rng.normal(size=100)}
    path = tmp_path / "fit.png"
    plot(rng, proposal=draws, fitted=draws, path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "values",
    [np.full(100, 2.0), np.full(100, np.nan), np.r_[np.nan, np.inf, np.arange(98.0)]],
    ids=["constant", "nothing", "some"],
)
def test_fit_survives_degenerate_values(rng, values, tmp_path):
    # Skipped steps and draws that were not completed are NaN.
    sites = {"x": values}
    figure = plot(rng, losses=values, acceptances=values, proposal=sites, fitted=sites)
    figure.savefig(tmp_path / "fit.png")


def test_elbo_trace_shows_the_end_rather_than_the_first_steps(rng):
    losses = np.r_[1e6, np.full(999, 3.0)]
    low, high = axes(plot(rng, losses=losses))[0].get_ylim()
    assert -3.1 < low < -3 < high < -2.9


def test_running_mean_is_that_of_the_latest_known_values():
    values = np.array([np.nan, 2.0, 4.0, np.nan, 6.0, 8.0])
    np.testing.assert_allclose(plots._running_mean(values, 2), [np.nan, 2, 3, 4, 6, 7])


def test_histograms_count_draws_beyond_the_edges(rng):
    fitted, wide = rng.normal(size=20_000), 100 * rng.normal(size=20_000)
    panel = axes(plot(rng, fitted={"x": fitted}, proposal={"x": wide}))[2]
    by_label = {patch.get_label(): patch.get_data() for patch in panel.patches}
    mass = {label: np.sum(data.values * np.diff(data.edges)) for label, data in by_label.items()}
    assert mass["fit $r$"] == pytest.approx(0.99, abs=0.011)
    # The axis goes as far as 8 of its standard deviations, where there is 6 % of the proposal.
    assert mass["proposal $q$"] == pytest.approx(0.06, abs=0.02)


def test_smoothed_density_is_that_of_a_normal(rng):
    grid = np.linspace(-3, 3, 200)
    density = plots._smooth_density(rng.normal(size=200_000), grid)
    np.testing.assert_allclose(density, np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi), atol=0.01)


@pytest.mark.parametrize("values", [np.full(10, 2.0), np.full(10, np.nan)])
def test_smoothed_density_of_degenerate_values_is_finite(values):
    assert np.all(np.isfinite(plots._smooth_density(values, np.linspace(0, 4, 50))))


def test_marginals_of_several_methods_share_panels(rng, tmp_path):
    draws = {"x": rng.normal(size=1000), "y": rng.normal(size=1000)}
    path = tmp_path / "marginals.png"
    figure = plots.plot_marginals(
        {"narrow": {name: value / 2 for name, value in draws.items()}, "good": draws},
        draws,
        title="Title",
        path=path,
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [panel.get_xlabel() for panel in axes(figure)] == ["x", "y"]
    assert {"Title", "NUTS", "narrow", "good"} <= set(texts(figure))
    narrow, good = (max(line.get_ydata()) for line in axes(figure)[0].lines)
    assert narrow > 1.5 * good


def test_marginals_refuse_a_method_that_lacks_a_scalar(rng):
    with pytest.raises(ValueError, match=r"'bad' lacks y\[0\]"):
        plots.plot_marginals(
            {"bad": {"x": rng.normal(size=10)}},
            {"x": rng.normal(size=10), "y": rng.normal(size=(10, 1))},
        )


def test_marginals_refuse_more_methods_than_they_have_colors(rng):
    draws = {"x": rng.normal(size=10)}
    with pytest.raises(ValueError, match="methods must be at most"):
        plots.plot_marginals({str(i): draws for i in range(20)}, draws)


def test_without_matplotlib_the_error_says_how_to_install_it(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'rvrs\[cli\]'"):
        plot(rng)
