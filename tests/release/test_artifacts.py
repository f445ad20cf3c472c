import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.release import smoke

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, PROJECT], check=True)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".whl", ".gz"])
def test_what_is_released_installs_and_works_in_a_clean_environment(built, suffix):
    smoke.attempt(built[suffix])


@pytest.mark.slow
def test_the_source_distribution_has_what_its_own_tests_need_and_no_stored_results(built):
    with tarfile.open(built[".gz"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"README.md", "LICENSE", "CITATION.cff", "tests/conftest.py", "Makefile"} <= names
    assert not any(name.startswith("results/") for name in names)
