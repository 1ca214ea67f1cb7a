"""Softmax attention of absorbed queries over the latent pages (spec 2.6), the context split over CTAs.

A CTA takes 8 or 16 pairs of query and head of a request and one part of its context, 128 tokens at a time. Scores: a
warp multiplies 16 cached rows by the queries, as `linear` does with a weight. Mix: a warp makes 64 latent values, the
cached rows run along k as in `absorb`. Shares are two BF16 numbers (high and rest), so the mix has an error of 2^-17
only. The CTA that comes last merges the parts of its pairs by their maxima and sums. FP8 latents: see `cached`.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    load_int,
    load_shared,
    load_shared_int,
    load_shared_long,
    store_shared,
    store_shared_int,
    store_shared_long,
)
from stepkernel.cuda.dims import WARPS, AttendDims
from stepkernel.cuda.functions import base_of, exp, larger, nothing
from stepkernel.cuda.stages.absorb import column_fragments
from stepkernel.cuda.stages.attend_parts import merge, write
from stepkernel.cuda.stages.cached import (
    finite,
    format_of,
    load_cached,
    load_query,
    query_start,
    round_queries,
    share_pair,
    shares_of,
    value_bytes,
)
from stepkernel.cuda.values import exchange, least, matrix_multiply, most, quotient, remainder
from stepkernel.cuda.walk import arrive_last, step_float, step_words, words

BLOCK = 128  # tokens
SHARE_STRIDE = 272  # bytes of the shares of a pair: 128 BF16 and padding against bank conflicts


def owned(tokens: Any, rank: Any, dims: AttendDims) -> Any:
    """How many of a request's first tokens lie on this rank (`ContextShard.owned`); none of less than one."""
    if dims.ranks == 1:
        return tokens
    turn = dims.interleave * dims.ranks
    tokens = most(tokens, Int32(0))
    whole = quotient(tokens, turn)
    rest = tokens - whole * turn - Int32(rank) * dims.interleave
    return whole * dims.interleave + least(most(rest, Int32(0)), Int32(dims.interleave))


@cute.jit
def attend(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[AttendDims]
) -> None:
    """x bf16 [rows, heads, lora + rope]; cache bf16 [pages, page_tokens, lora + rope]; out bf16 [rows, heads, lora], or
    f32 [rows, heads, lora + PARTIAL] with several ranks, of which this one has some tokens of each request.

    partial f32 [pieces, pairs, lora], statistics f32 [pieces, pairs, 2] (maximum, sum), counters u32 [requests,
    groups]; a piece is a part of a group of pairs of a request.
    """
    (lengths,) = step_words(step, "lengths")
    pieces = dims.requests * dims.groups * dims.splits
    piece = cta
    while piece < pieces:
        request = quotient(piece, dims.groups * dims.splits)
        group = remainder(quotient(piece, dims.splits), dims.groups)
        length = load_int(lengths + Int64(request) * 4)
        _part(piece, request, group, length, record, step, scratch, dims)
        if cutlass.const_expr(dims.splits > 1):
            (counters,) = words(record, dims, "counters")
            counter = counters + Int64(request * dims.groups + group) * 4
            if arrive_last(counter, dims.splits, scratch) == 1:
                merge(request, group, record, dims)
        piece = piece + ctas


@cute.jit
def _part(
    piece: Int32,
    request: Int32,
    group: Int32,
    length: Int32,
    record: Int64,
    step: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[AttendDims],
) -> None:
    x, cache = words(record, dims, "x", "cache")
    size = value_bytes(dims)
    kind = format_of(dims)
    pages, page_stride = step_words(step, "page_table", "page_stride")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    t = lane % 4
    pairs = 8 * dims.tiles
    width = dims.lora + dims.rope
    rows_at = scratch
    shares = scratch + BLOCK * 8
    maxima = shares + 2 * pairs * SHARE_STRIDE
    queries_at = maxima + 4 * pairs * WARPS
    scale = dims.scale
    if cutlass.const_expr(dims.fp8):
        scale = scale * step_float(step, "score_factor")
        round_queries(request, group, x, step_float(step, "query_factor"), queries_at, dims)
    # Of all ranks; from here on tokens are those that lie on this one.
    written = length
    (rank,) = step_words(step, "rank") if dims.ranks > 1 else (Int64(0),)
    length = owned(written, rank, dims)
    blocks = quotient(length + BLOCK - 1, BLOCK)
    each = quotient(blocks + dims.splits - 1, dims.splits)
    begin = remainder(piece, dims.splits) * each * BLOCK
    end = least(begin + each * BLOCK, length)
    # Tokens before this one are seen by every query.
    common = written - dims.queries + 1
    limits = []
    for tile in cutlass.range_constexpr(dims.tiles):
        for n in cutlass.range_constexpr(2):
            query = quotient(group * pairs + 8 * tile + 2 * t + n, dims.heads)
            limits.append(least(owned(common + query, rank, dims), end))
    common = owned(common, rank, dims)
    sources = []
    for tile in cutlass.range_constexpr(dims.tiles):
        if cutlass.const_expr(dims.fp8):
            sources.append(queries_at + (8 * tile + g) * dims.query_stride + t * 16)
        else:
            sources.append(x + query_start(request, group, 8 * tile + g, dims) + Int64(t * 16))
    largest = [nothing()] * (2 * dims.tiles)
    sums = [Float32(0.0)] * (2 * dims.tiles)
    mixed = [Float32(0.0)] * (16 * dims.tiles)
    for start in cutlass.range(begin, end, BLOCK, unroll=1):
        # Where the rows of this block lie; what is behind the end stands for the last row.
        if tid < BLOCK:
            token = least(start + tid, end - 1)
            page = load_int(pages + (Int64(request) * page_stride + Int64(quotient(token, dims.page_tokens))) * 4)
            at = Int64(page) * dims.page_tokens + Int64(remainder(token, dims.page_tokens))
            store_shared_long(rows_at + tid * 8, cache + at * (width * size))
        cute.arch.sync_threads()
        # Row g of the warp's tile is token 2g, row g + 8 token 2g + 1.
        token = start + warp * 16 + 2 * g
        upper = load_shared_long(rows_at + (warp * 16 + 2 * g) * 8) + Int64(t * 8 * size)
        lower = load_shared_long(rows_at + (warp * 16 + 2 * g + 1) * 8) + Int64(t * 8 * size)
        scores = [Float32(0.0)] * (4 * dims.tiles)
        for k in cutlass.range(width // 32, unroll=2):
            place = Int64(k) * (32 * size)
            a = load_cached(upper + place, dims)
            b = load_cached(lower + place, dims)
            for tile in cutlass.range_constexpr(dims.tiles):
                v = load_query(sources[tile] + (k * 64 if dims.fp8 else place), dims)
                c = scores[4 * tile : 4 * tile + 4]
                c = matrix_multiply([a[0], b[0], a[1], b[1]], [v[0], v[1]], c, kind)
                scores[4 * tile : 4 * tile + 4] = matrix_multiply([a[2], b[2], a[3], b[3]], [v[2], v[3]], c, kind)
        for tile in cutlass.range_constexpr(dims.tiles):
            for n in cutlass.range_constexpr(2):
                for m in cutlass.range_constexpr(2):
                    score = scores[4 * tile + 2 * m + n] * scale
                    if token + m >= limits[2 * tile + n]:
                        score = nothing()
                    scores[4 * tile + 2 * m + n] = score
                top = larger(scores[4 * tile + n], scores[4 * tile + 2 + n])
                for distance in (4, 8, 16):
                    top = larger(top, exchange(top, distance))
                if g == 0:
                    store_shared(maxima + (warp * pairs + 8 * tile + 2 * t + n) * 4, [top])
        cute.arch.sync_threads()
        kept = []
        for tile in cutlass.range_constexpr(dims.tiles):
            for n in cutlass.range_constexpr(2):
                index = 2 * tile + n
                column = 8 * tile + 2 * t + n
                top = largest[index]
                for k in cutlass.range_constexpr(WARPS):
                    top = larger(top, load_shared(maxima + (k * pairs + column) * 4))
                base = base_of(top)
                kept.append(exp(largest[index] - base))
                largest[index] = top
                near = exp(scores[4 * tile + n] - base)
                far = exp(scores[4 * tile + 2 + n] - base)
                sums[index] = sums[index] * kept[index] + near + far
                word = share_pair(near, far, dims)
                high_near, high_far = shares_of(word, dims)
                place = shares + column * SHARE_STRIDE + (warp * 16 + 2 * g) * 2
                store_shared_int(place, word)
                store_shared_int(place + pairs * SHARE_STRIDE, share_pair(near - high_near, far - high_far, dims))
        cute.arch.sync_threads()
        if warp * 64 < dims.lora:
            for tile in cutlass.range_constexpr(dims.tiles):
                for j in cutlass.range_constexpr(16):
                    mixed[16 * tile + j] = mixed[16 * tile + j] * kept[2 * tile + j % 2]
            tail = Int32(0)
            if dims.queries > 1 and start + BLOCK > common:
                tail = Int32(1)
            for k in cutlass.range(quotient(least(end - start, Int32(BLOCK)) + 15, 16), unroll=1):
                rows = []
                for n in (0, 1, 8, 9):
                    at = load_shared_long(rows_at + (16 * k + 2 * t + n) * 8)
                    rows.append(load_cached(at + Int64((warp * 64 + g * 8) * size), dims))
                # A share of 0 does not hide a NaN that a later query has written; that query's own share is NaN.
                if tail == 1:
                    for n in cutlass.range_constexpr(4):
                        for word in cutlass.range_constexpr(4):
                            rows[n][word] = finite(rows[n][word], dims)
                for tile in cutlass.range_constexpr(dims.tiles):
                    place = shares + (8 * tile + g) * SHARE_STRIDE + (16 * k + 2 * t) * 2
                    rest = place + pairs * SHARE_STRIDE
                    high = [load_shared_int(place), load_shared_int(place + 16)]
                    low = [load_shared_int(rest), load_shared_int(rest + 16)]
                    for j in cutlass.range_constexpr(4):
                        first = 16 * tile + 4 * j
                        a = column_fragments(rows, j)
                        c = matrix_multiply(a, high, mixed[first : first + 4], kind)
                        mixed[first : first + 4] = matrix_multiply(a, low, c, kind)
        cute.arch.sync_threads()
    # The sum of a pair: over the tokens of the lanes, then of the warps.
    for index in cutlass.range_constexpr(2 * dims.tiles):
        for distance in (4, 8, 16):
            sums[index] = sums[index] + exchange(sums[index], distance)
        if g == 0:
            column = 8 * (index // 2) + 2 * t + index % 2
            store_shared(maxima + (warp * pairs + column) * 4, [sums[index]])
    cute.arch.sync_threads()
    totals = []
    for index in cutlass.range_constexpr(2 * dims.tiles):
        total = Float32(0.0)
        for k in cutlass.range_constexpr(WARPS):
            total = total + load_shared(maxima + (k * pairs + 8 * (index // 2) + 2 * t + index % 2) * 4)
        totals.append(total)
    if cutlass.const_expr(dims.fp8):
        enlarge = step_float(step, "latent_scale")
        for j in cutlass.range_constexpr(16 * dims.tiles):
            mixed[j] = mixed[j] * enlarge
    write(piece, request, group, largest, totals, mixed, record, dims)
    cute.arch.sync_threads()
