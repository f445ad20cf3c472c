from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crashes import processes


class Example(NamedTuple):
    """A command, and what it writes when nobody kills it."""

    arguments: list[str]
    """Without ``--out``."""
    variables: dict[str, str]
    whole: Path
    """The folder of its results."""
    seconds: float


@pytest.fixture(scope="session")
def fit(tmp_path_factory):
    """``rvrs fit``, with several checkpoints on its way."""
    folder = tmp_path_factory.mktemp("fit")
    (folder / "m.py").write_text(processes.MODEL)
    (folder / "d.csv").write_text(processes.DATA)
    arguments = ["fit", str(folder / "m.py"), "--data", str(folder / "d.csv")]
    arguments += ["--steps", "1500", "--proposal", "diagonal"]
    variables = processes.environment(folder)
    processes.finish([*arguments, "--out", str(folder / "compiled")], variables)
    seconds = processes.finish([*arguments, "--out", str(folder / "whole")], variables)
    processes.check_nothing_hidden(folder / "whole")
    found = processes.contents(folder / "whole")
    assert list(found) == ["fit.npz", "fit.png", "posterior.npz", "summary.txt"]
    # That programs come from a file or are compiled changes nothing.
    assert found == processes.contents(folder / "compiled")
    return Example(arguments, variables, folder / "whole", seconds)
