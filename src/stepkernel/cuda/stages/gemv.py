"""out = scale x W^T for 1 to 8 rows of x, on the tensor cores (spec 2.1).

A warp multiplies 16 rows of W by all rows of x: mma.m16n8k16 takes W as its 16-row operand and x as its 8 columns, so 1
row costs the same as 8. The sum over k may run in any order, so each thread takes 8 consecutive columns of W per 32:
one 16-byte load of a row feeds two instructions, and no shared memory or ldmatrix is needed. `split` warps share the
columns of one tile and add their sums through shared memory.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    keep_if_less,
    least,
    load_shared,
    load_weights,
    load_words,
    matrix_multiply,
    pair,
    store_float,
    store_half,
    store_shared,
)

THREADS = 256
WARPS = THREADS // 32
TILE = 16  # rows of W of a warp
STEP = 32  # columns of a turn


@cute.jit
def gemv_tiles(
    group: Int32,
    weight: Int64,
    x: Int64,
    out: Int64,
    scratch: Int32,
    outputs: cutlass.Constexpr,
    inputs: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    x_stride: cutlass.Constexpr,
    out_stride: cutlass.Constexpr,
    split: cutlass.Constexpr,
    to_bf16: cutlass.Constexpr,
    scale: cutlass.Constexpr,
) -> None:
    """The tiles of CTA `group`: WARPS / split times 16 outputs.

    weight bf16 [outputs, inputs]; x bf16 [rows, x_stride], rows <= 8; out bf16 or f32 [rows, out_stride], from its
    first column. inputs is a multiple of 32. scratch: shared address of WARPS * 128 floats.
    """
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    t = lane % 4
    tile = group * (WARPS // split) + warp // split
    part = warp % split
    first = least(tile * TILE + g, Int32(outputs - 1))
    second = least(tile * TILE + g + 8, Int32(outputs - 1))
    row_a = weight + Int64(first) * (inputs * 2) + Int64(t * 16)
    row_b = weight + Int64(second) * (inputs * 2) + Int64(t * 16)
    row_x = x + Int64(least(g, Int32(rows - 1))) * (x_stride * 2) + Int64(t * 16)
    steps = inputs // STEP
    turns = -(-steps // split)
    c0 = Float32(0.0)
    c1 = Float32(0.0)
    c2 = Float32(0.0)
    c3 = Float32(0.0)
    for turn in cutlass.range(turns, unroll=min(4, turns)):
        step = turn * split + part
        place = Int64(least(step, Int32(steps - 1))) * (STEP * 2)
        a = load_weights(row_a + place)
        b = load_weights(row_b + place)
        v = load_words(row_x + place)
        limit = cutlass.const_expr(steps % split != 0)
        for k in cutlass.range_constexpr(4):
            if cutlass.const_expr(rows < 8):
                v[k] = keep_if_less(v[k], g, Int32(rows))
            if limit:
                v[k] = keep_if_less(v[k], step, Int32(steps))
        c0, c1, c2, c3 = matrix_multiply([a[0], b[0], a[1], b[1]], [v[0], v[1]], [c0, c1, c2, c3])
        c0, c1, c2, c3 = matrix_multiply([a[2], b[2], a[3], b[3]], [v[2], v[3]], [c0, c1, c2, c3])
    store_shared(scratch + tid * 16, [c0, c1, c2, c3])
    cute.arch.sync_threads()
    # 128 sums of a tile, by threads in the order of the outputs so that stores are contiguous.
    for turn in cutlass.range_constexpr(-(-(WARPS // split) * 128 // THREADS)):
        index = tid + turn * THREADS
        mine = index // 128
        n = index % 16
        r = (index // 16) % 8
        output = (group * (WARPS // split) + mine) * TILE + n
        if mine < WARPS // split and r < rows and output < outputs:
            holder = (n % 8) * 4 + r // 2
            place = scratch + (mine * split * 32 + holder) * 16 + ((n // 8) * 2 + r % 2) * 4
            total = load_shared(place)
            for k in cutlass.range_constexpr(1, split):
                total = total + load_shared(place + k * 512)
            if cutlass.const_expr(scale != 1.0):
                total = total * scale
            if cutlass.const_expr(to_bf16):
                store_half(out + Int64(r * out_stride + output) * 2, pair(total, Float32(0.0)))
            else:
                store_float(out + Int64(r * out_stride + output) * 4, total)
    cute.arch.sync_threads()


@cute.kernel
def gemv_kernel(weight: Int64, x: Int64, out: Int64, dims: cutlass.Constexpr) -> None:
    scratch = cute.arch.alloc_smem(Float32, WARPS * 128, 16)
    group, _, _ = cute.arch.block_idx()
    gemv_tiles(group, weight, x, out, Int32(scratch.toint()), *dims)


@cute.jit
def gemv(weight: Int64, x: Int64, out: Int64, dims: cutlass.Constexpr) -> None:
    """dims: the constexpr arguments of `gemv_tiles`."""
    groups = -(-dims[0] // (TILE * (WARPS // dims[5])))
    gemv_kernel(weight, x, out, dims).launch(grid=[groups, 1, 1], block=[THREADS, 1, 1])
