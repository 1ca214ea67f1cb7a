"""KDA between its projections: convolution, gates, recurrence, gated norm (spec 2.5.2 to 2.5.7).

A head of a request is shared by `parts` CTAs, each with some value rows of the state; a warp keeps whole rows in
registers, four key columns per lane, so the state is read and written once in 16-byte accesses. The CTA that comes last
has the outputs of all rows: it makes the gated norm, and moves the convolution window, which nobody needs any more.
How states are kept: see `states`.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import (
    load_float,
    load_floats,
    load_half,
    load_int,
    load_shared,
    load_shared_floats,
    store_float,
    store_shared,
    store_words,
)
from stepkernel.cuda.dims import WARPS, KdaDims
from stepkernel.cuda.functions import exp, inverse_root, sigmoid, softplus
from stepkernel.cuda.stages.states import (
    D,
    fold,
    kept,
    load_state,
    record_keys,
    recorded,
    store_state,
    updated,
)
from stepkernel.cuda.stages.window import convolve, move_window
from stepkernel.cuda.values import floats, most, pair, quotient, remainder, warp_sum
from stepkernel.cuda.walk import arrive_last, step_words, words

UNIT_EPS = 1e-6  # spec 2.5.3


@cute.jit
def kda(cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[KdaDims]) -> None:
    """qkv bf16 [rows, 3, heads, 128]; gamma, gate, out bf16 [rows, heads, 128]; beta bf16 [rows, heads]; conv bf16
    [slots, window, 3, heads, 128]; state f32 or bf16 [slots, heads, 128, 128]. A request without a slot gives zeros.

    Shared memory: for every query q, k and decay (128 floats each), the values of this part, beta, outputs.
    """
    (table,) = words(record, dims, "slots")
    stride, accepted = step_words(step, "slot_stride", "accepted")
    piece = cta
    while piece < dims.requests * dims.heads * dims.parts:
        request = quotient(piece, dims.heads * dims.parts)
        head = remainder(quotient(piece, dims.parts), dims.heads)
        part = remainder(piece, dims.parts)
        slots = table + Int64(request) * stride * 4
        first = load_int(accepted + Int64(request) * 4) - 1
        window = load_int(slots)
        count = first + 1
        if cutlass.const_expr(dims.recovers):
            first = most(first, Int32(0))
            source = window
        else:
            source = load_int(slots + Int64(first) * 4)
        if window > 0 and source > 0:
            _prepare(request, head, part, window, first, record, scratch, dims)
            _recur(request, head, part, source, count, slots, stride, record, scratch, dims)
            last = Int32(1)
            if cutlass.const_expr(dims.parts > 1):
                (counters,) = words(record, dims, "counters")
                flag = scratch + dims.shared_bytes() - 16
                last = arrive_last(counters + Int64(request * dims.heads + head) * 4, dims.parts, flag)
            if last == 1:
                _finish(request, head, record, scratch, dims)
                every = Int64(dims.queries) if dims.recovers else stride  # rows that may be the last one accepted
                move_window(request, head, window, first, every, record, dims)
                if cutlass.const_expr(dims.recovers):
                    _, keys, _, _, _, _ = layout(scratch, dims)
                    record_keys(window, head, keys, record, dims)
        elif part == 0:
            _zeros(request, head, record, dims)
        cute.arch.sync_threads()
        piece = piece + ctas


def layout(scratch: Any, dims: KdaDims) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Shared addresses of q, k, decay [queries, 128], v [queries, rows of a part], beta [queries], o [queries, 128]."""
    row = 4 * D * dims.queries
    v = scratch + 3 * row
    o = v + row // dims.parts
    return scratch, scratch + row, scratch + 2 * row, v, o + row, o


@cute.jit
def _prepare(
    request: Int32,
    head: Int32,
    part: Int32,
    window: Int32,
    first: Int32,
    record: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[KdaDims],
) -> None:
    """q and k (convolved, normalised), decay, v of this part and beta of every query into shared memory."""
    gamma, beta, a_log, dt_bias = words(record, dims, "gamma", "beta", "a_log", "dt_bias")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    q_at, k_at, decay_at, v_at, beta_at, _ = layout(scratch, dims)
    values = D // dims.parts
    if tid < D:
        convolve(0, request, head, tid, q_at + tid * 4, window, first, record, dims, D)
        rate = exp(load_float(a_log + Int64(head) * 4))
        bias = load_float(dt_bias + Int64(head * D + tid) * 4)
        for query in cutlass.range_constexpr(dims.queries):
            row = request * dims.queries + query
            z, _ = floats(load_half(gamma + Int64((row * dims.heads + head) * D + tid) * 2))
            z = z + bias
            decay = -rate * softplus(z) if dims.bound == 0.0 else sigmoid(rate * z) * dims.bound
            store_shared(decay_at + (query * D + tid) * 4, [exp(decay)])
    else:
        convolve(1, request, head, tid - D, k_at + (tid - D) * 4, window, first, record, dims, D)
    if tid < values:
        convolve(2, request, head, part * values + tid, v_at + tid * 4, window, first, record, dims, values)
    if tid < dims.queries:
        row = request * dims.queries + tid
        logit, _ = floats(load_half(beta + Int64(row * dims.heads + head) * 2))
        store_shared(beta_at + tid * 4, [sigmoid(logit)])
    cute.arch.sync_threads()
    for index in cutlass.range(tid // 32, 2 * dims.queries, WARPS, unroll=1):
        # q and k of all queries follow each other.
        place = q_at + index * (D * 4) + lane * 16
        x = load_shared_floats(place)
        square = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3])
        scale = inverse_root(square + UNIT_EPS)
        if index < dims.queries:
            scale = scale * (D**-0.5)
        store_shared(place, [x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale])
    cute.arch.sync_threads()


@cute.jit
def _recur(
    request: Int32,
    head: Int32,
    part: Int32,
    source: Int32,
    count: Int32,
    slots: Int64,
    stride: Int64,
    record: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[KdaDims],
) -> None:
    """Decay, correction, update and output of this part's value rows, query by query (spec 2.5.6); `count` recorded
    tokens come first where states are recovered."""
    state, slot_bytes = words(record, dims, "state", "state_slot")
    (partial,) = words(record, dims, "partial") if dims.parts > 1 else (Int64(0),)
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    q_at, k_at, decay_at, v_at, beta_at, o_at = layout(scratch, dims)
    values = D // dims.parts
    held = values // WARPS
    # Row number i of this warp is value row part * values + warp + 8 i.
    size = dims.state_bytes
    mine = state + (Int64(head) * D + Int64(part * values + warp)) * (D * size) + Int64(lane * 4 * size)
    s = []
    for i in cutlass.range_constexpr(held):
        s.append(load_state(mine + Int64(source) * slot_bytes + i * (WARPS * D * size), dims))
    corrections = Int64(0)
    if cutlass.const_expr(dims.recovers):
        corrections = recorded(source, head, record, dims) + Int64(part * values + warp) * 4
        s = fold(s, mine + Int64(source) * slot_bytes, count, corrections, recorded(source, head, record, dims), dims)
        cute.arch.sync_threads()
    for query in cutlass.range_constexpr(dims.queries):
        at = query * (D * 4) + lane * 16
        decay = load_shared_floats(decay_at + at)
        k = load_shared_floats(k_at + at)
        q = load_shared_floats(q_at + at)
        beta = load_shared(beta_at + query * 4)
        for i in cutlass.range_constexpr(held):
            row = warp + WARPS * i
            for n in cutlass.range_constexpr(4):
                s[i][n] = s[i][n] * decay[n]
            known = warp_sum(s[i][0] * k[0] + s[i][1] * k[1] + s[i][2] * k[2] + s[i][3] * k[3])
            correction = beta * (load_shared(v_at + (query * values + row) * 4) - known)
            for n in cutlass.range_constexpr(4):
                s[i][n] = updated(s[i][n], correction, k[n], dims)
            o = warp_sum(s[i][0] * q[0] + s[i][1] * q[1] + s[i][2] * q[2] + s[i][3] * q[3])
            if lane == 0:
                if cutlass.const_expr(dims.recovers):
                    store_float(corrections + (query * (dims.heads * 3 * D) + WARPS * i) * 4, correction)
                if cutlass.const_expr(dims.parts > 1):
                    index = ((request * dims.queries + query) * dims.heads + head) * D + part * values + row
                    store_float(partial + Int64(index) * 4, o)
                else:
                    store_shared(o_at + (query * D + row) * 4, [o])
        for i in cutlass.range_constexpr(held):
            s[i] = kept(s[i], dims)
        # A constant of the kernel, then a number of the step.
        if cutlass.const_expr(not dims.recovers):  # noqa: SIM102
            if stride > 1:
                target = load_int(slots + query * 4)
                if target > 0:
                    for i in cutlass.range_constexpr(held):
                        store_state(mine + Int64(target) * slot_bytes + i * (WARPS * D * size), s[i], dims)
    if cutlass.const_expr(not dims.recovers):  # noqa: SIM102
        if stride == 1:
            for i in cutlass.range_constexpr(held):
                store_state(mine + Int64(source) * slot_bytes + i * (WARPS * D * size), s[i], dims)


@cute.jit
def _finish(request: Int32, head: Int32, record: Int64, scratch: Int32, dims: cutlass.Constexpr[KdaDims]) -> None:
    """RMSNorm over the values of the head, times the sigmoid of the gate; a warp for each query (spec 2.5.7)."""
    gate, out, norm = words(record, dims, "gate", "out", "norm")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    _, _, _, _, _, o_at = layout(scratch, dims)
    cute.arch.sync_threads()
    if tid // 32 < dims.queries:
        index = ((request * dims.queries + tid // 32) * dims.heads + head) * D + lane * 4
        if cutlass.const_expr(dims.parts > 1):
            (partial,) = words(record, dims, "partial")
            o = load_floats(partial + Int64(index) * 4)
        else:
            o = load_shared_floats(o_at + tid * 16)
        square = warp_sum(o[0] * o[0] + o[1] * o[1] + o[2] * o[2] + o[3] * o[3])
        scale = inverse_root(square * (1.0 / D) + dims.eps)
        w = load_floats(norm + Int64(lane * 16))
        g0, g1 = floats(load_int(gate + Int64(index) * 2))
        g2, g3 = floats(load_int(gate + Int64(index) * 2 + 4))
        low = pair(o[0] * scale * w[0] * sigmoid(g0), o[1] * scale * w[1] * sigmoid(g1))
        high = pair(o[2] * scale * w[2] * sigmoid(g2), o[3] * scale * w[3] * sigmoid(g3))
        store_words(out + Int64(index) * 2, [low, high])


@cute.jit
def _zeros(request: Int32, head: Int32, record: Int64, dims: cutlass.Constexpr[KdaDims]) -> None:
    (out,) = words(record, dims, "out")
    tid, _, _ = cute.arch.thread_idx()
    if tid // 16 < dims.queries:
        index = ((request * dims.queries + tid // 16) * dims.heads + head) * D + tid % 16 * 8
        store_words(out + Int64(index) * 2, [Int32(0)] * 4)
