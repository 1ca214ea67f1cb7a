"""Residual update, AttnRes mix and RMSNorm (spec 2.3, 2.4): one CTA per row.

A thread owns the same chunks of 8 columns of every source. Scores need one pass over the sources, the mix a second one
from L2; the mixed values stay in registers for the norm.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    block_sum,
    floats,
    least,
    load_float,
    load_words,
    pair,
    store_words,
)

THREADS = 256
CHUNK = 8  # BF16 values of one 16-byte access


@cute.jit
def mix_norm_row(
    row: Int32,
    prefix: Int64,
    delta: Int64,
    second: Int64,
    blocks: Int64,
    score: Int64,
    norm: Int64,
    out: Int64,
    scratch: Int32,
    width: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    sources: cutlass.Constexpr,
    update: cutlass.Constexpr,
    deltas: cutlass.Constexpr,
    save: cutlass.Constexpr,
    mixes: cutlass.Constexpr,
    round_mix: cutlass.Constexpr,
    eps: cutlass.Constexpr,
) -> None:
    """One row by all threads of the CTA.

    prefix, delta, second, out bf16 [rows, width]; blocks bf16 [copies, rows, width]; score f32 [width]: norm times
    query of the mix; norm bf16 [width]. `update`: "none", "add" (prefix + delta, rounded) or "restart" (delta); with
    `deltas` 2, delta + second is rounded first. `save`: block to which the new prefix goes, or -1. Without `mixes` the
    prefix itself is normalised.
    """
    tid, _, _ = cute.arch.thread_idx()
    chunks = width // CHUNK
    turns = -(-chunks // THREADS)
    row_bytes = Int64(row) * (width * 2)

    # The new prefix: every thread writes and later reads back its own chunks only.
    for turn in cutlass.range_constexpr(turns):
        chunk = tid + turn * THREADS
        if chunk < chunks:
            place = row_bytes + Int64(chunk) * 16
            if cutlass.const_expr(update != "none"):
                words = load_words(delta + place)
                if cutlass.const_expr(deltas == 2):
                    more = load_words(second + place)
                    for k in cutlass.range_constexpr(4):
                        d0, d1 = floats(words[k])
                        e0, e1 = floats(more[k])
                        words[k] = pair(d0 + e0, d1 + e1)
                if cutlass.const_expr(update == "add"):
                    old = load_words(prefix + place)
                    for k in cutlass.range_constexpr(4):
                        d0, d1 = floats(words[k])
                        p0, p1 = floats(old[k])
                        words[k] = pair(p0 + d0, p1 + d1)
                store_words(prefix + place, words)
                if cutlass.const_expr(save >= 0):
                    store_words(blocks + (save * rows * width * 2) + place, words)
            elif cutlass.const_expr(save >= 0):
                store_words(blocks + (save * rows * width * 2) + place, load_words(prefix + place))

    count = sources + 1 if mixes else 1
    mixed = [Float32(0.0)] * (turns * CHUNK)
    if cutlass.const_expr(mixes):
        scores = []
        for s in cutlass.range_constexpr(count):
            base = blocks + (s * rows * width * 2) + row_bytes
            if cutlass.const_expr(s == sources):
                base = prefix + row_bytes
            dot = Float32(0.0)
            square = Float32(0.0)
            for turn in cutlass.range_constexpr(turns):
                chunk = tid + turn * THREADS
                if chunk < chunks:
                    words = load_words(base + Int64(chunk) * 16)
                    for k in cutlass.range_constexpr(4):
                        x0, x1 = floats(words[k])
                        at = score + Int64(chunk) * 32 + k * 8
                        dot = dot + x0 * load_float(at) + x1 * load_float(at + 4)
                        square = square + x0 * x0 + x1 * x1
            dot = block_sum(dot, scratch, THREADS)
            square = block_sum(square, scratch, THREADS)
            scores.append(dot * cute.math.rsqrt(square / width + eps))
        top = scores[0]
        for s in cutlass.range_constexpr(1, count):
            top = cute.arch.fmax(top, scores[s])
        total = Float32(0.0)
        shares = []
        for s in cutlass.range_constexpr(count):
            share = cute.math.exp(scores[s] - top)
            shares.append(share)
            total = total + share
        for s in cutlass.range_constexpr(count):
            share = shares[s] / total
            base = blocks + (s * rows * width * 2) + row_bytes
            if cutlass.const_expr(s == sources):
                base = prefix + row_bytes
            for turn in cutlass.range_constexpr(turns):
                chunk = tid + turn * THREADS
                last = chunk if cutlass.const_expr(turn + 1 < turns) else least(chunk, Int32(chunks - 1))
                words = load_words(base + Int64(last) * 16)
                for k in cutlass.range_constexpr(4):
                    x0, x1 = floats(words[k])
                    mixed[turn * CHUNK + 2 * k] = mixed[turn * CHUNK + 2 * k] + share * x0
                    mixed[turn * CHUNK + 2 * k + 1] = mixed[turn * CHUNK + 2 * k + 1] + share * x1
    else:
        # Threads without a chunk of their own read the last one below.
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(turns):
            chunk = tid + turn * THREADS
            last = chunk if cutlass.const_expr(turn + 1 < turns) else least(chunk, Int32(chunks - 1))
            words = load_words(prefix + row_bytes + Int64(last) * 16)
            for k in cutlass.range_constexpr(4):
                mixed[turn * CHUNK + 2 * k], mixed[turn * CHUNK + 2 * k + 1] = floats(words[k])

    square = Float32(0.0)
    for turn in cutlass.range_constexpr(turns):
        part = Float32(0.0)
        for k in cutlass.range_constexpr(CHUNK):
            if cutlass.const_expr(round_mix):
                mixed[turn * CHUNK + k], _ = floats(pair(mixed[turn * CHUNK + k], Float32(0.0)))
            part = part + mixed[turn * CHUNK + k] * mixed[turn * CHUNK + k]
        if tid + turn * THREADS < chunks:
            square = square + part
    scale = cute.math.rsqrt(block_sum(square, scratch, THREADS) / width + eps)
    for turn in cutlass.range_constexpr(turns):
        chunk = tid + turn * THREADS
        if chunk < chunks:
            weights = load_words(norm + Int64(chunk) * 16)
            words = []
            for k in cutlass.range_constexpr(4):
                w0, w1 = floats(weights[k])
                first = mixed[turn * CHUNK + 2 * k] * scale * w0
                words.append(pair(first, mixed[turn * CHUNK + 2 * k + 1] * scale * w1))
            store_words(out + row_bytes + Int64(chunk) * 16, words)


@cute.kernel
def mix_norm_kernel(
    prefix: Int64,
    delta: Int64,
    second: Int64,
    blocks: Int64,
    score: Int64,
    norm: Int64,
    out: Int64,
    dims: cutlass.Constexpr,
) -> None:
    scratch = cute.arch.alloc_smem(Float32, THREADS // 32, 16)
    row, _, _ = cute.arch.block_idx()
    mix_norm_row(row, prefix, delta, second, blocks, score, norm, out, Int32(scratch.toint()), *dims)


@cute.jit
def mix_norm(
    prefix: Int64,
    delta: Int64,
    second: Int64,
    blocks: Int64,
    score: Int64,
    norm: Int64,
    out: Int64,
    dims: cutlass.Constexpr,
) -> None:
    mix_norm_kernel(prefix, delta, second, blocks, score, norm, out, dims).launch(
        grid=[dims[1], 1, 1], block=[THREADS, 1, 1]
    )
