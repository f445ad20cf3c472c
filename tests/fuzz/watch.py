"""What a loader does besides loading: nothing, or a test fails."""

import os
import resource
import signal
import sys
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit: code, other processes, the network, and changes of files.
_CODE = ("exec", "compile", "import", "marshal.", "code.")
_OUTSIDE = ("pickle.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")
_OUTSIDE += ("socket.", "ctypes.dlopen", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
_OUTSIDE += ("os.link", "os.symlink", "os.chmod", "os.truncate", "shutil.", "tempfile.")

_forbidden: tuple[str, ...] = ()
_seen: list[str] = []


def _audit(event, arguments):
    if not _forbidden:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING:
            _seen.append(f"open {path!r} to write")
    elif event.startswith(_forbidden):
        _seen.append(f"{event} {arguments!r:.200}")


_installed = False


class Hung(BaseException):
    """It took too long; nothing catches this."""


def _interrupt(*_):
    raise Hung("no end in sight")


# Bytes beyond which there is no memory, so that what has no end does not take all of it.
_MORE = 4 * 2**30


class Effort:
    """What loading took."""

    seconds = 0.0
    peak = 0


@contextmanager
def watched(*, code, seconds=20):
    """Refuse whatever a loader must not do; ``code`` is whether code may be imported and run."""
    global _forbidden, _installed
    if not _installed:
        # For good, there is no way to take it back.
        sys.addaudithook(_audit)
        _installed = True
    effort = Effort()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    enough = pages * resource.getpagesize() + _MORE
    if limits[1] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (enough, limits[1]))
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _seen.clear()
    tracemalloc.start()
    began = time.process_time()
    _forbidden = _OUTSIDE if code else _OUTSIDE + _CODE
    try:
        yield effort
    finally:
        _forbidden = ()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        effort.seconds = time.process_time() - began
        effort.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not _seen, list(_seen)
