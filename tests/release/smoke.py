"""Install a wheel or source distribution into a clean environment, and use it there.

``python -m tests.release.smoke dist/*`` tries each of the files.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

# What a new user does first. It runs in a folder without the sources.
PROGRAM = """
import importlib.metadata, importlib.resources, importlib.util
import jax, numpyro, rvrs
import numpyro.distributions as dist

def model(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.Poisson(rate), obs=y)

assert "site-packages" in rvrs.__file__, rvrs.__file__
assert importlib.resources.files("rvrs").joinpath("py.typed").is_file()
assert importlib.metadata.metadata("rvrs")["License-Expression"] == "Apache-2.0"
# The extras that were not asked for are not there, and not needed.
assert not importlib.util.find_spec("flowjax")
assert not importlib.util.find_spec("pymc")

fit = rvrs.fit(jax.random.key(0), model, jax.numpy.array([3, 1, 4, 1, 5]), num_steps=1000)
fit.save("fit.npz")
loaded = rvrs.load("fit.npz", model, jax.numpy.array([3, 1, 4, 1, 5]))
mean = float(loaded.sample(jax.random.key(1), 4000)["rate"].mean())
exact = (2 + 14) / (1 + 5)  # the posterior is Gamma(2 + sum(y), 1 + len(y))
assert abs(mean - exact) < 0.1, mean
print(rvrs.__name__, importlib.metadata.version("rvrs"), "works: mean", mean, "exact", exact)
"""


def attempt(artifact: Path) -> None:
    """Everything that a new user of this file would do; raises if a step fails."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        run = Path(folder, "bin", "python")
        install = [run, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        requirement = f"{artifact.resolve()}[arviz]"
        subprocess.run([*install, "--constraint", CONSTRAINTS, requirement], check=True)
        subprocess.run([run, "-m", "pip", "check"], check=True)
        subprocess.run([run, "-I", "-c", PROGRAM], cwd=folder, check=True)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        print(name)
        attempt(Path(name))
