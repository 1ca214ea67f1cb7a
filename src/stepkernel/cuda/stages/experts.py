"""Both halves of the routed experts (spec 2.8.3): act(x W1^T, x W3^T), and h W2^T, of the chosen experts.

The rows of a step that chose the same expert share its weights: the first choice (a slot of a row) that names an expert
works for all of them, the later ones have nothing to do. As in `linear`, a warp multiplies 16 rows of the weight by
rows of x: those of 8 choices, or of 16 in steps of more than 8 rows. What more rows chose the same expert takes another
pass, whose weights come from L2; otherwise every weight is read once. Packed weights are decoded to BF16, which is
exact. A thread takes `chunk` consecutive columns, so that packed weights too come in wide loads; the scales of a
piece's rows lie one after the other and are copied to shared memory first.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    load_int,
    load_shared_byte,
    load_shared_int,
    load_weights,
    load_words,
    ptx,
    store_half,
    store_shared,
    store_shared_int,
    store_shared_words,
)
from stepkernel.cuda.dims import COLUMNS, THREADS, WARPS, ExpertsDims
from stepkernel.cuda.functions import activate
from stepkernel.cuda.stages.mxfp4 import decode, scale_word
from stepkernel.cuda.stages.tiles import TILE, element, slot_of, tile_sum
from stepkernel.cuda.values import ballot, least, matrix_multiply, pair, quotient, remainder, rounded
from stepkernel.cuda.walk import words


def lowest_bit(mask: Any) -> Any:
    """Number of the lowest bit that is set, 32 without any."""
    return ptx("{ .reg .b32 r; brev.b32 r, <<$r0>>; clz.b32 <<$w0>>, r; }", [Int32], mask)


def bits_below(mask: Any, lane: Any) -> Any:
    """How many bits below number `lane` are set."""
    code = "{ .reg .b32 m; shl.b32 m, 1, <<$r1>>; sub.u32 m, m, 1; and.b32 m, m, <<$r0>>; popc.b32 <<$w0>>, m; }"
    return ptx(code, [Int32], mask, lane)


@cute.jit
def experts(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[ExpertsDims]
) -> None:
    """first, second: bf16 [experts, outputs, inputs], or packed bytes [experts, outputs, inputs / 2] with scales
    [experts, outputs, inputs / 32]; ids int32 [rows, top_k]. Up: x bf16 rows, `x_stride` bytes apart; otherwise x bf16
    [rows, top_k, inputs]. out bf16 [rows, top_k, outputs].

    Shared memory: sums of the warps, the choices of an expert, its scales.
    """
    (ids,) = words(record, dims, "ids")
    groups = -(-dims.outputs // (TILE * (WARPS // dims.split)))
    choices = scratch + WARPS * 512 * (2 if dims.up else 1)
    piece = cta
    while piece < dims.rows * dims.top_k * groups:
        owner = quotient(piece, groups)
        expert = load_int(ids + Int64(owner) * 4)
        count = _choices(owner, expert, ids, choices, dims)
        if count > 0:
            if cutlass.const_expr(dims.packed):
                _stage_scales(remainder(piece, groups), expert, record, choices + dims.choices_bytes(), dims)
            else:
                cute.arch.sync_threads()
            for start in cutlass.range(0, count, COLUMNS * dims.eights, unroll=1):
                _tiles(remainder(piece, groups), expert, start, count, choices, record, scratch, dims)
        piece = piece + ctas


@cute.jit
def _choices(owner: Int32, expert: Int32, ids: Int64, target: Int32, dims: cutlass.Constexpr[ExpertsDims]) -> Int32:
    """How many choices, numbers in [rows, top_k], name the expert; their numbers go to shared memory. 0 if one before
    the owner does, which works for all of them."""
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    every = dims.rows * dims.top_k
    turns = -(-every // 32)
    count = Int32(0)
    mine = Int32(1)
    for turn in cutlass.range(turns, unroll=min(8, turns)):
        choice = turn * 32 + lane
        match = Int32(0)
        if load_int(ids + Int64(least(choice, Int32(every - 1))) * 4) == expert and choice < every:
            match = Int32(1)
        mask = ballot(match)
        if mask != 0 and count == 0 and turn * 32 + lowest_bit(mask) != owner:
            mine = Int32(0)
        if match != 0 and mine != 0 and tid < 32:
            store_shared_int(target + (count + bits_below(mask, lane)) * 4, choice)
        count = count + bits_below(mask, Int32(32))
    if mine == 0:
        count = Int32(0)
    return count


@cute.jit
def _stage_scales(
    group: Int32, expert: Int32, record: Int64, target: Int32, dims: cutlass.Constexpr[ExpertsDims]
) -> None:
    """Scales of the piece's rows to shared memory, matrix after matrix. Tiles of 16 rows make all sizes multiples of 16
    bytes."""
    tid, _, _ = cute.arch.thread_idx()
    rows = TILE * (WARPS // dims.split)
    line = dims.inputs // 32
    start = group * rows
    chunks = quotient(least(Int32(dims.outputs) - start, Int32(rows)) * line, 16)
    for m in cutlass.range_constexpr(2 if dims.up else 1):
        (scales,) = words(record, dims, ("first_scale", "second_scale")[m])
        source = scales + (Int64(expert) * dims.outputs + Int64(start)) * line
        for chunk in cutlass.range(tid, chunks, THREADS, unroll=1):
            store_shared_words(target + m * rows * line + chunk * 16, load_weights(source + Int64(chunk) * 16))
    cute.arch.sync_threads()


@cute.jit
def _tiles(
    group: Int32,
    expert: Int32,
    start: Int32,
    count: Int32,
    choices: Int32,
    record: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[ExpertsDims],
) -> None:
    """The choices from number `start` on, as many as a pass takes."""
    (x,) = words(record, dims, "x")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    t = lane % 4
    part = warp % dims.split
    tile = (group * (WARPS // dims.split) + warp // dims.split) * TILE
    matrices = 2 if dims.up else 1
    columns = 4 * dims.chunk
    turns = dims.inputs // columns // dims.split
    # What is behind the last choice stands for the last one: every sum depends on its own row of x only.
    sources = []
    for eight in cutlass.range_constexpr(dims.eights):
        choice = load_shared_int(choices + least(start + COLUMNS * eight + g, count - 1) * 4)
        if cutlass.const_expr(dims.up):
            (x_stride,) = words(record, dims, "x_stride")
            sources.append(x + Int64(quotient(choice, dims.top_k)) * x_stride)
        else:
            sources.append(x + Int64(choice) * (dims.inputs * 2))
    bases = row_addresses(record, expert, group, tile, g, choices + dims.choices_bytes(), dims)
    sums = [[Float32(0.0)] * (4 * dims.eights) for _ in range(matrices)]
    if tile < dims.outputs:
        for turn in cutlass.range(turns, unroll=min(2 if dims.eights == 1 else 1, turns)):
            place = (turn * dims.split + part) * columns + t * dims.chunk
            values = []
            for eight in cutlass.range_constexpr(dims.eights):
                for k in cutlass.range_constexpr(dims.chunk // 8):
                    found = load_words(sources[eight] + Int64(place + 8 * k) * 2)
                    values.append(found)
            for m in cutlass.range_constexpr(matrices):
                a = weights_of(bases[2 * m], place, dims)
                b = weights_of(bases[2 * m + 1], place, dims)
                for eight in cutlass.range_constexpr(dims.eights):
                    c = sums[m][4 * eight : 4 * eight + 4]
                    for k in cutlass.range_constexpr(dims.chunk // 8):
                        v = values[eight * (dims.chunk // 8) + k]
                        first = [a[4 * k], b[4 * k], a[4 * k + 1], b[4 * k + 1]]
                        second = [a[4 * k + 2], b[4 * k + 2], a[4 * k + 3], b[4 * k + 3]]
                        c = matrix_multiply(first, [v[0], v[1]], c)
                        c = matrix_multiply(second, [v[2], v[3]], c)
                    sums[m][4 * eight : 4 * eight + 4] = c
    for eight in cutlass.range_constexpr(dims.eights):
        for m in cutlass.range_constexpr(matrices):
            place = scratch + (m * WARPS + warp) * 512 + slot_of(g, t) * 16
            store_shared(place, sums[m][4 * eight : 4 * eight + 4])
        cute.arch.sync_threads()
        _finish(group, start + COLUMNS * eight, count, choices, record, scratch, dims)
        cute.arch.sync_threads()


@cute.jit
def _finish(
    group: Int32,
    start: Int32,
    count: Int32,
    choices: Int32,
    record: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[ExpertsDims],
) -> None:
    """Adds the warps' sums for 8 choices from number `start` on, and writes what they give."""
    (out,) = words(record, dims, "out")
    tid, _, _ = cute.arch.thread_idx()
    matrices = 2 if dims.up else 1
    for turn in cutlass.range_constexpr(-(-(WARPS // dims.split) * 128 // THREADS)):
        mine, n, column, place = element(tid, turn, dims.split)
        output = (group * (WARPS // dims.split) + mine) * TILE + n
        if mine < WARPS // dims.split and start + column < count and output < dims.outputs:
            total = [tile_sum(scratch + place + m * (WARPS * 512), dims.split) for m in range(matrices)]
            value = total[0]
            if cutlass.const_expr(dims.up):
                value = activate(rounded(total[0]), rounded(total[1]), dims.beta, dims.linear_beta)
            choice = load_shared_int(choices + (start + column) * 4)
            store_half(out + (Int64(choice) * dims.outputs + Int64(output)) * 2, pair(value, Float32(0.0)))


def row_addresses(
    record: Any, expert: Any, group: Any, tile: Any, g: Any, staged: Any, dims: ExpertsDims
) -> list[tuple[Any, Any]]:
    """(values, scales) of the rows tile + g and tile + g + 8 of every matrix: a global and a shared address. staged:
    scales of the piece; without scales these addresses say nothing."""
    rows = TILE * (WARPS // dims.split)
    found = []
    for m, name in enumerate(("first", "second")[: 2 if dims.up else 1]):
        (values,) = words(record, dims, name)
        for row in (tile + g, tile + g + 8):
            inside = least(row, Int32(dims.outputs - 1))
            place = (Int64(expert) * dims.outputs + Int64(inside)) * (
                dims.inputs // 2 if dims.packed else dims.inputs * 2
            )
            scales = staged + (m * rows + inside - group * rows) * (dims.inputs // 32)
            found.append((values + place, scales))
    return found


def weights_of(base: tuple[Any, Any], place: Any, dims: ExpertsDims) -> list[Any]:
    """The `chunk` values of a row from column `place` on, as words of BF16 pairs."""
    values, scales = base
    if not dims.packed:
        return load_weights(values + Int64(place) * 2)
    packed = load_weights(values + Int64(quotient(place, 2)), dims.chunk // 8)
    scale = scale_word(load_shared_byte(scales + quotient(place, 32)), dims.hardware)
    found = []
    for word in packed:
        found += decode(word, scale, dims.hardware)
    return found
