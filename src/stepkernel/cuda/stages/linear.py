"""out = scale x W^T for 1 to 64 rows of x, on the tensor cores (spec 2.1), and W_UV with its gate (spec 2.6).

A warp multiplies 16 rows of W by all rows of x: mma.m16n8k16 takes W as its 16-row operand and x as its 8 columns, so 1
row costs the same as 8. Every 8 rows more take the same weights, which are in registers then, once more. The sum over k
may run in any order, so each thread takes 8 consecutive columns of W per 32: one 16-byte load of a row feeds two
instructions, and no shared memory or ldmatrix is needed. `split` warps share the columns of one tile and add their sums
through shared memory.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_half, load_weights, load_words, store_float, store_half, store_shared
from stepkernel.cuda.dims import COLUMNS, THREADS, WARPS, LinearDims, column_tiles
from stepkernel.cuda.functions import sigmoid
from stepkernel.cuda.stages.mailbox import place_of, post_four
from stepkernel.cuda.stages.tiles import TILE, element, slot_of, tile_sum
from stepkernel.cuda.values import floats, least, matrix_multiply, pair, quotient, remainder, rounded
from stepkernel.cuda.walk import words

STEP = 32  # columns of a turn


def row_of(g: Any, eight: int, rows: int) -> Any:
    """Row number g of an eight of `rows`; the last one behind them. Full eights need no comparison, which the compiler
    would keep in a register through the whole kernel."""
    row = g + COLUMNS * eight
    return row if COLUMNS * (eight + 1) <= rows else least(row, Int32(rows - 1))


@cute.jit
def linear(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[LinearDims]
) -> None:
    """weight bf16 [outputs, inputs], or one block per head; x bf16 rows, `x_stride` bytes apart; out bf16 or f32 rows,
    `out_stride` bytes apart, from its first column, or in the mailboxes of all ranks; gate bf16 [rows, outputs]. The
    CTA `first` takes the first tiles, so that the projections of one stage start at different CTAs."""
    (count, first) = words(record, dims, "outputs", "first")
    outputs = Int32(count)
    group = WARPS // dims.split * TILE
    piece = remainder(cta + ctas - remainder(Int32(first), ctas), ctas)
    while piece * group < outputs:
        _tiles(piece, outputs, record, step, scratch, dims)
        piece = piece + ctas


@cute.jit
def _tiles(
    piece: Int32, outputs: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[LinearDims]
) -> None:
    weight, x, x_stride = words(record, dims, "weight", "x", "x_stride")
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    t = lane % 4
    part = warp % dims.split
    tile = (piece * (WARPS // dims.split) + warp // dims.split) * TILE
    # What is behind the last output or row stands for the last one: every sum depends on its own row and output only.
    upper = least(tile + g, outputs - 1)
    lower = least(tile + g + 8, outputs - 1)
    eights = column_tiles(dims.rows)
    rows_x = []
    for eight in cutlass.range_constexpr(eights):
        rows_x.append(x + Int64(row_of(g, eight, dims.rows)) * x_stride + Int64(t * 16))
    row_a = weight + Int64(t * 16)
    row_b = row_a
    if cutlass.const_expr(dims.per_head > 0):
        row_a = row_a + Int64(quotient(upper, dims.per_head)) * dims.head_bytes
        row_b = row_b + Int64(quotient(lower, dims.per_head)) * dims.head_bytes
        row_a = row_a + Int64(remainder(upper, dims.per_head)) * (dims.inputs * 2)
        row_b = row_b + Int64(remainder(lower, dims.per_head)) * (dims.inputs * 2)
        for eight in cutlass.range_constexpr(eights):
            rows_x[eight] = rows_x[eight] + Int64(quotient(upper, dims.per_head)) * (dims.inputs * 2)
    else:
        row_a = row_a + Int64(upper) * (dims.inputs * 2)
        row_b = row_b + Int64(lower) * (dims.inputs * 2)
    turns = dims.inputs // STEP // dims.split
    c = [Float32(0.0)] * (4 * eights)
    # As many turns at once as 232 registers allow.
    at_once = 4 if eights == 1 else 2 if eights <= 4 else 1
    # Warps behind the last output would read its row once more.
    if tile < outputs:
        for turn in cutlass.range(turns, unroll=min(at_once, turns)):
            place = Int64(turn * dims.split + part) * (STEP * 2)
            a = load_weights(row_a + place)
            b = load_weights(row_b + place)
            for eight in cutlass.range_constexpr(eights):
                v = load_words(rows_x[eight] + place)
                sums = matrix_multiply([a[0], b[0], a[1], b[1]], [v[0], v[1]], c[4 * eight : 4 * eight + 4])
                c[4 * eight : 4 * eight + 4] = matrix_multiply([a[2], b[2], a[3], b[3]], [v[2], v[3]], sums)
    for eight in cutlass.range_constexpr(eights):
        store_shared(scratch + warp * 512 + slot_of(g, t) * 16, c[4 * eight : 4 * eight + 4])
        cute.arch.sync_threads()
        _finish(piece, eight * COLUMNS, outputs, record, step, scratch, dims)
        cute.arch.sync_threads()


@cute.jit
def _finish(
    piece: Int32,
    first: cutlass.Constexpr[int],
    outputs: Int32,
    record: Int64,
    step: Int64,
    scratch: Int32,
    dims: cutlass.Constexpr[LinearDims],
) -> None:
    """Adds the warps' sums of a piece for 8 rows of x from `first` on, and stores or posts them."""
    out, out_stride = words(record, dims, "out", "out_stride")
    tid, _, _ = cute.arch.thread_idx()
    for turn in cutlass.range_constexpr(-(-(WARPS // dims.split) * 128 // THREADS)):
        mine, n, column, place = element(tid, turn, dims.split)
        row = first + column
        output = (piece * (WARPS // dims.split) + mine) * TILE + n
        if mine < WARPS // dims.split:
            total = tile_sum(scratch + place, dims.split)
            if cutlass.const_expr(dims.scale != 1.0):
                total = total * dims.scale
            inside = Int32(0)
            if row < dims.rows and output < outputs:
                inside = Int32(1)
            if cutlass.const_expr(dims.posting is not None):
                size = 2 if dims.to_bf16 else 4
                target = place_of(record, step, dims, dims.posting.ranks)
                target = target + Int64(row) * out_stride + Int64(output - n % 4) * size
                post_four(step, target, total, inside, dims.to_bf16, dims.posting)
            elif inside != 0:
                if cutlass.const_expr(dims.gated):
                    (gate,) = words(record, dims, "gate")
                    open_gate, _ = floats(load_half(gate + (Int64(row) * Int64(outputs) + Int64(output)) * 2))
                    total = rounded(total) * sigmoid(open_gate)
                if cutlass.const_expr(dims.to_bf16):
                    store_half(out + Int64(row) * out_stride + Int64(output) * 2, pair(total, Float32(0.0)))
                else:
                    store_float(out + Int64(row) * out_stride + Int64(output) * 4, total)
