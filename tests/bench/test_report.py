import io
import json
import math
import os
from importlib.metadata import version

import pytest
from rich.console import Console

from rvrs.bench import report
from rvrs.bench.report import Row, Suite

SUITE = Suite(
    "speed",
    "How fast",
    "Ratios [are] medians.",
    [
        Row("hare", "RVRS", {"ratio": 1.234567, "draws": 20000, "note": "asleep"}),
        Row("hare", "peer", {"ratio": 0.5, "missing": None}),
        Row("tortoise", "RVRS", {"ratio": 2.0, "draws": 3, "note": "awake", "missing": 1.0}),
        Row("snail", "RVRS", {"bytes": 12.0}),
    ],
)


def shown(suite):
    text = io.StringIO()
    report.show(Console(file=text, width=100), suite)
    return text.getvalue()


def test_a_table_has_a_column_for_every_figure_in_order_of_appearance():
    header = next(line for line in shown(SUITE).splitlines() if "contestant" in line)
    names = [cell.strip() for cell in header.strip("┃").split("┃")]
    assert names == ["work", "contestant", "ratio", "draws", "note", "missing"]


def test_works_with_other_figures_have_a_table_of_their_own():
    text = shown(SUITE)
    assert text.count("contestant") == 2
    assert text.index("bytes") > text.index("tortoise")


def test_the_notes_are_printed_as_they_are():
    assert "Ratios [are] medians." in shown(SUITE)


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, ""),
        ("asleep", "asleep"),
        (20000, "20,000"),
        (0.0, "0.00"),
        (1.234567, "1.23"),
        (0.0123, "0.0123"),
        (-12.345, "-12.3"),
        (123.4, "123"),
        (1234.5, "1,234"),
        (1.5e-5, "1.50e-05"),
        (1.5e7, "1.50e+07"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_about_three_digits(figure, text):
    assert report._formatted(figure) == text


def test_what_was_written_can_be_read_again(tmp_path):
    path = tmp_path / "found.json"
    report.write(path, [SUITE])
    found = json.loads(path.read_text())
    (suite,) = found["suites"]
    rows = [Row(**row) for row in suite.pop("rows")]
    assert Suite(**suite, rows=rows) == SUITE


def test_the_file_says_what_it_was_measured_with(tmp_path):
    path = tmp_path / "found.json"
    report.write(path, [SUITE])
    found = json.loads(path.read_text())
    for package in ("jax", "numpyro", "rvrs"):
        assert found["versions"][package] == version(package)
    assert {"python"} < set(found["versions"])
    assert found["cores"] == os.cpu_count()
    assert found["date"].startswith("20")


def test_numbers_that_json_does_not_have_become_words(tmp_path):
    path = tmp_path / "found.json"
    rows = [Row("w", "c", {"worst": math.inf, "unknown": math.nan})]
    report.write(path, [SUITE._replace(rows=rows)])
    figures = json.loads(path.read_text(), parse_constant=pytest.fail)["suites"][0]["rows"][0]
    assert figures["figures"] == {"worst": "inf", "unknown": "nan"}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    report.write(path, [SUITE])
    before = path.read_bytes()

    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(report.Path, "replace", fails)
    with pytest.raises(OSError, match="full"):
        report.write(path, [SUITE, SUITE])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
