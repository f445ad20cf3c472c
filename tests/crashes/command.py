"""The ``rvrs`` command for tests that kill it: more often than otherwise it writes checkpoints.

Processes of a pool import this file as well, under another name.
"""

from rvrs import cli, vae_training
from rvrs.experiments import catalogue

# Not where a collection of tests imports it.
if __name__ in ("__main__", "__mp_main__"):
    catalogue.NAMES["counting"] = "counting:EXPERIMENT"
    vae_training._SECONDS_BETWEEN_CHECKPOINTS = 0.0

if __name__ == "__main__":
    cli.main()
