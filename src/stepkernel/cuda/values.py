"""Single PTX instructions that the stages are written with: values in registers, of a thread and of a warp."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from stepkernel.cuda.device import WARP, group, load_shared, ptx, store_shared

# Indices.


def quotient(a: Any, n: Any) -> Any:
    """a // n of two Int32 that are not negative: one instruction or a shift, where signed numbers take six."""
    return Int32(Uint32(a) // Uint32(n))


def remainder(a: Any, n: Any) -> Any:
    """a % n of two Int32 that are not negative."""
    return Int32(Uint32(a) % Uint32(n))


# Values.


def floats(word: Any) -> tuple[Any, Any]:
    """The two BF16 values of a word as Float32, low half first."""
    low = ptx("shl.b32 <<$w0>>, <<$r0>>, 16;", [Float32], word)
    high = ptx("and.b32 <<$w0>>, <<$r0>>, -65536;", [Float32], word)
    return low, high


def pair(low: Any, high: Any) -> Any:
    """Two Float32 values rounded to BF16 (nearest, ties to even) in one word."""
    return ptx("cvt.rn.bf16x2.f32 <<$w0>>, <<$r1>>, <<$r0>>;", [Int32], low, high)


def rounded(value: Any) -> Any:
    """A Float32 rounded to the BF16 grid."""
    return floats(pair(value, Float32(0.0)))[0]


def half_floats(word: Any) -> tuple[Any, Any]:
    """The two F16 values of a word as Float32, low half first."""
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, <<$r0>>; cvt.f32.f16 <<$w0>>, l; cvt.f32.f16 <<$w1>>, h; }"
    low, high = ptx(code, [Float32, Float32], word)
    return low, high


def half_pair(low: Any, high: Any) -> Any:
    """Two Float32 values rounded to F16 in one word."""
    return ptx("cvt.rn.f16x2.f32 <<$w0>>, <<$r1>>, <<$r0>>;", [Int32], low, high)


def narrowed(values: list[Any]) -> Any:
    """Four Float32 values as E4M3 (nearest, ties to even, infinities and too large ones become 448) in one word."""
    code = (
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, <<$r1>>, <<$r0>>; "
        "cvt.rn.satfinite.e4m3x2.f32 h, <<$r3>>, <<$r2>>; mov.b32 <<$w0>>, {l, h}; }"
    )
    return ptx(code, [Int32], *values)


def widened(word: Any) -> tuple[Any, Any]:
    """The four E4M3 values of a word as two words of F16, which holds them exactly."""
    code = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, <<$r0>>; cvt.rn.f16x2.e4m3x2 <<$w0>>, l; cvt.rn.f16x2.e4m3x2 <<$w1>>, h; }"
    )
    low, high = ptx(code, [Int32, Int32], word)
    return low, high


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return ptx("fma.rn.f32 <<$w0>>, <<$r0>>, <<$r1>>, <<$r2>>;", [Float32], a, b, c)


def bits(value: Any) -> Any:
    """The bits of a Float32 as Int32."""
    return ptx("mov.b32 <<$w0>>, <<$r0>>;", [Int32], value)


def bytes_of(first: Any, second: Any, selector: Any) -> Any:
    """prmt: byte i of the result is byte (selector >> 4i) & 7 of second:first."""
    return ptx("prmt.b32 <<$w0>>, <<$r0>>, <<$r1>>, <<$r2>>;", [Int32], first, second, Int32(selector))


def least(a: Any, b: Any) -> Any:
    return ptx("min.s32 <<$w0>>, <<$r0>>, <<$r1>>;", [Int32], a, b)


def most(a: Any, b: Any) -> Any:
    return ptx("max.s32 <<$w0>>, <<$r0>>, <<$r1>>;", [Int32], a, b)


def replaced(word: Any, old: int, new: int) -> Any:
    """`new` instead of `old`."""
    code = f"{{ .reg .pred p; setp.eq.b32 p, <<$r0>>, {old}; selp.b32 <<$w0>>, {new}, <<$r0>>, p; }}"
    return ptx(code, [Int32], word)


# Warps.


def ballot(condition: Any) -> Any:
    """Mask of the lanes whose Int32 is not 0; all lanes take part."""
    code = "{ .reg .pred p; setp.ne.s32 p, <<$r0>>, 0; vote.sync.ballot.b32 <<$w0>>, p, -1; }"
    return ptx(code, [Int32], condition)


def warp_most(word: Any) -> Any:
    """Largest unsigned value of the warp."""
    return ptx("redux.sync.max.u32 <<$w0>>, <<$r0>>, -1;", [Int32], word)


def warp_least(word: Any) -> Any:
    """Smallest unsigned value of the warp."""
    return ptx("redux.sync.min.u32 <<$w0>>, <<$r0>>, -1;", [Int32], word)


def exchange(value: Any, distance: int) -> Any:
    """The Float32 of the lane whose number differs in the bits of `distance`."""
    code = f"shfl.sync.bfly.b32 <<$w0>>, <<$r0>>, {distance}, 31, -1;"
    return ptx(code, [Float32], value)


def warp_sum(value: Any) -> Any:
    for distance in (16, 8, 4, 2, 1):
        value = value + exchange(value, distance)
    return value


def matrix_multiply(a: list[Any], b: list[Any], c: list[Any], kind: str = "bf16") -> list[Any]:
    """mma.m16n8k16 of BF16 or F16 fragments (4 and 2 words) onto four Float32.

    With g = lane / 4 and t = lane % 4, a holds rows g, g + 8, g, g + 8 at columns 2t, 2t + 1 (the last two words: 8
    further), b column g at the same k, and c rows g (twice) and g + 8 at columns 2t, 2t + 1.
    """
    groups = [group("r", start, size) for start, size in ((0, 4), (4, 2), (6, 4))]
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 " + ", ".join([group("w", 0, 4), *groups]) + ";"
    return list(ptx(code, [Float32] * 4, *a, *b, *c))


@cute.jit
def block_sum(value: Float32, scratch: Int32, threads: cutlass.Constexpr) -> Float32:
    """Sum over the CTA. `scratch`: shared address of threads / 32 floats; ends with a barrier, so it can be reused."""
    tid, _, _ = cute.arch.thread_idx()
    total = warp_sum(value)
    if tid % WARP == 0:
        store_shared(scratch + tid // WARP * 4, [total])
    cute.arch.sync_threads()
    result = Float32(0.0)
    for i in cutlass.range_constexpr(threads // WARP):
        result = result + load_shared(scratch + i * 4)
    cute.arch.sync_threads()
    return result
