from dataclasses import replace

import pytest

from rvrs.experiments import _seeds, catalogue, report
from rvrs.experiments import store as stores
from rvrs.experiments.experiment import Claim, Result, Unit
from rvrs.experiments.store import Store
from tests.experiments import toy

MACHINE = {"platform": "a machine", "cores": 2}
SETTINGS = toy.EXPERIMENT.presets["quick"].settings
ORIGIN = stores.origin(toy.EXPERIMENT, "quick", SETTINGS)
CLAIMS = [
    Claim("Up is up", "1 | 2", True),
    Claim("Down is up", "not\nreally", False),
    Claim("Left is up", "no results", None),
]


def plot(results, folder):
    path = folder / f"{results[0].unit.experiment} drawn.png"
    path.write_bytes(b"image")
    return [path]


def tables(results):
    return "| a table |\n| --- |\n" + _seeds.failures(results)


@pytest.fixture(autouse=True)
def experiments(monkeypatch):
    """Two, whose order in the catalogue is not that of their names."""
    first = replace(toy.EXPERIMENT, plot=plot, tables=tables, claims=lambda _results: CLAIMS)
    second = replace(first, name="again", title="Table 0: again", claims=lambda _results: [])
    monkeypatch.setattr(toy, "EXPERIMENT", first)
    monkeypatch.setattr(toy, "AGAIN", second, raising=False)
    module = "tests.experiments.toy"
    names = {"toy": f"{module}:EXPERIMENT", "again": f"{module}:AGAIN"}
    monkeypatch.setattr(catalogue, "NAMES", names)


def store(folder, *, name="toy", seed=0, failure=None, origin=ORIGIN):
    unit = Unit(name, "one", "plain", seed)
    Store(folder).write(Result(unit, {"value": 1.0}, failure, 20.0), origin, machine=MACHINE)


def written(folder, **arguments):
    return report.write(folder, **arguments).read_text()


def test_the_page_says_how_an_experiment_was_run(tmp_path):
    store(tmp_path)
    store(tmp_path, seed=1, failure="DivergedError: it fell")
    text = written(tmp_path)
    assert (tmp_path / "report.md").read_text() == text
    assert "\n## Figure 0: a toy\n" in text
    assert "\n- Experiment: toy, revision 1\n- Preset: quick\n" in text
    assert "\n- Settings: scale = 0.5, sizes = [1, 2]\n" in text
    assert f" jax {ORIGIN.versions['jax']}," in text
    assert "\n- Machine: platform = a machine, cores = 2\n" in text
    assert "\n- Units: 2, of which 1 failed\n- Seconds, summed over units: 40\n" in text


def test_each_failure_is_told_once(tmp_path):
    store(tmp_path)
    store(tmp_path, seed=1, failure="DivergedError: it fell")
    assert written(tmp_path).count("- one, plain, seed 1: DivergedError: it fell\n") == 1


def test_claims_are_in_a_summary_and_in_their_section(tmp_path):
    store(tmp_path)
    summary, section = written(tmp_path).split("## Figure 0")
    assert "hold here: 1 yes, 1 NO, 1 cannot tell." in summary
    rows = [
        r"| Up is up | 1 \| 2 | yes |",
        "| Down is up | not really | NO |",
        "| Left is up | no results | cannot tell |",
    ]
    for row in rows:
        assert f"\n| toy {row}\n" in summary
        assert f"\n{row}\n" in section


def test_tables_and_figures_are_on_the_page(tmp_path):
    store(tmp_path)
    text = written(tmp_path)
    assert text.endswith("\n\n| a table |\n| --- |\n\n![toy drawn](figures/toy%20drawn.png)\n")
    assert (tmp_path / "figures" / "toy drawn.png").read_bytes() == b"image"


def test_links_lead_from_a_page_elsewhere_to_the_figures(tmp_path):
    store(tmp_path / "results")
    page = tmp_path / "docs" / "page.md"
    assert "(../results/figures/toy%20drawn.png)" in written(tmp_path / "results", page=page)
    assert page.is_file()
    assert not (tmp_path / "results" / "report.md").exists()


def test_experiments_stand_in_the_order_of_the_catalogue(tmp_path):
    store(tmp_path, name="again")
    store(tmp_path, name="toy")
    text = written(tmp_path)
    assert text.index("## Figure 0: a toy") < text.index("## Table 0: again")


def test_results_without_claims_are_reported(tmp_path):
    store(tmp_path, name="again")
    assert "No claim of the paper can be compared" in written(tmp_path)


def test_nothing_is_drawn_where_all_units_failed(tmp_path):
    store(tmp_path, failure="DivergedError: it fell")
    text = written(tmp_path)
    assert "seed 0: DivergedError: it fell" in text
    assert text.endswith("No unit has succeeded: there is nothing to show.\n")
    assert not (tmp_path / "figures").exists()


def test_results_of_other_versions_than_those_installed_are_reported(tmp_path):
    store(tmp_path, origin=ORIGIN._replace(versions={"jax": "0.0.1"}))
    assert "- Versions: jax 0.0.1\n" in written(tmp_path)


def test_results_of_different_origins_are_refused_before_anything_is_written(tmp_path):
    store(tmp_path)
    store(tmp_path, name="again")
    store(tmp_path, name="again", seed=1, origin=ORIGIN._replace(preset="paper"))
    with pytest.raises(ValueError, match=r"seed-0.json and .*seed-1.json .*'quick' -> 'paper'"):
        report.write(tmp_path)
    assert not (tmp_path / "figures").exists()
    assert not (tmp_path / "report.md").exists()


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there are no results in"):
        report.write(tmp_path / "nowhere")


def test_results_of_an_unknown_experiment_are_refused(tmp_path):
    store(tmp_path, name="foreign")
    with pytest.raises(ValueError, match="there is no experiment 'foreign'"):
        report.write(tmp_path)


def test_a_damaged_result_is_refused(tmp_path):
    store(tmp_path)
    Store(tmp_path).path(Unit("toy", "one", "plain", 0)).write_text("{")
    with pytest.raises(ValueError, match="is truncated, damaged or not JSON"):
        report.write(tmp_path)
