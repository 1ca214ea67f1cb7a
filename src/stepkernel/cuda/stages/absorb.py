"""q_absorbed[h] = [W_UK[h]^T q_nope[h] | q_rope[h]] (spec 2.6): a product along the columns of the weight.

The 16-row operand of an mma must hold pairs of neighbouring k, which are different rows of the weight here. A thread
loads 16 bytes of two rows and shuffles their bytes into 8 such pairs; which latent value a row of the operand stands
for is free, so these pairs feed 4 instructions and every load is 16 contiguous bytes. A warp makes 64 latent values.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_int, load_shared_floats, load_weights, store_int, store_shared
from stepkernel.cuda.dims import COLUMNS, THREADS, WARPS, AbsorbDims, column_tiles
from stepkernel.cuda.stages.linear import row_of
from stepkernel.cuda.values import bytes_of, matrix_multiply, pair, quotient, remainder
from stepkernel.cuda.walk import words

TILE = 64  # latent values of a warp


def column_fragments(rows: list[list[Any]], j: int) -> list[Any]:
    """The 16-row operand number j of 4 from 16 bytes of each of the rows 2t, 2t + 1, 2t + 8, 2t + 9: with g = lane / 4
    its rows g and g + 8 stand for the values 8g + 2j and 8g + 2j + 1."""
    fragments = []
    for even, odd in ((rows[0], rows[1]), (rows[2], rows[3])):
        fragments += [bytes_of(even[j], odd[j], 0x5410), bytes_of(even[j], odd[j], 0x7632)]
    return fragments


@cute.jit
def absorb(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[AbsorbDims]
) -> None:
    """bf16: weight [heads, nope + value, lora]; x [rows, heads, nope + rope]; out [rows, heads, lora + rope]."""
    tid, _, _ = cute.arch.thread_idx()
    weight, x, out = words(record, dims, "weight", "x", "out")
    tiles = dims.heads * (dims.lora // TILE)
    group = WARPS // dims.split
    piece = cta
    while piece < -(-tiles // group):
        _tiles(piece, weight, x, out, scratch, dims)
        piece = piece + ctas
    # The rest of each query is copied, two values at a time.
    half = dims.rope // 2
    index = cta * THREADS + tid
    while index < dims.rows * dims.heads * half:
        query = Int64(quotient(index, half))
        place = Int64(remainder(index, half)) * 4
        value = load_int(x + query * ((dims.nope + dims.rope) * 2) + dims.nope * 2 + place)
        store_int(out + query * ((dims.lora + dims.rope) * 2) + dims.lora * 2 + place, value)
        index = index + ctas * THREADS


@cute.jit
def _tiles(
    piece: Int32, weight: Int64, x: Int64, out: Int64, scratch: Int32, dims: cutlass.Constexpr[AbsorbDims]
) -> None:
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    t = lane % 4
    per_head = dims.lora // TILE
    tiles = dims.heads * per_head
    tile = piece * (WARPS // dims.split) + warp // dims.split
    head = quotient(tile, per_head)
    steps = dims.nope // 16 // dims.split
    start = warp % dims.split * steps * 16 + 2 * t
    base = weight + Int64(head) * ((dims.nope + dims.value) * dims.lora * 2)
    base = base + Int64(start) * (dims.lora * 2) + Int64(remainder(tile, per_head) * TILE + 8 * g) * 2
    eights = column_tiles(dims.rows)
    queries = []
    for eight in cutlass.range_constexpr(eights):
        row = Int64(row_of(g, eight, dims.rows)) * dims.heads + Int64(head)
        queries.append(x + row * ((dims.nope + dims.rope) * 2) + Int64(start) * 2)
    sums = [Float32(0.0)] * (16 * eights)
    if tile < tiles:
        for turn in cutlass.range(steps, unroll=min(2 if eights == 1 else 1, steps)):
            rows = [load_weights(base + Int64(turn * 16 + n) * (dims.lora * 2)) for n in (0, 1, 8, 9)]
            for eight in cutlass.range_constexpr(eights):
                near = load_int(queries[eight] + Int64(turn) * 32)
                far = load_int(queries[eight] + Int64(turn) * 32 + 16)
                for j in cutlass.range_constexpr(4):
                    at = 16 * eight + 4 * j
                    sums[at : at + 4] = matrix_multiply(column_fragments(rows, j), [near, far], sums[at : at + 4])
    for eight in cutlass.range_constexpr(eights):
        for j in cutlass.range_constexpr(4):
            at = 16 * eight + 4 * j
            store_shared(scratch + (warp * 4 + j) * 512 + lane * 16, sums[at : at + 4])
        cute.arch.sync_threads()
        _finish(piece, eight * COLUMNS, out, scratch, dims)
        cute.arch.sync_threads()


@cute.jit
def _finish(
    piece: Int32, first: cutlass.Constexpr[int], out: Int64, scratch: Int32, dims: cutlass.Constexpr[AbsorbDims]
) -> None:
    """Adds the warps' sums of a piece for 8 rows from `first` on, and writes them."""
    tid, _, _ = cute.arch.thread_idx()
    per_head = dims.lora // TILE
    group = WARPS // dims.split
    for turn in cutlass.range_constexpr(-(-group * 128 // THREADS)):
        index = tid + turn * THREADS
        mine = index // 128
        written = piece * group + mine
        if mine < group and written < dims.heads * per_head:
            place = scratch + mine * dims.split * 2048 + index % 128 * 16
            total = load_shared_floats(place)
            for k in cutlass.range_constexpr(1, dims.split):
                more = load_shared_floats(place + k * 2048)
                for n in cutlass.range_constexpr(4):
                    total[n] = total[n] + more[n]
            row = first + index % 4 * 2
            value = remainder(written, per_head) * TILE + index % 32 // 4 * 8 + index % 128 // 32 * 2
            for n in cutlass.range_constexpr(2):
                if row + n < dims.rows:
                    at = (row + n) * dims.heads + quotient(written, per_head)
                    target = out + Int64(at) * ((dims.lora + dims.rope) * 2) + Int64(value) * 2
                    store_int(target, pair(total[n], total[n + 2]))
