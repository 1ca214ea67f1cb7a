"""The greedy choice: the largest logit, the lower id among equals, -1 for a row with a NaN.

A logit and its id make one 64-bit number whose order is the order of preference: the bits of the logit, mapped so that
they grow with it and NaN is above everything, then the inverted id.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_floats, load_long, load_shared_long, ptx, store_int, store_shared_long
from stepkernel.cuda.dims import THREADS, WARPS, ArgmaxDims
from stepkernel.cuda.values import quotient, remainder
from stepkernel.cuda.walk import arrive_last, words

NAN = 0xFFFFFFFF


def preference(value: Float32, index: Int32) -> Int64:
    """-0 counts as 0."""
    code = (
        "{ .reg .pred n; .reg .b32 b, s, i; .reg .f32 v; add.f32 v, <<$r0>>, 0f00000000; mov.b32 b, v; "
        "shr.s32 s, b, 31; or.b32 s, s, 0x80000000; xor.b32 b, b, s; setp.nan.f32 n, v, v; "
        f"selp.b32 b, {NAN}, b, n; not.b32 i, <<$r1>>; mov.b64 <<$w0>>, {{i, b}}; }}"
    )
    return ptx(code, [Int64], value, index)


def better(a: Int64, b: Int64) -> Int64:
    return ptx("max.u64 <<$w0>>, <<$r0>>, <<$r1>>;", [Int64], a, b)


def exchange_long(value: Int64, distance: int) -> Int64:
    code = (
        "{ .reg .b32 l, h; mov.b64 {l, h}, <<$r0>>; "
        f"shfl.sync.bfly.b32 l, l, {distance}, 31, -1; shfl.sync.bfly.b32 h, h, {distance}, 31, -1; "
        "mov.b64 <<$w0>>, {l, h}; }"
    )
    return ptx(code, [Int64], value)


def warp_best(value: Int64) -> Int64:
    for distance in (16, 8, 4, 2, 1):
        value = better(value, exchange_long(value, distance))
    return value


def id_of(best: Int64) -> Int32:
    """The id inside a preference, -1 for a NaN."""
    code = (
        "{ .reg .pred n; .reg .b32 l, h; mov.b64 {l, h}, <<$r0>>; not.b32 l, l; "
        f"setp.eq.u32 n, h, {NAN}; selp.b32 <<$w0>>, -1, l, n; }}"
    )
    return ptx(code, [Int32], best)


@cute.jit
def argmax(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[ArgmaxDims]
) -> None:
    """logits f32 [rows, vocab]; out int32 [rows]; partial u64 [rows, parts]. The last CTA of a row takes the best."""
    tid, _, _ = cute.arch.thread_idx()
    logits, out = words(record, dims, "logits", "out")
    chunks = dims.vocab // 4 // dims.parts
    piece = cta
    while piece < dims.rows * dims.parts:
        row = quotient(piece, dims.parts)
        part = remainder(piece, dims.parts)
        best = Int64(0)
        for chunk in cutlass.range(part * chunks + tid, (part + 1) * chunks, THREADS, unroll=1):
            values = load_floats(logits + Int64(row) * (dims.vocab * 4) + Int64(chunk) * 16)
            for k in cutlass.range_constexpr(4):
                best = better(best, preference(values[k], chunk * 4 + k))
        best = warp_best(best)
        if tid % 32 == 0:
            store_shared_long(scratch + tid // 32 * 8, best)
        cute.arch.sync_threads()
        for k in cutlass.range_constexpr(WARPS):
            best = better(best, load_shared_long(scratch + k * 8))
        if cutlass.const_expr(dims.parts == 1):
            if tid == 0:
                store_int(out + Int64(row) * 4, id_of(best))
            cute.arch.sync_threads()
        else:
            partial, counters = words(record, dims, "partial", "counters")
            if tid == 0:
                ptx("st.global.b64 [<<$r0>>], <<$r1>>;", [], partial + Int64(piece) * 8, best)
            last = arrive_last(counters + Int64(row) * 4, dims.parts, scratch + WARPS * 8)
            if last == 1 and tid == 0:
                for k in cutlass.range_constexpr(dims.parts):
                    best = better(best, load_long(partial + Int64(row) * (dims.parts * 8) + k * 8))
                store_int(out + Int64(row) * 4, id_of(best))
        piece = piece + ctas
