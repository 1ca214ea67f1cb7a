"""Both halves of the routed experts (spec 2.8.3): act(x W1^T, x W3^T), and h W2^T, of the chosen experts.

The rows of a step that chose the same expert share its weights: the first (row, slot) that names an expert works for
all of them, the later ones have nothing to do, so every weight is read once. As in `linear`, a warp multiplies 16 rows
of the weight by all rows of x; what it makes for rows that did not choose the expert is dropped. Packed weights are
decoded to BF16, which is exact. A thread takes `chunk` consecutive columns, so that packed weights too come in wide
loads; the scales of a piece's rows lie one after the other and are copied to shared memory first.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    ballot,
    least,
    load_int,
    load_shared,
    load_shared_byte,
    load_shared_int,
    load_weights,
    load_words,
    matrix_multiply,
    pair,
    ptx,
    quotient,
    remainder,
    rounded,
    store_half,
    store_shared,
    store_shared_int,
    store_shared_words,
)
from stepkernel.cuda.dims import THREADS, WARPS, ExpertsDims
from stepkernel.cuda.functions import activate
from stepkernel.cuda.stages.mxfp4 import decode, scale_word
from stepkernel.cuda.walk import words

TILE = 16  # outputs of a warp


def slot_of(mask: Any) -> Any:
    """Lowest set bit of a mask, -1 if there is none."""
    code = (
        "{ .reg .pred p; .reg .b32 r; brev.b32 r, <<$r0>>; clz.b32 r, r; setp.eq.s32 p, <<$r0>>, 0; "
        "selp.b32 <<$w0>>, -1, r, p; }"
    )
    return ptx(code, [Int32], mask)


@cute.jit
def experts(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[ExpertsDims]
) -> None:
    """first, second: bf16 [experts, outputs, inputs], or packed bytes [experts, outputs, inputs / 2] with scales
    [experts, outputs, inputs / 32]; ids int32 [rows, top_k]. Up: x bf16 rows, `x_stride` bytes apart; otherwise x bf16
    [rows, top_k, inputs]. out bf16 [rows, top_k, outputs]."""
    (ids,) = words(record, dims, "ids")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    groups = -(-dims.outputs // (TILE * (WARPS // dims.split)))
    slots = scratch + WARPS * 512 * (2 if dims.up else 1)
    piece = cta
    while piece < dims.rows * dims.top_k * groups:
        owner = quotient(piece, groups)
        expert = load_int(ids + Int64(owner) * 4)
        # Which slot of each row names this expert; whether a row before the owner's does.
        own = Int32(-1)
        earlier = Int32(0)
        for row in cutlass.range_constexpr(dims.rows):
            match = Int32(0)
            if (
                lane < dims.top_k
                and load_int(ids + Int64(row * dims.top_k + least(lane, Int32(dims.top_k - 1))) * 4) == expert
            ):
                match = Int32(1)
            mask = ballot(match)
            if lane // 4 == row:
                own = slot_of(mask)
            if mask != 0 and row < quotient(owner, dims.top_k):
                earlier = Int32(1)
        if earlier == 0:
            if tid < 32 and lane % 4 == 0:
                store_shared_int(slots + lane, own)
            if cutlass.const_expr(dims.packed):
                _stage_scales(remainder(piece, groups), expert, record, slots + 32, dims)
            _tiles(remainder(piece, groups), expert, own, slots, record, scratch, dims)
        piece = piece + ctas


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
    own: Int32,
    slots: Int32,
    record: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[ExpertsDims],
) -> None:
    x, out = words(record, dims, "x", "out")
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
    row = least(g, Int32(dims.rows - 1))
    if cutlass.const_expr(dims.up):
        (x_stride,) = words(record, dims, "x_stride")
        source = x + Int64(row) * x_stride
    else:
        source = x + Int64(row * dims.top_k + (own if own >= 0 else Int32(0))) * (dims.inputs * 2)
    bases = row_addresses(record, expert, group, tile, g, slots + 32, dims)
    sums = [[Float32(0.0)] * 4 for _ in range(matrices)]
    if tile < dims.outputs:
        for turn in cutlass.range(turns, unroll=min(2, turns)):
            place = (turn * dims.split + part) * columns + t * dims.chunk
            values = []
            for k in cutlass.range_constexpr(dims.chunk // 8):
                found = load_words(source + Int64(place + 8 * k) * 2)
                values.append(found)
            for m in cutlass.range_constexpr(matrices):
                a = weights_of(bases[2 * m], place, dims)
                b = weights_of(bases[2 * m + 1], place, dims)
                for k in cutlass.range_constexpr(dims.chunk // 8):
                    v = values[k]
                    first = [a[4 * k], b[4 * k], a[4 * k + 1], b[4 * k + 1]]
                    second = [a[4 * k + 2], b[4 * k + 2], a[4 * k + 3], b[4 * k + 3]]
                    sums[m] = matrix_multiply(first, [v[0], v[1]], sums[m])
                    sums[m] = matrix_multiply(second, [v[2], v[3]], sums[m])
    for m in cutlass.range_constexpr(matrices):
        store_shared(scratch + m * (WARPS * 512) + tid * 16, sums[m])
    cute.arch.sync_threads()
    for turn in cutlass.range_constexpr(-(-(WARPS // dims.split) * 128 // THREADS)):
        index = tid + turn * THREADS
        mine = index // 128
        n = index % 16
        line = (index // 16) % 8
        output = (group * (WARPS // dims.split) + mine) * TILE + n
        if mine < WARPS // dims.split and line < dims.rows and output < dims.outputs:
            slot = load_shared_int(slots + line * 4)
            if slot >= 0:
                holder = (n % 8) * 4 + line // 2
                place = scratch + (mine * dims.split * 32 + holder) * 16 + ((n // 8) * 2 + line % 2) * 4
                total = [Float32(0.0)] * matrices
                for m in cutlass.range_constexpr(matrices):
                    for k in cutlass.range_constexpr(dims.split):
                        total[m] = total[m] + load_shared(place + m * (WARPS * 512) + k * 512)
                value = total[0]
                if cutlass.const_expr(dims.up):
                    value = activate(rounded(total[0]), rounded(total[1]), dims.beta, dims.linear_beta)
                at = Int64(line * dims.top_k + slot) * dims.outputs + Int64(output)
                store_half(out + at * 2, pair(value, Float32(0.0)))
    cute.arch.sync_threads()


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
