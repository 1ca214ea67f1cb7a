"""Exact top-k on sigmoid scores plus bias, weights from the unbiased scores (spec 2.8.1): one warp per row.

A lane holds the keys of every 32nd expert as integers that order like them: NaN below every number, the places behind
the last expert below NaN. Each round takes the largest key of the warp and, among equal ones, the lowest expert.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import FAR, load_float, ptx, store_float, store_int
from stepkernel.cuda.dims import SelectDims
from stepkernel.cuda.functions import sigmoid
from stepkernel.cuda.stages.mailbox import none_failed, slots
from stepkernel.cuda.stages.taking import take_parts
from stepkernel.cuda.step_block import HEAD
from stepkernel.cuda.values import quotient, warp_least, warp_most, warp_sum
from stepkernel.cuda.walk import words


def order(key: Float32) -> Int32:
    """Unsigned bits that grow with the key, 1 for NaN. A key is never -0: it is a sum that begins with a sigmoid."""
    code = (
        "{ .reg .pred n; .reg .b32 b, s; mov.b32 b, <<$r0>>; "
        "shr.s32 s, b, 31; or.b32 s, s, 0x80000000; xor.b32 b, b, s; setp.nan.f32 n, <<$r0>>, <<$r0>>; "
        "selp.b32 <<$w0>>, 1, b, n; }"
    )
    return ptx(code, [Int32], key)


def larger_key(key: Int32, best: Int32, index: Int32, holder: Int32) -> tuple[Int32, Int32]:
    """(key, index) if the key is above `best`, else (best, holder)."""
    code = (
        "{ .reg .pred p; setp.gt.u32 p, <<$r0>>, <<$r1>>; selp.b32 <<$w0>>, <<$r0>>, <<$r1>>, p; "
        "selp.b32 <<$w1>>, <<$r2>>, <<$r3>>, p; }"
    )
    found, place = ptx(code, [Int32, Int32], key, best, index, holder)
    return found, place


def take(key: Int32, index: Int32, taken: Int32) -> Int32:
    """The key, or 0 if its index was taken."""
    code = "{ .reg .pred p; setp.eq.s32 p, <<$r1>>, <<$r2>>; selp.b32 <<$w0>>, 0, <<$r0>>, p; }"
    return ptx(code, [Int32], key, index, taken)


@cute.jit
def select(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[SelectDims]
) -> None:
    """logits f32 [rows, experts], bias f32 [experts], ids int32 and weights f32 [rows, top_k], best first."""
    row = cta
    while row < dims.rows:
        _row(row, record, dims)
        row = row + ctas


@cute.jit
def take_and_select(
    cta: Int32,
    ctas: Int32,
    record: Int64,
    step: Int64,
    sync: Int64,
    scratch: Int32,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[SelectDims],
) -> Int32:
    """The same where ranks have posted their parts of the logits (`exchange`). 0 if the group has failed."""
    tid, _, _ = cute.arch.thread_idx()
    logits, width, slot, number = words(record, dims, "logits", "width", "slot", "number")
    place = sync + slots(step, number, dims.ranks) + (HEAD + slot)
    chunks = quotient(Int32(width), 16) * dims.ranks
    failed = Int32(0)
    # From the last CTA on: the first ones take the rest of the exchange.
    row = ctas - 1 - cta
    while row < dims.rows:
        out = logits + Int64(row) * (dims.experts * 4)
        at = place + Int64(row) * width
        failed = failed | take_parts(tid, chunks, at, out, width, step, sync, patience, dims.ranks)
        cute.arch.sync_threads()
        _row(row, record, dims)
        row = row + ctas
    return none_failed(failed, scratch)


@cute.jit
def _row(row: Int32, record: Int64, dims: cutlass.Constexpr[SelectDims]) -> None:
    tid, _, _ = cute.arch.thread_idx()
    logits, bias, ids, weights = words(record, dims, "logits", "bias", "ids", "weights")
    held = -(-dims.experts // 32)
    if tid < 32:
        start = logits + Int64(row) * (dims.experts * 4)
        own = start + Int64(tid) * 4
        own_bias = bias + Int64(tid) * 4
        keys = [Int32(0)] * held
        for k in cutlass.range_constexpr(held):
            if tid < dims.experts - 32 * k:
                keys[k] = order(sigmoid(load_float(own + k * 128)) + load_float(own_bias + k * 128))
        mine = Int32(0)
        for slot in cutlass.range(dims.top_k, unroll=1):
            best = Int32(0)
            holder = Int32(0)
            for k in cutlass.range_constexpr(held):
                best, holder = larger_key(keys[k], best, Int32(k), holder)
            top = warp_most(best)
            candidate = Int32(FAR)
            if best == top:
                candidate = holder * 32 + tid
            chosen = warp_least(candidate)
            # Which of the lane's keys that is, if it is one of them.
            gone = chosen - tid
            for k in cutlass.range_constexpr(held):
                keys[k] = take(keys[k], Int32(32 * k), gone)
            if tid == slot:
                mine = chosen
        weight = Float32(0.0)
        if tid < dims.top_k:
            weight = sigmoid(load_float(start + Int64(mine) * 4))
        if cutlass.const_expr(dims.renormalize):
            weight = weight / (warp_sum(weight) + 1e-20)
        if tid < dims.top_k:
            place = Int64(row * dims.top_k + tid) * 4
            store_int(ids + place, mine)
            store_float(weights + place, weight * dims.scaling)
