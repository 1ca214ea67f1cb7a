"""The short convolution of KDA and the window of rows that it needs of earlier steps (spec 2.5.2, 5.5)."""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import load_floats, load_half, store_half, store_shared
from stepkernel.cuda.dims import THREADS, KdaDims
from stepkernel.cuda.functions import silu
from stepkernel.cuda.stages.states import D
from stepkernel.cuda.values import floats
from stepkernel.cuda.walk import words


@cute.jit
def convolve(
    which: cutlass.Constexpr[int],
    request: Int32,
    head: Int32,
    channel: Int32,
    target: Int32,
    window: Int32,
    first: Int32,
    record: Int64,
    dims: cutlass.Constexpr[KdaDims],
    stride: cutlass.Constexpr[int],
) -> None:
    """One channel of q, k or v (0, 1, 2) over all queries: taps, then SiLU; `stride` floats between the results."""
    qkv, filters, conv, slot_bytes = words(
        record, dims, "qkv", ("filter_q", "filter_k", "filter_v")[which], "conv", "conv_slot"
    )
    width = 3 * dims.heads * D
    column = head * D + channel
    weights = load_floats(filters + Int64(column) * 16)
    history = conv + Int64(window) * slot_bytes + (Int64(first) * width + which * dims.heads * D + Int64(column)) * 2
    taps = [floats(load_half(history + j * (width * 2)))[0] for j in range(3)]
    for query in cutlass.range_constexpr(dims.queries):
        row = request * dims.queries + query
        new, _ = floats(load_half(qkv + (Int64(row) * width + which * dims.heads * D + Int64(column)) * 2))
        taps.append(new)
        mixed = taps[query] * weights[0] + taps[query + 1] * weights[1]
        mixed = mixed + taps[query + 2] * weights[2] + taps[query + 3] * weights[3]
        store_shared(target + query * stride * 4, [silu(mixed)])


@cute.jit
def move_window(
    request: Int32,
    head: Int32,
    window: Int32,
    first: Int32,
    stride: Int64,
    record: Int64,
    dims: cutlass.Constexpr[KdaDims],
) -> None:
    """The rows from which the next step's history can begin: after each number of accepted rows where the request has
    a state for each or recovers it, otherwise after the last row only (spec 5.5). A thread moves channels of its own.
    """
    qkv, conv, slot_bytes = words(record, dims, "qkv", "conv", "conv_slot")
    tid, _, _ = cute.arch.thread_idx()
    width = 3 * dims.heads * D
    for index in cutlass.range(tid, 3 * D, THREADS, unroll=1):
        column = Int64(index // D * (dims.heads * D) + head * D + index % D) * 2
        rows = conv + Int64(window) * slot_bytes + column
        taps = [load_half(rows + Int64(first + j) * (width * 2)) for j in range(3)]
        for query in cutlass.range_constexpr(dims.queries):
            taps.append(load_half(qkv + Int64(request * dims.queries + query) * (width * 2) + column))
        if stride > 1:
            for j in cutlass.range_constexpr(dims.queries + 2):
                store_half(rows + j * (width * 2), taps[j + 1])
        else:
            for j in cutlass.range_constexpr(3):
                store_half(rows + j * (width * 2), taps[dims.queries + j])
