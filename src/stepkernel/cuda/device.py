"""Single PTX instructions that the stages are written with.

Addresses are explicit: Int64 bytes in global memory, Int32 bytes in shared memory, so that what a stage touches can be
read in its source and a kernel's parameters are plain 8-byte numbers.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

WARP = 32
EVERY_LANE = 0xFFFFFFFF
FAR = 0x7FFFFFFF


def ptx(code: str, results: list[Any], *arguments: Any) -> Any:
    """Inline PTX; `$wi` are results, `$ri` arguments, in double angle brackets: <<$w0>>."""
    text = code.replace("<<", "{").replace(">>", "}")
    return cute.arch.inline_ptx(text, write_only_types=results, read_only_args=list(arguments))


def _group(kind: str, start: int, count: int) -> str:
    """Operands of a vector access: { {$w0}, {$w1}, ... }."""
    return "{ " + ", ".join(f"<<${kind}{i}>>" for i in range(start, start + count)) + " }"


# Indices.


def quotient(a: Any, n: Any) -> Any:
    """a // n of two Int32 that are not negative: one instruction or a shift, where signed numbers take six."""
    return Int32(Uint32(a) // Uint32(n))


def remainder(a: Any, n: Any) -> Any:
    """a % n of two Int32 that are not negative."""
    return Int32(Uint32(a) % Uint32(n))


# Global memory.


def load_words(address: Any) -> list[Any]:
    """16 bytes that other CTAs may have written, as four Int32."""
    return list(ptx(f"ld.global.v4.b32 {_group('w', 0, 4)}, [<<$r0>>];", [Int32] * 4, address))


def load_floats(address: Any) -> list[Any]:
    """16 bytes as four Float32."""
    return list(ptx(f"ld.global.v4.f32 {_group('w', 0, 4)}, [<<$r0>>];", [Float32] * 4, address))


def load_weights(address: Any, words: int = 4) -> list[Any]:
    """16, 8 or 4 bytes that nobody writes during the step and that are read once, as Int32."""
    if words == 1:
        return [ptx("ld.global.nc.L1::no_allocate.L2::256B.b32 <<$w0>>, [<<$r0>>];", [Int32], address)]
    form = f"ld.global.nc.L1::no_allocate.L2::256B.v{words}.b32 {_group('w', 0, words)}, [<<$r0>>];"
    return list(ptx(form, [Int32] * words, address))


def fetch_bytes(address: Any, size: Any) -> None:
    """Brings `size` bytes to L2, without waiting for them; both are multiples of 16."""
    ptx("cp.async.bulk.prefetch.L2.global [<<$r0>>], <<$r1>>;", [], address, size)


def load_two_words(address: Any) -> list[Any]:
    """8 bytes that other CTAs may have written, as two Int32."""
    return list(ptx(f"ld.global.v2.b32 {_group('w', 0, 2)}, [<<$r0>>];", [Int32] * 2, address))


def load_float(address: Any) -> Any:
    return ptx("ld.global.f32 <<$w0>>, [<<$r0>>];", [Float32], address)


def load_int(address: Any) -> Any:
    return ptx("ld.global.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


def load_long(address: Any) -> Any:
    return ptx("ld.global.b64 <<$w0>>, [<<$r0>>];", [Int64], address)


def load_half(address: Any) -> Any:
    """16 bits, the upper half of the word is zero."""
    code = "{ .reg .b16 h; ld.global.b16 h, [<<$r0>>]; cvt.u32.u16 <<$w0>>, h; }"
    return ptx(code, [Int32], address)


def store_words(address: Any, words: list[Any]) -> None:
    """2 or 4 words to as many aligned bytes."""
    ptx(f"st.global.v{len(words)}.b32 [<<$r0>>], {_group('r', 1, len(words))};", [], address, *words)


def store_floats(address: Any, values: list[Any]) -> None:
    """2 or 4 Float32 to as many aligned bytes."""
    ptx(f"st.global.v{len(values)}.f32 [<<$r0>>], {_group('r', 1, len(values))};", [], address, *values)


def store_int(address: Any, word: Any) -> None:
    ptx("st.global.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def store_float(address: Any, value: Any) -> None:
    ptx("st.global.f32 [<<$r0>>], <<$r1>>;", [], address, value)


def store_half(address: Any, word: Any) -> None:
    """The low 16 bits of a word."""
    ptx("{ .reg .b16 l, h; mov.b32 {l, h}, <<$r1>>; st.global.b16 [<<$r0>>], l; }", [], address, word)


# Memory that other GPUs write or read too. Words, so that no access overlaps a part of another one.


def post_words(address: Any, words: list[Any]) -> None:
    """Four words to a mailbox of any rank; each of them arrives by itself."""
    ptx(f"st.relaxed.sys.global.v4.b32 [<<$r0>>], {_group('r', 1, 4)};", [], address, *words)


def cast_words(address: Any, words: list[Any]) -> None:
    """The same to the mailboxes of all ranks at once, by a multicast address. Bits are only moved: the type names the
    size of the words."""
    ptx(f"multimem.st.relaxed.sys.global.v4.f32 [<<$r0>>], {_group('r', 1, 4)};", [], address, *words)


def poll_words(address: Any) -> list[Any]:
    """Four words of the own mailbox as they are now."""
    return list(ptx(f"ld.relaxed.sys.global.v4.b32 {_group('w', 0, 4)}, [<<$r0>>];", [Int32] * 4, address))


def post_word(address: Any, word: Any) -> None:
    ptx("st.relaxed.sys.global.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def poll_word(address: Any) -> Any:
    return ptx("ld.relaxed.sys.global.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


# Shared memory.


def store_shared(address: Any, values: list[Any]) -> None:
    """1, 2 or 4 Float32 to as many aligned bytes."""
    if len(values) == 1:
        ptx("st.shared.f32 [<<$r0>>], <<$r1>>;", [], address, values[0])
    else:
        ptx(f"st.shared.v{len(values)}.f32 [<<$r0>>], {_group('r', 1, len(values))};", [], address, *values)


def store_shared_words(address: Any, words: list[Any]) -> None:
    """4 words to 16 aligned bytes."""
    ptx(f"st.shared.v4.b32 [<<$r0>>], {_group('r', 1, 4)};", [], address, *words)


def store_shared_int(address: Any, word: Any) -> None:
    ptx("st.shared.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def mark_shared(address: Any, word: Any) -> None:
    """A word that several threads may write at the same time."""
    ptx("st.relaxed.cta.shared.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def store_shared_long(address: Any, word: Any) -> None:
    ptx("st.shared.b64 [<<$r0>>], <<$r1>>;", [], address, word)


def load_shared(address: Any) -> Any:
    return ptx("ld.shared.f32 <<$w0>>, [<<$r0>>];", [Float32], address)


def load_shared_floats(address: Any) -> list[Any]:
    """16 aligned bytes as four Float32."""
    return list(ptx(f"ld.shared.v4.f32 {_group('w', 0, 4)}, [<<$r0>>];", [Float32] * 4, address))


def load_shared_words(address: Any) -> list[Any]:
    """16 aligned bytes as four Int32."""
    return list(ptx(f"ld.shared.v4.b32 {_group('w', 0, 4)}, [<<$r0>>];", [Int32] * 4, address))


def load_shared_byte(address: Any) -> Any:
    """8 bits as Int32."""
    code = "{ .reg .b16 h; ld.shared.b8 h, [<<$r0>>]; cvt.u32.u16 <<$w0>>, h; }"
    return ptx(code, [Int32], address)


def load_shared_int(address: Any) -> Any:
    return ptx("ld.shared.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


def load_shared_long(address: Any) -> Any:
    return ptx("ld.shared.b64 <<$w0>>, [<<$r0>>];", [Int64], address)


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
    groups = [_group("r", start, size) for start, size in ((0, 4), (4, 2), (6, 4))]
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 " + ", ".join([_group("w", 0, 4), *groups]) + ";"
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
