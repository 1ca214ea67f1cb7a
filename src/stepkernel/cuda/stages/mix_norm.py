"""Residual update, AttnRes mix and RMSNorm (spec 2.3, 2.4): one CTA per row.

A thread owns the same chunks of 8 columns of every source. Scores need one pass over the sources, the mix a second one
from L2; the mixed values stay in registers for the norm.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    block_sum,
    floats,
    load_floats,
    load_shared,
    load_words,
    pair,
    rounded,
    store_shared,
    store_words,
)
from stepkernel.cuda.dims import THREADS, WARPS, MixNormDims
from stepkernel.cuda.functions import exp, inverse_root, larger
from stepkernel.cuda.stages.norm import write_normed
from stepkernel.cuda.walk import words

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
