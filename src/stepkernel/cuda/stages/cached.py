"""How attention reads latent rows and queries: as they lie, BF16, or E4M3 that becomes F16, which holds it exactly.

F16 shares of at most 1 in two parts have an error of 2^-22 of a share or 2^-25 of the largest one, whichever is more.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_shared_words, load_two_words, load_words, ptx, store_shared_words
from stepkernel.cuda.dims import THREADS, AttendDims
from stepkernel.cuda.stages.norm import as_fp8
from stepkernel.cuda.values import floats, half_floats, half_pair, least, pair, quotient, remainder, widened


def value_bytes(dims: AttendDims) -> int:
    """Of a cached value."""
    return 1 if dims.fp8 else 2


def format_of(dims: AttendDims) -> str:
    """What `matrix_multiply` takes."""
    return "f16" if dims.fp8 else "bf16"


def load_cached(address: Any, dims: AttendDims) -> list[Any]:
    """8 cached values as four words."""
    if not dims.fp8:
        return load_words(address)
    return [half for word in load_two_words(address) for half in widened(word)]


def load_query(address: Any, dims: AttendDims) -> list[Any]:
    """8 values of a query as four words: from global memory, or from where `round_queries` has put them."""
    return load_shared_words(address) if dims.fp8 else load_words(address)


def share_pair(low: Any, high: Any, dims: AttendDims) -> Any:
    """A word of two rounded shares."""
    return half_pair(low, high) if dims.fp8 else pair(low, high)


def shares_of(word: Any, dims: AttendDims) -> tuple[Any, Any]:
    """The two shares of a word as Float32."""
    return half_floats(word) if dims.fp8 else floats(word)


def finite(word: Any, dims: AttendDims) -> Any:
    """A word of two values with infinities and NaN replaced by 0."""
    low, high = ("0x7c00", "0x7c000000") if dims.fp8 else ("0x7f80", "0x7f800000")
    code = (
        f"{{ .reg .pred p, q; .reg .b32 e, r; and.b32 e, <<$r0>>, {low}; setp.eq.s32 p, e, {low}; "
        f"and.b32 e, <<$r0>>, {high}; setp.eq.s32 q, e, {high}; "
        "and.b32 r, <<$r0>>, 0xffff0000; selp.b32 r, r, <<$r0>>, p; "
        "and.b32 e, r, 0x0000ffff; selp.b32 <<$w0>>, e, r, q; }"
    )
    return ptx(code, [Int32], word)


def query_start(request: Any, group: Any, column: Any, dims: AttendDims) -> Any:
    """Bytes before a query of a group; the last one stands for those behind it."""
    chosen = least(group * (8 * dims.tiles) + column, Int32(dims.pairs - 1))
    row = request * dims.queries + quotient(chosen, dims.heads)
    return Int64(row * dims.heads + remainder(chosen, dims.heads)) * ((dims.lora + dims.rope) * 2)


@cute.jit
def round_queries(
    request: Int32, group: Int32, x: Int64, factor: Float32, target: Int32, dims: cutlass.Constexpr[AttendDims]
) -> None:
    """The queries of a group times `factor`, rounded to E4M3, as F16 to shared memory, `query_stride` bytes apart. A
    barrier must follow."""
    tid, _, _ = cute.arch.thread_idx()
    pairs = 8 * dims.tiles
    chunks = (dims.lora + dims.rope) // 8
    for index in cutlass.range(tid, pairs * chunks, THREADS, unroll=1):
        column = quotient(index, chunks)
        chunk = remainder(index, chunks)
        source = x + query_start(request, group, column, dims) + Int64(chunk) * 16
        halves = [half for word in as_fp8(load_words(source), factor) for half in widened(word)]
        store_shared_words(target + column * dims.query_stride + chunk * 16, halves)
