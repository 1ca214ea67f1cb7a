"""Absorbed attention over a request's latent rows (spec 2.6, 4.2, 4.3)."""

import math

import numpy as np

from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    broadcast_f32,
    get_f32,
    get_i32,
    get_i64,
    load_f32,
    multiply_add,
    multiply_f32,
    out_of_line,
    put_f32,
    splat_f32,
    store_f32,
    sum_f32,
    words,
    zero_f32,
)
from stepkernel.cpu.step import (
    LENGTHS,
    PAGE_COLUMNS,
    PAGE_TOKENS,
    PAGES,
    QUERIES,
    REQUESTS,
    ROUNDS,
)
from stepkernel.cpu.vmath import E4M3, load_as, load_e4m3, round_if, store_e4m3
from stepkernel.program.stages import PARTIAL, Attend

CHUNK = 16  # cache rows widened to float32 at a time; fixed, so that a row's result depends on its own length only
HEADS = 4  # heads that share the loads of a chunk
_arguments = words(14)
_SCALE, _QUERY, _LATENT = 8 * 14, 8 * 15, 8 * 16
_EMPTY = np.float32(-3e38)  # the largest score of no rows, finite so that a difference of two is a number


def _scratch(stage: Attend) -> int:
    width = stage.lora + stage.rope
    return 4 * (CHUNK * width + HEADS * (CHUNK + 2 + stage.lora + width)) + 256


def encode(
    stage: Attend, layout: Layout, cache: int, row_bytes: int, kind: int, query_scale: float, latent_scale: float
) -> list[Record]:
    """`kind`: format of the cache's values. The scales are 1 unless it is FP8, for which queries are rounded too."""
    where = stage.context
    context = (0, 0, 0) if where is None else (where.size, where.rank, where.interleave)
    arguments = (
        *layout.at(stage.x),
        *layout.at(stage.out),
        cache,
        row_bytes,
        kind,
        stage.heads,
        stage.lora,
        stage.rope,
        int(stage.causal),
        *context,
        float(stage.scale * query_scale * latent_scale),
        1.0 / query_scale,
        float(latent_scale),
    )
    return [Record(Operation.ATTEND, arguments, scratch=_scratch(stage))]


@inner
def attend(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Units are (row, up to four heads). The softmax runs on line over chunks of 16 cache rows (flash attention)."""
    out_of_line()
    x, x_stride, out, out_stride, cache, row_bytes, kind, heads, lora, rope, causal, ranks, rank, interleave = (
        _arguments(record)
    )
    scale = get_f32(record + _SCALE)
    queries = get_i64(step + QUERIES)
    rounds = get_i64(step + ROUNDS)
    rows = get_i64(step + REQUESTS) * queries
    together = HEADS
    while together > 1 and rows * ((heads + together - 1) // together) < threads:
        together //= 2
    blocks = (heads + together - 1) // together
    first, last = share(rows * blocks, threads, thread)
    width = lora + rope
    for unit in range(first, last):
        row = unit // blocks
        head = (unit - row * blocks) * together
        count = min(together, heads - head)
        request = row // queries
        length = get_i32(get_i64(step + LENGTHS) + request * 4)
        if causal != 0:
            length += row - request * queries + 1 - queries
        if ranks != 0:
            length = _owned(length, ranks, rank, interleave)
        q = x + row * x_stride + head * width * 4
        y = out + row * out_stride + head * (lora if ranks == 0 else lora + PARTIAL) * 4
        if kind == E4M3:
            q = _round_queries(q, scratch + _rounded_at(width, lora), count * width, get_f32(record + _QUERY))
        enlarge = get_f32(record + _LATENT)
        _attend_heads(
            q,
            y,
            cache,
            row_bytes,
            kind,
            request,
            length,
            count,
            lora,
            width,
            scale,
            enlarge,
            rounds,
            ranks,
            step,
            scratch,
        )


@inner
def _owned(tokens: int, ranks: int, rank: int, interleave: int) -> int:
    """`ContextShard.owned` (program/context.py)."""
    whole = max(tokens, 0) // (interleave * ranks)
    rest = max(tokens, 0) - whole * interleave * ranks
    return whole * interleave + min(max(rest - rank * interleave, 0), interleave)


@inner
def _rounded_at(width: int, lora: int) -> int:
    """Offset in a thread's scratch of the queries that were rounded to FP8."""
    return 4 * (CHUNK * width + HEADS * (CHUNK + 2 + lora))


@inner
def _round_queries(q: int, target: int, count: int, scale: float) -> int:
    """Queries times `scale`, rounded to E4M3, as float32 at `target`, which is returned (spec 2.6)."""
    factor = splat_f32(scale)
    for i in range(0, count, 8):
        store_e4m3(target + i * 4, multiply_f32(load_f32(q + i * 4), factor))
        store_f32(target + i * 4, load_e4m3(target + i * 4))
    return target


@inner
def _attend_heads(
    q: int,
    y: int,
    cache: int,
    row_bytes: int,
    kind: int,
    request: int,
    length: int,
    count: int,
    lora: int,
    width: int,
    scale: float,
    enlarge: float,
    rounds: int,
    ranks: int,
    step: int,
    scratch: int,
) -> None:
    """`count` heads of one row over its first `length` cache rows; zero where length <= 0 (padding).

    With `ranks` these are the rows of one rank, and the result is a partial one (`Attend` in program/stages.py).
    """
    out_of_line()
    pages = get_i64(step + PAGES) + request * get_i64(step + PAGE_COLUMNS) * 4
    page_tokens = get_i64(step + PAGE_TOKENS)
    chunk = scratch
    weights = chunk + CHUNK * width * 4
    tops = weights + HEADS * CHUNK * 4
    totals = tops + HEADS * 4
    sums = totals + HEADS * 4
    for h in range(count):
        put_f32(tops + h * 4, np.float32(-np.inf))
        put_f32(totals + h * 4, np.float32(0.0))
    for i in range(0, count * lora * 4, 32):
        store_f32(sums + i, zero_f32())
    for start in range(0, length, CHUNK):
        size = min(CHUNK, length - start)
        for t in range(size):
            position = start + t
            page = get_i32(pages + position // page_tokens * 4)
            source = cache + (page * page_tokens + position % page_tokens) * row_bytes
            target = chunk + t * width * 4
            for i in range(0, width, 8):
                store_f32(target + i * 4, load_as(source, i, kind))
        for h in range(count):
            _score(q + h * width * 4, chunk, weights + h * CHUNK * 4, size, width, scale)
            _rescale(weights + h * CHUNK * 4, tops + h * 4, totals + h * 4, sums + h * lora * 4, size, lora)
        _accumulate(chunk, weights, sums, count, size, lora, width)
    if ranks != 0:
        _store_partial(y, tops, totals, sums, count, length, lora, enlarge)
        return
    for h in range(count):
        total = get_f32(totals + h * 4)
        inverse = splat_f32(enlarge / total) if length > 0 else zero_f32()
        for i in range(h * lora * 4, (h + 1) * lora * 4, 32):
            store_f32(y + i, round_if(multiply_f32(load_f32(sums + i), inverse), rounds))


@inner
def _store_partial(
    y: int, tops: int, totals: int, sums: int, count: int, length: int, lora: int, enlarge: float
) -> None:
    """Of each head the sum, the largest score and the total, for `merge` (exchange.py)."""
    factor = splat_f32(enlarge)
    for h in range(count):
        target = y + h * (lora + PARTIAL) * 4
        for i in range(0, lora * 4, 32):
            store_f32(target + i, multiply_f32(load_f32(sums + h * lora * 4 + i), factor))
        store_f32(target + lora * 4, zero_f32())
        put_f32(target + lora * 4, get_f32(tops + h * 4) if length > 0 else _EMPTY)
        put_f32(target + lora * 4 + 4, get_f32(totals + h * 4))


@inner
def _score(q: int, chunk: int, scores: int, size: int, width: int, scale: float) -> None:
    """Scaled products of one query with the rows of a chunk, four rows to each load of the query."""
    t = 0
    step = width * 4
    while t + 4 <= size:
        r0 = chunk + t * step
        a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        for i in range(0, step, 32):
            x = load_f32(q + i)
            a = multiply_add(x, load_f32(r0 + i), a)
            b = multiply_add(x, load_f32(r0 + step + i), b)
            c = multiply_add(x, load_f32(r0 + 2 * step + i), c)
            d = multiply_add(x, load_f32(r0 + 3 * step + i), d)
        put_f32(scores + t * 4, sum_f32(a) * scale)
        put_f32(scores + t * 4 + 4, sum_f32(b) * scale)
        put_f32(scores + t * 4 + 8, sum_f32(c) * scale)
        put_f32(scores + t * 4 + 12, sum_f32(d) * scale)
        t += 4
    while t < size:
        a = zero_f32()
        for i in range(0, step, 32):
            a = multiply_add(load_f32(q + i), load_f32(chunk + t * step + i), a)
        put_f32(scores + t * 4, sum_f32(a) * scale)
        t += 1


@inner
def _rescale(scores: int, top: int, total: int, sums: int, size: int, lora: int) -> None:
    """Turns scores into weights relative to the running maximum, rescaling what was summed before if it moved."""
    before = get_f32(top)
    now = before
    for t in range(size):
        value = get_f32(scores + t * 4)
        # `not <=` lets a NaN through, so that it reaches the output.
        if not value <= now:
            now = value
    if now != before:
        factor = np.float32(math.exp(before - now))
        put_f32(total, get_f32(total) * factor)
        shrink = splat_f32(factor)
        for i in range(0, lora * 4, 32):
            store_f32(sums + i, multiply_f32(load_f32(sums + i), shrink))
        put_f32(top, now)
    added = np.float32(0.0)
    for t in range(size):
        value = np.float32(math.exp(get_f32(scores + t * 4) - now))
        put_f32(scores + t * 4, value)
        added += value
    put_f32(total, get_f32(total) + added)


@inner
def _accumulate(chunk: int, weights: int, sums: int, count: int, size: int, lora: int, width: int) -> None:
    """sums[h] += weights[h] @ chunk[:, :lora], four heads to each load of the chunk."""
    if count == HEADS:
        s1, s2, s3 = lora * 4, lora * 8, lora * 12
        w1, w2, w3 = CHUNK * 4, CHUNK * 8, CHUNK * 12
        for i in range(0, lora * 4, 32):
            a, b = load_f32(sums + i), load_f32(sums + s1 + i)
            c, d = load_f32(sums + s2 + i), load_f32(sums + s3 + i)
            for t in range(size):
                x = load_f32(chunk + t * width * 4 + i)
                w = weights + t * 4
                a = multiply_add(broadcast_f32(w), x, a)
                b = multiply_add(broadcast_f32(w + w1), x, b)
                c = multiply_add(broadcast_f32(w + w2), x, c)
                d = multiply_add(broadcast_f32(w + w3), x, d)
            store_f32(sums + i, a)
            store_f32(sums + s1 + i, b)
            store_f32(sums + s2 + i, c)
            store_f32(sums + s3 + i, d)
        return
    for h in range(count):
        for i in range(0, lora * 4, 32):
            a = load_f32(sums + h * lora * 4 + i)
            for t in range(size):
                a = multiply_add(broadcast_f32(weights + (h * CHUNK + t) * 4), load_f32(chunk + t * width * 4 + i), a)
            store_f32(sums + h * lora * 4 + i, a)
