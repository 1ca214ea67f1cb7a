"""Where the parts of attention over a context go (attend.py): written, and merged by their maxima and sums.

The result of a pair of query and head is the mixed latent, or with several ranks what they merge later: sums that no
total has divided yet, then the largest score and the total (spec 4.3).
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_float, store_floats, store_int
from stepkernel.cuda.dims import THREADS, AttendDims
from stepkernel.cuda.functions import base_of, exp, larger, nothing
from stepkernel.cuda.values import least, pair, quotient, remainder
from stepkernel.cuda.walk import words
from stepkernel.program.stages import PARTIAL


@cute.jit
def write(
    piece: Int32,
    request: Int32,
    group: Int32,
    largest: list[Float32],
    totals: list[Float32],
    mixed: list[Float32],
    record: Int64,
    dims: cutlass.Constexpr[AttendDims],
) -> None:
    """The result of a part that is the whole context, or what the merge needs of it."""
    if cutlass.const_expr(dims.splits > 1):
        partial, statistics = words(record, dims, "partial", "statistics")
    else:
        (out,) = words(record, dims, "out")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    t = lane % 4
    pairs = 8 * dims.tiles
    for index in cutlass.range_constexpr(2 * dims.tiles):
        column = 8 * (index // 2) + 2 * t + index % 2
        chosen = group * pairs + column
        if chosen < dims.pairs:
            if cutlass.const_expr(dims.splits > 1):
                first_lanes = warp == 0 and g == 0
                if first_lanes:
                    place = statistics + Int64(piece * pairs + column) * 8
                    store_floats(place, [largest[index], totals[index]])
            if warp * 64 < dims.lora:
                for j in cutlass.range_constexpr(4):
                    first = mixed[16 * (index // 2) + 4 * j + index % 2]
                    second = mixed[16 * (index // 2) + 4 * j + 2 + index % 2]
                    value = warp * 64 + 8 * g + 2 * j
                    if cutlass.const_expr(dims.splits > 1):
                        place = Int64(piece * pairs + column) * (dims.lora * 4) + Int64(value) * 4
                        store_floats(partial + place, [first, second])
                    else:
                        _store(out, request, chosen, value, first, second, largest[index], totals[index], dims)


@cute.jit
def _store(
    out: Int64,
    request: Int32,
    chosen: Int32,
    value: Int32,
    first: Float32,
    second: Float32,
    largest: Float32,
    total: Float32,
    dims: cutlass.Constexpr[AttendDims],
) -> None:
    """Two latent values of a pair; a query that sees no token gives zeros."""
    row = request * dims.queries + quotient(chosen, dims.heads)
    head = Int64(row * dims.heads + remainder(chosen, dims.heads))
    if cutlass.const_expr(dims.ranks > 1):
        start = out + head * ((dims.lora + PARTIAL) * 4)
        store_floats(start + Int64(value) * 4, [first, second])
        if value == 0:
            zero = Float32(0.0)
            store_floats(start + dims.lora * 4, [largest, total, zero, zero])
            store_floats(start + (dims.lora * 4 + 16), [zero] * 4)
    else:
        place = head * (dims.lora * 2) + Int64(value) * 2
        word = Int32(0)
        if total != 0.0:
            word = pair(first / total, second / total)
        store_int(out + place, word)


@cute.jit
def merge(request: Int32, group: Int32, record: Int64, dims: cutlass.Constexpr[AttendDims]) -> None:
    out, partial, statistics = words(record, dims, "out", "partial", "statistics")
    tid, _, _ = cute.arch.thread_idx()
    pairs = 8 * dims.tiles
    half = dims.lora // 2
    begin = (request * dims.groups + group) * dims.splits
    count = least(Int32(pairs), Int32(dims.pairs) - group * pairs)
    for index in cutlass.range(tid, count * half, THREADS, unroll=1):
        column = quotient(index, half)
        value = remainder(index, half) * 2
        top = nothing()
        for k in cutlass.range(dims.splits, unroll=1):
            top = larger(top, load_float(statistics + Int64((begin + k) * pairs + column) * 8))
        base = base_of(top)
        total = Float32(0.0)
        first = Float32(0.0)
        second = Float32(0.0)
        for k in cutlass.range(dims.splits, unroll=1):
            at = Int64((begin + k) * pairs + column)
            share = exp(load_float(statistics + at * 8) - base)
            total = total + share * load_float(statistics + at * 8 + 4)
            place = partial + at * (dims.lora * 4) + Int64(value) * 4
            first = first + share * load_float(place)
            second = second + share * load_float(place + 4)
        _store(out, request, group * pairs + column, value, first, second, top, total, dims)
