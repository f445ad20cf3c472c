"""The pages that run code: what they claim is asserted at their ends."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    path
    for folder in ("method", "tutorials")
    for path in sorted((DOCS / folder).glob("*.py"))
    if not path.name.startswith("_")
]
# These show how to use what is checked elsewhere.
WITHOUT_CHECKS = ["start.py"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_what_it_claims_holds(page, tmp_path):
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, page], cwd=tmp_path, env=environment, capture_output=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_checks_what_it_claims(page):
    tree = ast.parse(page.read_text(encoding="utf-8"))
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert checks or page.name in WITHOUT_CHECKS
