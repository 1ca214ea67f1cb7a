"""Single PTX instructions, addresses and reductions that the stages are written with.

Addresses are Int64 and byte offsets are explicit, so a kernel's parameters are plain 8-byte numbers.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

WARP = 32


def ptx(code: str, results: list[Any], *arguments: Any) -> Any:
    """Inline PTX; `$wi` are results, `$ri` arguments, in double angle brackets: <<$w0>>."""
    text = code.replace("<<", "{").replace(">>", "}")
    return cute.arch.inline_ptx(text, write_only_types=results, read_only_args=list(arguments))


def load_words(address: Any) -> list[Any]:
    """16 bytes of global memory that others may have written, as four Int32."""
    names = ", ".join(f"<<$w{i}>>" for i in range(4))
    return list(ptx("ld.global.v4.b32 { " + names + " }, [<<$r0>>];", [Int32] * 4, address))


def load_weights(address: Any) -> list[Any]:
    """16 bytes that nobody writes during the step and that are read once, as four Int32."""
    names = ", ".join(f"<<$w{i}>>" for i in range(4))
    form = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 { " + names + " }, [<<$r0>>];"
    return list(ptx(form, [Int32] * 4, address))


def load_word(address: Any) -> Any:
    return ptx("ld.global.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


def load_float(address: Any) -> Any:
    return ptx("ld.global.f32 <<$w0>>, [<<$r0>>];", [Float32], address)


def store_words(address: Any, words: list[Any]) -> None:
    names = ", ".join(f"<<$r{i + 1}>>" for i in range(4))
    ptx("st.global.v4.b32 [<<$r0>>], { " + names + " };", [], address, *words)


def store_word(address: Any, word: Any) -> None:
    ptx("st.global.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def store_float(address: Any, value: Any) -> None:
    ptx("st.global.f32 [<<$r0>>], <<$r1>>;", [], address, value)


def store_half(address: Any, word: Any) -> None:
    """The low 16 bits of a word."""
    ptx("{ .reg .b16 l, h; mov.b32 {l, h}, <<$r1>>; st.global.b16 [<<$r0>>], l; }", [], address, word)


def floats(word: Any) -> tuple[Any, Any]:
    """The two BF16 values of a word as Float32, low half first."""
    low = ptx("shl.b32 <<$w0>>, <<$r0>>, 16;", [Float32], word)
    high = ptx("and.b32 <<$w0>>, <<$r0>>, -65536;", [Float32], word)
    return low, high


def pair(low: Any, high: Any) -> Any:
    """Two Float32 values rounded to BF16 (nearest, ties to even) in one word."""
    return ptx("cvt.rn.bf16x2.f32 <<$w0>>, <<$r1>>, <<$r0>>;", [Int32], low, high)


def matrix_multiply(a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """mma.m16n8k16 of BF16 fragments (4 and 2 words) onto four Float32."""
    d = "{ " + ", ".join(f"<<$w{i}>>" for i in range(4)) + " }"
    groups = []
    start = 0
    for size in (4, 2, 4):
        groups.append("{ " + ", ".join(f"<<$r{i}>>" for i in range(start, start + size)) + " }")
        start += size
    code = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 " + ", ".join([d, *groups]) + ";"
    return list(ptx(code, [Float32] * 4, *a, *b, *c))


@cute.jit
def block_sum(value: Float32, scratch: Int32, threads: cutlass.Constexpr) -> Float32:
    """Sum over the CTA. `scratch`: shared address of threads / 32 floats; ends with a barrier, so it can be reused."""
    tid, _, _ = cute.arch.thread_idx()
    total = cute.arch.warp_reduction_sum(value)
    if tid % WARP == 0:
        ptx("st.shared.f32 [<<$r0>>], <<$r1>>;", [], scratch + tid // WARP * 4, total)
    cute.arch.sync_threads()
    result = Float32(0.0)
    for i in cutlass.range_constexpr(threads // WARP):
        result = result + ptx("ld.shared.f32 <<$w0>>, [<<$r0>>];", [Float32], scratch + i * 4)
    cute.arch.sync_threads()
    return result


def global_address(base: Any, offset: Any) -> Any:
    """base + offset in bytes."""
    return base + Int64(offset)


def keep_if_less(word: Any, index: Any, limit: Any) -> Any:
    """The word if index < limit, else 0."""
    code = "{ .reg .pred p; setp.lt.s32 p, <<$r1>>, <<$r2>>; selp.b32 <<$w0>>, <<$r0>>, 0, p; }"
    return ptx(code, [Int32], word, index, limit)


def least(a: Any, b: Any) -> Any:
    return ptx("min.s32 <<$w0>>, <<$r0>>, <<$r1>>;", [Int32], a, b)


def store_shared(address: Any, values: list[Any]) -> None:
    """Four Float32 to 16 aligned bytes of shared memory."""
    names = ", ".join(f"<<$r{i + 1}>>" for i in range(4))
    ptx("st.shared.v4.f32 [<<$r0>>], { " + names + " };", [], address, *values)


def load_shared(address: Any) -> Any:
    return ptx("ld.shared.f32 <<$w0>>, [<<$r0>>];", [Float32], address)
