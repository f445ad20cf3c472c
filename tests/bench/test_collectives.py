"""Bytes between devices, counted in lines of compiled programs as XLA writes them."""

import pytest

from rvrs.bench.collectives import moved

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[5]{0}", 20),
        ("f32[3,4]{1,0}", 48),
        ("f32[3,0]{1,0}", 0),
        ("f64[5]{0}", 40),
        ("bf16[5]{0}", 10),
        ("s32[7]{0}", 28),
        ("u8[7]{0}", 7),
        ("s64[]", 8),
        ("c64[2]{0}", 16),
        ("pred[]", 1),
        ("pred[6]{0}", 6),
        ("f8e4m3fn[6]{0}", 6),
        ("(f32[2]{0}, f32[3]{0})", 20),
        ("(f32[2]{0}, s32[], pred[4]{0}, f64[3]{0})", 40),
        ("(f32[], f32[], f32[], f32[], f32[], /*index=5*/f64[2,2]{1,0})", 52),
    ],
)
def test_bytes_are_those_of_the_result(shape, size):
    line = f"  %all-reduce.7 = {shape} all-reduce(f32[9]{{0}} %x, f64[8]{{0}} %y), {GROUPS}"
    assert moved(line) == {"all-reduce": size}
    assert moved(f"  ROOT {line.strip()}") == {"all-reduce": size}


@pytest.mark.parametrize(
    "kind", ["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"]
)
def test_every_kind_of_operation_is_counted(kind):
    assert moved(f"  %{kind}.1 = f32[8,2]{{1,0}} {kind}(f32[2]{{0}} %x), {GROUPS}") == {kind: 64}


PROGRAM = """\
HloModule jit__run_chunk, entry_computation_layout={(f32[4]{0}, s32[])->(f32[4]{0})}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %x, f32[] %y)
}

%body (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %gradient = f32[4]{0} get-tuple-element((s32[], f32[4]{0}) %carry), index=1
  %all-reduce = (f32[4]{0}, s32[]) all-reduce(f32[4]{0} %gradient, s32[] %n), to_apply=%add
  %all-reduce.1 = f64[2]{0} all-reduce(f64[2]{0} %loss), to_apply=%add
  %all-gather = s32[8]{0} all-gather(s32[1]{0} %count), dimensions={0}
  %fusion = f32[4]{0} fusion(f32[4]{0} %all-reduce, f32[8]{0} %all-gather), kind=kLoop
  ROOT %result = (s32[], f32[4]{0}) tuple(s32[] %n, f32[4]{0} %fusion)
}
"""


def test_sizes_are_added_up_by_kind_and_nothing_else_is_counted():
    assert moved(PROGRAM) == {"all-reduce": 4 * 4 + 4 + 2 * 8, "all-gather": 4 * 8}


def test_a_program_of_one_device_moves_nothing():
    assert moved("") == {}
    assert moved("ROOT %all = f32[4]{0} fusion(f32[4]{0} %all-reduce.1), kind=kLoop") == {}
    assert moved('%x = f32[4]{0} add(%a, %b), metadata={op_name="psum = all-reduce"}') == {}


@pytest.mark.parametrize(
    ("kind", "started", "result", "size"),
    [
        ("all-reduce", "f32[4]{0}", "f32[4]{0}", 16),
        ("all-reduce", "(f32[4]{0}, s32[])", "(f32[4]{0}, s32[])", 20),
        # The first half has operands and room for the result; and for two of them, in tuples.
        ("all-gather", "(f32[1]{0}, f32[8]{0})", "f32[8]{0}", 32),
        (
            "all-gather",
            "((f32[1]{0}, s32[]), (f32[8]{0}, s32[8]{0}))",
            "(f32[8]{0}, s32[8]{0})",
            64,
        ),
        ("collective-permute", "(f64[3]{0}, f64[3]{0}, u32[], u32[])", "f64[3]{0}", 24),
    ],
)
def test_an_operation_in_two_halves_is_counted_once(kind, started, result, size):
    program = f"""\
  %{kind}-start.1 = {started} {kind}-start(f32[1]{{0}} %x), {GROUPS}
  %other = f32[4]{{0}} add(f32[4]{{0}} %a, f32[4]{{0}} %b)
  %{kind}-done.1 = {result} {kind}-done({started} %{kind}-start.1)
"""
    assert moved(program) == {kind: size}
