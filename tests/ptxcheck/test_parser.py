"""PTX text to dataclasses: what compilers emit, and one clear error for everything else."""

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxcheck.lower import lower
from ptxcheck.parser import parse
from ptxcheck.syntax import Address, Immediate, Name, Negated, Pair, PtxError, Vector

SOURCE = """//
.version 8.8
.target sm_90a, debug
.address_size 64
.extern .shared .align 16 .b8 pool[];
.visible .entry scale(
    .param .align 8 .b8 scale_param_0[8],
    .param .u32 scale_param_1
)
.maxntid 64, 1, 1
.reqntid 64
{
    .reg .pred %p<3>;
    .reg .b32 %r<9>; /* a comment
    over lines */
    .reg .b64 %rd<4>;
    .shared .align 8 .b8 slots[64];
    .loc 1 2 3
    ld.param.b64 %rd1, [scale_param_0];
    ld.param.b32 %r1, [scale_param_1+0];
    mov.u32 %r2, %tid.x;
    setp.ge.s32 %p1|%p2, %r2, %r1;
$L__LOOP:
    @!%p1 bra $L__LOOP;
    { .reg .b32 %r1; mov.b32 %r1, 7; mov.b32 %r3, %r1; }
    ld.global.v4.b32 {%r4, %r5, _, %r7}, [%rd1+-16];
    fma.rn.f32 %r8, %r4, 0f3F800000, %r5;
    add.s64 %rd2, %rd1, -0x10;
    @%p2 bra DONE;
DONE:
    ret;
}
"""


def test_a_kernel_becomes_data() -> None:
    module = parse(SOURCE)
    assert (module.version, module.target) == ("8.8", "sm_90a")
    kernel = module.kernels["scale"]
    assert [(p.name, p.size, p.align) for p in kernel.parameters] == [("scale_param_0", 8, 8), ("scale_param_1", 4, 4)]
    assert kernel.block == (64, 1, 1)
    assert {v.name: v.size for v in kernel.shared} == {"pool": 0, "slots": 64}
    assert len([name for name, kind in kernel.registers.items() if kind == "b32"]) == 10
    branch = next(i for i in kernel.instructions if i.opcode == "bra")
    assert branch.guard == Negated(Name("%p1"))
    assert kernel.instructions[kernel.labels["$L__LOOP"]] is branch
    compare = next(i for i in kernel.instructions if i.opcode == "setp.ge.s32")
    assert compare.operands[0] == Pair(Name("%p1"), Name("%p2"))
    assert compare.line == 22
    load = next(i for i in kernel.instructions if i.opcode == "ld.global.v4.b32")
    assert load.operands[0] == Vector((Name("%r4"), Name("%r5"), Name("_"), Name("%r7")))
    assert load.operands[1] == Address(Name("%rd1"), -16)
    fma = next(i for i in kernel.instructions if i.opcode == "fma.rn.f32")
    assert fma.operands[2] == Immediate(0x3F800000, 32)
    assert next(i for i in kernel.instructions if i.opcode == "add.s64").operands[2] == Immediate(-16)


def test_names_of_an_inner_block_are_its_own() -> None:
    kernel = parse(SOURCE).kernels["scale"]
    inner, outer = (i for i in kernel.instructions if i.opcode == "mov.b32")
    assert inner.operands[0] == outer.operands[1] == Name("%r1#1")
    assert outer.operands[0] == Name("%r3")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mov.u32 %r2, %tid.x;", "mov.u32 %r2 %tid.x;", "expected ';'"),
        (".reg .pred %p<3>;", ".reg .pred %p<3>; .reg .pred %p1;", "defined twice"),
        (".reg .pred %p<3>;", ".reg .quad %p<3>;", "is not a type"),
        (".reg .pred %p<3>;", ".reg .b32 %x<99999999>;", "99999999 registers"),
        (".address_size 64", ".address_size 32", "64-bit"),
        (".address_size 64", ".func f;", "not supported at module scope"),
        (".maxntid 64, 1, 1", ".explicitcluster", "is not supported"),
        ("slots[64];", "slots[64] = 3;", "initialised variables"),
        ("slots[64];", "slots[640000];", "too large"),
        (".shared .align 8 .b8 slots", ".local .align 8 .b8 slots", "not supported in a kernel"),
        ("    ret;\n}", "    ret;\n", "has no end"),
        ("[%rd1+-16]", "[%rd1+-16, {%r1}]", "tensor coordinates"),
        ("mov.u32 %r2, %tid.x;", "mov.u32 %r2, ?;", "no PTX token"),
    ],
)
def test_errors_name_line_and_text(old: str, new: str, message: str) -> None:
    with pytest.raises(PtxError, match=re.escape(message)) as caught:
        parse(SOURCE.replace(old, new))
    assert re.match(r"line \d+: .*\[.*\]$", str(caught.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.b32 %r1, %r2;", "instruction frobnicate.b32 is not supported"),
        ("add.ftz.s32 %r1, %r2, %r3;", "not supported"),
        ("st.async.b32 [%rd1], %r1;", "not supported"),
        ("ld.global.fancy.b32 %r1, [%rd1];", "not supported"),
        ("ld.release.gpu.global.b32 %r1, [%rd1];", "not supported"),
        ("ld.global.v2.b32 %r1, [%rd1];", "1 registers for 2 values"),
        ("ld.global.b64 %r1, [%rd1];", "narrower"),
        ("ld.param.b64 %rd1, [scale_param_0+4];", "outside of the kernel's parameters"),
        ("add.s32 %r1, %r2;", "operands"),
        ("add.s32 %r1, %r2, %rd1;", "is declared .b64"),
        ("add.s32 %r1, %r2, %p1;", "is declared .pred"),
        ("add.s32 %r1, %r2, %nobody;", "not supported"),
        ("mov.u64 %rd1, %clock64;", "not supported"),
        ("bra NOWHERE;", "no label NOWHERE"),
        ("atom.global.add.v4.f32 %r1, [%rd1], {%r1, %r2, %r3, %r4};", "not supported"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "not supported"),
        ("barrier.sync 0;", "not supported"),
        ("wgmma.fence.sync.aligned;", "not supported"),
    ],
)
def test_what_is_not_supported_is_an_error(text: str, message: str) -> None:
    source = SOURCE.replace("    ret;\n}", f"    {text}\n    ret;\n}}")
    with pytest.raises(PtxError, match=re.escape(message)) as caught:
        lower(parse(source).kernels["scale"])
    assert text.rstrip(";").split()[0] in str(caught.value)


def test_the_example_itself_is_supported() -> None:
    code = lower(parse(SOURCE).kernels["scale"])
    assert code.static_shared == 64
    assert len(code.rows) == len(code.origin)


PIECES = st.sampled_from(
    [".reg .b32 %r<4>;", "{", "}", ";", "@%p1", "ret;", ".shared", "[", "]", "0f3F", "//", "/*", '"', "|"]
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(SOURCE)), st.integers(0, 40), st.one_of(PIECES, st.text(max_size=12)))
def test_damaged_text_is_refused_or_read(start: int, length: int, inserted: str) -> None:
    text = SOURCE[:start] + inserted + SOURCE[start + length :]
    # Anything but PtxError fails the test.
    with contextlib.suppress(PtxError):
        for kernel in parse(text).kernels.values():
            lower(kernel)
