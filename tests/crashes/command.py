"""The ``rvrs`` command for tests that kill it: more often than otherwise it writes checkpoints.

Processes of a pool import this file as well, under another name. What a test wants to be
restricted is in the environment: the tests' own process has threads, and must not fork.
"""

import ctypes
import os
import resource
import sys

LARGEST_FILE, NO_PRIVILEGES = "TEST_LARGEST_FILE", "TEST_NO_PRIVILEGES"


def restrict():
    """Set limits on this process and all that it starts."""
    size = os.environ.get(LARGEST_FILE)
    if size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    if os.environ.pop(NO_PRIVILEGES, None) is not None and os.getuid() == 0:
        # A superuser may write anywhere, but for this, which counts from the next program on.
        drop_from_bounding_set, may_override_permissions = 24, 1
        if ctypes.CDLL(None).prctl(drop_from_bounding_set, may_override_permissions, 0, 0, 0):
            raise OSError("cannot give up the right to write anywhere")
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    restrict()

from rvrs import cli, vae_training  # noqa: E402
from rvrs.experiments import catalogue  # noqa: E402

# Not where a collection of tests imports it.
if __name__ in ("__main__", "__mp_main__"):
    catalogue.NAMES["counting"] = "counting:EXPERIMENT"
    vae_training._SECONDS_BETWEEN_CHECKPOINTS = 0.0

if __name__ == "__main__":
    cli.main()
