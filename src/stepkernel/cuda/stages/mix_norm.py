"""Residual update, AttnRes mix and RMSNorm (spec 2.3, 2.4): one CTA per row.

A thread owns the same chunks of 8 columns of every source. Scores need one pass over the sources, the mix a second one
from L2; the mixed values stay in registers for the norm.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_floats, load_shared, load_words, store_shared, store_words
from stepkernel.cuda.dims import THREADS, WARPS, MixNormDims
from stepkernel.cuda.functions import exp, inverse_root, larger
from stepkernel.cuda.stages.mailbox import none_failed, slots
from stepkernel.cuda.stages.norm import write_normed
from stepkernel.cuda.stages.taking import take_chunk, take_parts
from stepkernel.cuda.step_block import HEAD
from stepkernel.cuda.values import block_sum, floats, least, pair, quotient, remainder, rounded
from stepkernel.cuda.walk import arrive_last, words

CHUNK = 8  # BF16 values of one 16-byte access


@cute.jit
def mix_norm(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[MixNormDims]
) -> None:
    """prefix, delta, second, out bf16 [rows, width]; blocks bf16 [copies, rows, width]; score f32 [width]: norm times
    query of the mix; norm bf16 [width]; tap bf16 rows."""
    row = cta
    while row < dims.rows:
        _update(row, record, dims)
        _mix(row, record, scratch, dims)
        row = row + ctas


@cute.jit
def take_and_mix(
    cta: Int32,
    ctas: Int32,
    record: Int64,
    step: Int64,
    sync: Int64,
    scratch: Int32,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[MixNormDims],
) -> Int32:
    """The same for deltas that ranks have posted (`exchange`): several CTAs take a row, the one that comes last mixes.
    0 if the group has failed."""
    number, counters = words(record, dims, "number", "counters")
    failed = Int32(0)
    piece = cta
    while piece < dims.rows * dims.parts:
        row = quotient(piece, dims.parts)
        part = remainder(piece, dims.parts)
        for name, slot, mode in (("delta", "slot", dims.delta_taken), ("second", "second_slot", dims.second_taken)):
            if cutlass.const_expr(mode != ""):
                delta, at = words(record, dims, name, slot)
                at = at + sync + slots(step, number, dims.ranks) + HEAD
                failed = failed | _take(row, part, at, delta, step, sync, patience, mode, dims)
        if arrive_last(counters + Int64(row) * 4, dims.parts, scratch) == 1:
            _update(row, record, dims)
            _mix(row, record, scratch, dims)
        piece = piece + ctas
    return none_failed(failed, scratch)


@cute.jit
def _take(
    row: Int32,
    part: Int32,
    place: Int64,
    delta: Int64,
    step: Int64,
    sync: Int64,
    patience: cutlass.Constexpr[int],
    mode: cutlass.Constexpr[str],
    dims: cutlass.Constexpr[MixNormDims],
) -> Int32:
    """A part of a row of sums, or of parts side by side, which other warps take."""
    tid, _, _ = cute.arch.thread_idx()
    target = delta + Int64(row) * (dims.width * 2)
    failed = Int32(0)
    if cutlass.const_expr(mode == "reduce"):
        chunks = dims.width // 4
        each = -(-chunks // dims.parts)
        at = place + Int64(row) * (dims.width * 4)
        first = part * each
        for column in cutlass.range(first + tid, least(first + each, Int32(chunks)), THREADS, unroll=1):
            here, out = at + Int64(column) * 16, target + Int64(column) * 8
            failed = take_chunk(here, out, Int64(0), failed, step, sync, patience, mode, dims.ranks, True)
    else:
        width = dims.width * 2 // dims.ranks
        each = -(-dims.width // 8 // dims.parts)
        first = part * each
        last = least(first + each, Int32(dims.width // 8))
        start = first + (tid + THREADS // 2) % THREADS
        at = place + Int64(row) * width
        failed = take_parts(start, last, at, target, Int64(width), step, sync, patience, dims.ranks)
    return failed


def _of_blocks(record: Any, dims: MixNormDims, *names: str) -> list[Any]:
    """Words that say something where blocks are saved only: without any, zeros that the compiler knows, so that no code
    is made for them."""
    return words(record, dims, *names) if dims.sources > 0 else [Int64(0)] * len(names)


@cute.jit
def _update(row: Int32, record: Int64, dims: cutlass.Constexpr[MixNormDims]) -> None:
    """The new prefix and its copies; every thread writes and later reads back its own chunks only."""
    tid, _, _ = cute.arch.thread_idx()
    prefix, delta, second, tap, tap_stride = words(record, dims, "prefix", "delta", "second", "tap", "tap_stride")
    save, restart, tap_mixed = _of_blocks(record, dims, "save", "restart", "tap_mixed")
    start = Int64(row) * (dims.width * 2)
    for chunk in cutlass.range(tid, dims.width // CHUNK, THREADS, unroll=1):
        place = start + Int64(chunk) * 16
        new = [Int32(0)] * 4
        if restart == 0:
            new = load_words(prefix + place)
        if delta != 0:
            added = load_words(delta + place)
            if second != 0:
                more = load_words(second + place)
                for k in cutlass.range_constexpr(4):
                    d0, d1 = floats(added[k])
                    e0, e1 = floats(more[k])
                    added[k] = pair(d0 + e0, d1 + e1)
            if restart == 0:
                for k in cutlass.range_constexpr(4):
                    d0, d1 = floats(added[k])
                    p0, p1 = floats(new[k])
                    added[k] = pair(p0 + d0, p1 + d1)
            new = added
            store_words(prefix + place, new)
        if save != 0:
            store_words(save + place, new)
        if tap != 0 and tap_mixed == 0:
            store_words(tap + Int64(row) * tap_stride + Int64(chunk) * 16, new)


@cute.jit
def _mix(row: Int32, record: Int64, scratch: Int32, dims: cutlass.Constexpr[MixNormDims]) -> None:
    tid, _, _ = cute.arch.thread_idx()
    prefix, norm, out, tap, tap_stride = words(record, dims, "prefix", "norm", "out", "tap", "tap_stride")
    blocks, score, count, rounds, tap_mixed = _of_blocks(
        record, dims, "blocks", "score", "sources", "round", "tap_mixed"
    )
    sources = Int32(count)
    chunks = dims.width // CHUNK
    turns = -(-chunks // THREADS)
    start = Int64(row) * (dims.width * 2)
    block_bytes = dims.rows * dims.width * 2
    scores = scratch + WARPS * 4
    shares = scores + (dims.sources + 1) * 4
    mixed = [Float32(0.0)] * (turns * CHUNK)
    if score != 0:
        for s in cutlass.range(sources + 1, unroll=1):
            base = blocks + Int64(s) * block_bytes + start
            if s == sources:
                base = prefix + start
            dot = Float32(0.0)
            square = Float32(0.0)
            for chunk in cutlass.range(tid, chunks, THREADS, unroll=1):
                x = load_words(base + Int64(chunk) * 16)
                near = load_floats(score + Int64(chunk) * 32)
                far = load_floats(score + Int64(chunk) * 32 + 16)
                for k in cutlass.range_constexpr(4):
                    x0, x1 = floats(x[k])
                    w = near if k < 2 else far
                    dot = dot + x0 * w[2 * k % 4] + x1 * w[2 * k % 4 + 1]
                    square = square + x0 * x0 + x1 * x1
            dot = block_sum(dot, scratch, THREADS)
            square = block_sum(square, scratch, THREADS)
            if tid == 0:
                store_shared(scores + s * 4, [dot * inverse_root(square * (1.0 / dims.width) + dims.eps)])
        cute.arch.sync_threads()
        top = load_shared(scores)
        for s in cutlass.range(1, sources + 1, unroll=1):
            top = larger(top, load_shared(scores + s * 4))
        total = Float32(0.0)
        for s in cutlass.range(sources + 1, unroll=1):
            total = total + exp(load_shared(scores + s * 4) - top)
        if tid <= sources:
            store_shared(shares + tid * 4, [exp(load_shared(scores + tid * 4) - top) / total])
        cute.arch.sync_threads()
        for s in cutlass.range(sources + 1, unroll=1):
            base = blocks + Int64(s) * block_bytes + start
            if s == sources:
                base = prefix + start
            share = load_shared(shares + s * 4)
            for turn in cutlass.range_constexpr(turns):
                chunk = tid + turn * THREADS
                if chunk < chunks:
                    x = load_words(base + Int64(chunk) * 16)
                    for k in cutlass.range_constexpr(4):
                        x0, x1 = floats(x[k])
                        mixed[turn * CHUNK + 2 * k] = mixed[turn * CHUNK + 2 * k] + share * x0
                        mixed[turn * CHUNK + 2 * k + 1] = mixed[turn * CHUNK + 2 * k + 1] + share * x1
    else:
        for turn in cutlass.range_constexpr(turns):
            chunk = tid + turn * THREADS
            if chunk < chunks:
                x = load_words(prefix + start + Int64(chunk) * 16)
                for k in cutlass.range_constexpr(4):
                    mixed[turn * CHUNK + 2 * k], mixed[turn * CHUNK + 2 * k + 1] = floats(x[k])
    if rounds != 0:
        for k in cutlass.range_constexpr(turns * CHUNK):
            mixed[k] = rounded(mixed[k])
    if tap != 0 and tap_mixed != 0:
        for turn in cutlass.range_constexpr(turns):
            chunk = tid + turn * THREADS
            if chunk < chunks:
                kept = [pair(mixed[turn * CHUNK + 2 * k], mixed[turn * CHUNK + 2 * k + 1]) for k in range(4)]
                store_words(tap + Int64(row) * tap_stride + Int64(chunk) * 16, kept)
    # Columns that a thread does not own are zeros.
    write_normed(mixed, norm, out + start, scratch, Int32(1), dims.width, dims.eps)
