import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TEXTS = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
# Those of scaling.md are for several hosts, and begin in the middle.
WITH_PROGRAMS = ["README.md", "docs/neighbours.md", "docs/command-line.md"]


def snippets(name):
    text = (PROJECT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_snippets_run_as_they_are_written(name, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(snippets(name)), encoding="utf-8")
    environment = os.environ | {"MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_snippets_are_python(name):
    assert snippets(name)
    for snippet in snippets(name):
        compile(snippet, name, "exec")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(path):
    # Pages that are computed are not there before the site is built; its own check follows those.
    computed = ("guide/", "examples/")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert not [
        link
        for link in links
        if not link.startswith(computed) and not (path.parent / link).exists()
    ]
