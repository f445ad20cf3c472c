"""Files that nobody should make: damaged copies, containers that lie, texts that mislead."""

import copy
import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np

# What integers are mistaken about, as bytes.
NUMBERS = [
    struct.pack(kind, value)
    for kind in ("<H", "<I", "<Q")
    for value in (0, 1, 2 ** (8 * struct.calcsize(kind) - 1), 2 ** (8 * struct.calcsize(kind)) - 1)
]
TOKENS = [b"NaN", b"Infinity", b"1e999", b"null", b"true", b"-1", b'"', b"[[[[", b"{", b"\\ud800"]
TOKENS += [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b",", b"PK\x05\x06", b"PK\x01\x02"]
TOKENS += [b"\x93NUMPY", b"|O", b"|V0", b"'descr'", b"(9999999999999,)", b"4L", b"\\d", b"9" * 5000]


def one_of(options):
    """One of some values; hypothesis would print them all."""
    return st.integers(0, len(options) - 1).map(lambda number: options[number])


class Edit(NamedTuple):
    """One change of some bytes."""

    kind: str
    place: float
    length: int
    content: bytes


EDITS = st.builds(
    Edit,
    st.sampled_from(["flip", "replace", "insert", "double", "delete", "truncate"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 40),
    one_of(NUMBERS + TOKENS) | st.binary(min_size=1, max_size=9),
)


def edited(content, edits):
    """A copy with some changes."""
    content = bytearray(content)
    for edit in edits:
        if not content:
            break
        start = int(edit.place * len(content))
        match edit.kind:
            case "flip":
                content[start] ^= 1 << edit.length % 8
            case "replace":
                content[start : start + len(edit.content)] = edit.content
            case "insert":
                content[start:start] = edit.content
            case "double":
                content[start:start] = content[start : start + edit.length]
            case "delete":
                del content[start : start + edit.length]
            case "truncate":
                del content[start:]
    return bytes(content)


def damaged(seeds):
    """Copies of valid files with a few changes."""
    return st.builds(edited, one_of(seeds), st.lists(EDITS, min_size=1, max_size=4))


def npy(array, descr=None, order=None, shape=None, header=None, start=b"\x93NUMPY\x01\x00"):
    """The bytes of an array, whose header may claim anything."""
    array = np.asarray(array)
    if header is None:
        descr = repr(array.dtype.str) if descr is None else descr
        order = "False" if order is None else order
        shape = repr(array.shape) if shape is None else shape
        header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"
    text = header.encode()
    kind = "<H" if start[6:7] == b"\x01" else "<I"
    return start + struct.pack(kind, min(len(text), 65535)) + text + array.tobytes()


class Bomb:
    """Unpickling this leaves a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


# Nobody creates it but a pickle that was run.
MARKER = Path("code-of-a-hostile-file-was-run")
PICKLED = pickle.dumps(np.array([Bomb(MARKER)], dtype=object))


class Member(NamedTuple):
    """What a container holds, and what it says about it."""

    name: str
    content: bytes
    method: int = 0
    size: int | None = None
    packed: int | None = None
    offset: int | None = None
    flags: int = 0
    extra: bytes = b""
    times: int = 1
    """How many entries of the directory lead to it."""


class End(NamedTuple):
    """What the end of a container says; None is the truth."""

    count: int | None = None
    size: int | None = None
    offset: int | None = None
    comment: bytes = b""
    zip64: bool = False


def container(members, end=End()):  # noqa: B008
    """A ZIP file that says what it is told to say."""
    body, directory, count = bytearray(), bytearray(), 0
    for member in members:
        packed = member.content
        if member.method == 8:
            deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed = deflate.compress(packed) + deflate.flush()
        name = member.name.encode(errors="surrogatepass")
        size = len(member.content) if member.size is None else member.size
        about = (
            *(20, member.flags | 0x800, member.method, 0, 33, zlib.crc32(member.content)),
            *(len(packed) if member.packed is None else member.packed, size),
        )
        offset = len(body) if member.offset is None else member.offset
        body += struct.pack("<4s5H3I2H", b"PK\x03\x04", *about, len(name), 0) + name + packed
        entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, *about, len(name), len(member.extra),
                            0, 0, 0, 0, offset)  # fmt: skip
        directory += (entry + name + member.extra) * member.times
        count += member.times
    start = len(body)
    body += directory
    count = count if end.count is None else end.count
    size = len(directory) if end.size is None else end.size
    offset = start if end.offset is None else end.offset
    if end.zip64:
        record = len(body)
        body += struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset
        )
        body += struct.pack("<4sIQI", b"PK\x06\x07", 0, record, 1)
        count, size, offset = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    end_record = (0, 0, count & 0xFFFF, count & 0xFFFF, size & 0xFFFFFFFF, offset & 0xFFFFFFFF)
    body += struct.pack("<4s4H2IH", b"PK\x05\x06", *end_record, len(end.comment)) + end.comment
    return bytes(body)


HEADERS = [
    "",
    "{}",
    "{" * 5000,
    "-" * 9000 + "1",
    "(" * 9000,
    "[" * 90 + "]" * 90,
    " " * 20_000,
    "{'descr': '<f8'" + " " * 9900 + "x",
    "{'descr': '<f8', 'descr': '<f8', 'descr': '<f8', }",
    "__import__('pathlib').Path('code-of-a-hostile-file-was-run').touch()",
    "{'descr': '<f8', 'fortran_order': False, 'shape': __import__('os').getcwd(), }",
    "{'descr': [('a', '<f8'), ('b', '|O')], 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (4L,), }",
    "{'shape': (4,), 'descr': '<f8', 'fortran_order': False}",
    "{'descr': '\\d', 'fortran_order': False, 'shape': (4,), }",
]
DESCRS = ["'<f8'", "'>f8'", "'<f4'", "'|b1'", "'|u1'", "'<U2'", "'<U0'", "'|O'", "'|V0'", "'|V8'"]
DESCRS += [
    "'<f16'",
    "'<c16'",
    "'<M8[s]'",
    "'|S4'",
    "'a4'",
    "8",
    "None",
    "[('a', '<f8')]",
    "'<U9999999'",
]
SHAPES = ["()", "(4,)", "(2, 2)", "(4)", "4", "(-4,)", "(-2, -2)", "(1000000000000000,)", "(5,)"]
SHAPES += [f"({2**62}, {2**62})", f"(0, {10**17})", f"({10**17}, 0)", "(True,)", "(4.0,)", "None"]
SHAPES += ["(" + "1, " * 100 + ")", "(" + "9" * 5000 + ",)", "(0,)", "(4, 1)", "(1, 4)", "(3,)"]
CONTENTS = [
    npy(np.arange(4.0)),
    npy(np.zeros((4, 14))),
    npy(np.array([0.0, 1.0, 1.0, 0.0])),
    npy(np.array([f"x{i}" for i in range(14)])),
    npy(np.array([0x110000, 0xD800, 65, 66], np.uint32), "'<U1'", shape="(4,)"),
    npy(np.array([0, 1, 2, 255], np.uint8), "'|b1'"),
    npy(np.array([np.nan, 1.0, np.inf, 0.0])),
    npy(np.array([1e300, -1e308, 1e-320, 0.0])),
    npy(np.array([2**63, 0, 1, 2], np.uint64)),
    npy(np.arange(4, dtype=">f8")),
    npy(np.int64(2**40)),
    npy(np.zeros(30_000)),
    npy(np.ones((3, 784), np.uint8)),
    npy(np.frombuffer(PICKLED, np.uint8), "'|O'", shape="(1,)"),
    npy(np.arange(4.0), start=b"\x93NUMPY\x03\x00"),
    npy(np.arange(4.0), start=b"\x93NUMPY\x02\x00"),
    b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**30) + b"{" * 100,
    PICKLED,
    b"",
]
NAMES = ["x.npy", "header.npy", "X.npy", "y.npy", "feature_names.npy", "x_train.npy", "x_test.npy"]
NAMES += [
    "x",
    "../escaped.npy",
    "/tmp/absolute.npy",
    "..\\escaped.npy",
    "",
    ".npy",
    "x/",
    "x\0y.npy",
]
NAMES += ["C:\\x.npy", "a" * 5000, "\n", "data.npy", "\ud800.npy"]

_CLAIMS = st.none() | st.sampled_from([0, 1, 128, 2**20, 2**31, 2**32 - 1])
_CONTENTS = one_of(CONTENTS) | st.one_of(
    st.builds(
        lambda d, o, s: npy(np.arange(4.0), d, o, s),
        st.sampled_from(DESCRS),
        st.sampled_from(["False", "True", "0", "None"]),
        st.sampled_from(SHAPES),
    ),
    one_of([npy(np.arange(4.0), header=header) for header in HEADERS]),
)
# A member is mostly what it seems to be: otherwise nothing but the first lie is ever found.
_HONEST = st.tuples(one_of(NAMES), _CONTENTS, st.sampled_from([0, 0, 8])).map(
    lambda parts: Member(*parts)
)
_MEMBERS = _HONEST | st.builds(
    Member,
    one_of(NAMES),
    _CONTENTS,
    st.sampled_from([0, 8, 12, 14, 99]),
    *(_CLAIMS, _CLAIMS, _CLAIMS),
    st.sampled_from([0, 1, 0x20, 0x40]),
    st.sampled_from([b"", b"\x01\0\x08\0" + b"\xff" * 8, b"\x01\0\x04\0", b"\x01\0", b"x" * 300]),
    st.sampled_from([1, 1, 1, 2, 500]),
)
_ENDS = st.just(End()) | st.builds(
    End, _CLAIMS, _CLAIMS, _CLAIMS, st.sampled_from([b"", b"PK\x05\x06" * 5]), st.booleans()
)


def containers(**arrays):
    """Containers that lie, about these arrays and others."""
    named = st.tuples(
        *[
            st.tuples(one_of([npy(array)] * 3) | _CONTENTS, st.sampled_from([0, 0, 8])).map(
                lambda parts, name=name: Member(f"{name}.npy", *parts)
            )
            for name, array in arrays.items()
        ]
    ).map(list)
    others = st.lists(_MEMBERS, max_size=3)
    few = st.just([])
    return st.builds(lambda a, b, end: container(a + b, end), named | few, others | few, _ENDS)


VALUES = [None, True, False, -1, 0, 1, 3, 2**31, 10**30, 0.5, 1e308, float("nan"), float("inf"), ""]
VALUES += [
    "x",
    "x" * 3000,
    "\ud800",
    [],
    {},
    [1, 2],
    ["a"],
    [[[]]],
    {"a": 1},
    {"": None},
    [None] * 300,
]
DEEP = (
    "[" * 90 + "]" * 90,
    "[" * 150 + "]" * 150,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 200 + "1" + "}" * 200,
)
_CHANGES = st.tuples(
    st.sampled_from(["set", "set", "delete", "add", "rename"]),
    st.integers(0, 60),
    one_of(VALUES),
)


def places(value):
    """Where there are entries, as the containers and their keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def changed(content, changes):
    """A copy of a JSON value with some changes."""
    content = json.loads(json.dumps(content))
    for kind, number, value in changes:
        value = copy.deepcopy(value)
        found = list(places(content))
        if not found:
            break
        holder, key = found[number % len(found)]
        if kind == "set" or isinstance(holder, list):
            holder[key] = value
        elif kind == "delete":
            del holder[key]
        elif kind == "add":
            holder["another"] = value
        else:
            holder[f"{key}_"] = holder.pop(key)
    return content


def values(content):
    """JSON values with some changes."""
    return st.builds(
        changed, st.none().map(lambda _: content), st.lists(_CHANGES, min_size=1, max_size=3)
    )


def texts(content):
    """Texts of JSON with changed, doubled or deep entries."""
    plain = st.builds(json.dumps, values(content))
    first = next(iter(content))
    doubled = st.builds(lambda text: f'{{"{first}": 1, {text[1:]}', plain)
    deep = st.builds(lambda text, nest: f'{{"deep": {nest}, {text[1:]}', plain, one_of(DEEP))
    return st.one_of(plain, plain, doubled, deep).map(lambda text: text.encode())


_CELLS = ["1", "2.5", " 3 ", "-1e-3", "x", "", "nan", "1e999", "1_000", "٣", '"4"', '"', "\0"]
_CELLS += ["9" * 400, "1" * 140_000, "3000000000", "1e300", "+-1", "0x10", "=cmd|'/C calc'!A0"]
_ENDINGS = ["\n", "\n", "\n", "\r\n", "\r", "\n\n", "\n" * 1000, ""]


def tables():
    """Tables of text."""
    row = st.lists(one_of(["1", "2.5", *_CELLS]), min_size=1, max_size=3)
    names = one_of(["x,y", "x", "x,x", "1,2", "", "x;y", ",", "\ufeffx, y", "x," * 3000 + "x"])
    lines = st.lists(st.tuples(row, one_of(_ENDINGS)), max_size=6)
    numbers = st.builds(
        lambda cells: "x,y\n" + "".join(f"{a},{b}\n" for a, b in cells),
        st.lists(st.tuples(st.integers(), st.floats()), min_size=1, max_size=5),
    )
    hostile = st.builds(
        lambda head, rows: f"{head}\n" + "".join(",".join(row) + end for row, end in rows),
        names,
        lines,
    )
    return (hostile | numbers).map(lambda text: text.encode(errors="surrogatepass"))
