"""Whatever a file holds, a loader loads it or refuses it: nothing else comes of it."""

import os
import zlib
from collections import Counter
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given

from tests.fuzz import hostile, loaders
from tests.fuzz.watch import watched

# A file costs at most so many times its own size: of a text that is a list of nothing but short
# entries, each becomes a Python object. Compressed ones may be unpacked, too.
MULTIPLE = 64
SETTINGS = hypothesis.settings(
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    # Not explained: that takes longer than to find it.
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
# Of all inputs, for those that JAX is at work in, and those that have few.
SHARE = {"fits": 0.5, "semi fits": 0.03, "trainings": 0.5, "deep": 0.01}
# Examples; most are files in five variants, as it takes longer to think them up than to read them.
QUICK, LONG = 25, 1300
# No digest of these is right by chance.
NEVER_LOADED = {("storage", "containers"), ("storage", "deep")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Loaders, made when they are asked for, and used before: imports are no matter of files."""
    kept, environment = {}, dict(os.environ)

    def make(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp("loader")
            kept[name] = loader = loaders.MAKERS[name](folder / "")
            whole = loader.path.read_bytes()
            for content in (whole, whole[:-1], b"", whole):
                loader.path.write_bytes(content)
                try:
                    assert loader.check(loader.load())
                except loader.refused:
                    assert content != whole
        return kept[name]

    yield make
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize(
    "count", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
@pytest.mark.parametrize(("name", "kind"), loaders.INPUTS)
def test_a_file_is_loaded_or_refused(name, kind, count, made, monkeypatch):
    if name == "semi fits" and count == QUICK:
        pytest.skip("takes a second for each")
    loader = made(name)
    monkeypatch.chdir(loader.path.parent)
    if "RVRS_DATA" in os.environ:
        monkeypatch.setenv("RVRS_DATA", str(loader.path.parent))
    before = listing(loader.path.parent)
    outcomes = Counter()
    share = SHARE.get(kind, SHARE.get(name, 1))

    @hypothesis.settings(SETTINGS, max_examples=max(5, int(share * count)))
    @given(loader.inputs[kind])
    def attempt(content):
        for variant in [content] if loader.code and kind == "forged" else variants(content):
            loader.path.write_bytes(variant)
            got, effort = load(loader)
            if effort.peak > allowed(loader, len(variant)):
                # Python's own tables grow now and then; a file's memory is needed every time.
                got, effort = load(loader)
            assert effort.peak <= allowed(loader, len(variant)), effort.peak
            assert effort.seconds < 5
            assert got is None or loader.check(got)
            outcomes["refused" if got is None else "loaded"] += 1

    whole = loader.path.read_bytes()
    try:
        attempt()
    finally:
        loader.path.write_bytes(whole)
    assert outcomes["refused"]
    # Otherwise the inputs would be too wild to get anywhere; a few of them may all be.
    assert outcomes["loaded"] or count == QUICK or (name, kind) in NEVER_LOADED
    assert listing(loader.path.parent) == before
    assert not hostile.MARKER.exists()
    print(f"{name}, {kind}: {dict(outcomes)}")


def load(loader):
    """What a loader makes of its file, None if it is refused, and what that took."""
    with watched(code=loader.code) as effort:
        try:
            got = loader.load()
        except loader.refused:
            got = None
    return got, effort


def allowed(loader, size):
    """Bytes of memory for a file of a size."""
    return MULTIPLE * size + loader.beyond


def variants(content):
    """A file, and copies in which another byte is wrong."""
    yield content
    random = Random(zlib.crc32(content))
    for _ in range(4 if content else 0):
        place = random.randrange(len(content))
        yield content[:place] + random.randbytes(1) + content[place + 1 :]


def listing(folder):
    return sorted(str(path) for path in folder.parent.rglob("*"))
