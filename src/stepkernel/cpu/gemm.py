"""Products of BF16 weights and float32 rows: the kernel nearly all of a step's bytes go through.

A weight matrix [N, K] is stored `[N / 8][K / 2][8 outputs][2 inputs]`: one 32-byte load is 8 outputs x 2 inputs of a
*group*. The even input is `bits << 16`, the odd one `bits & 0xffff0000`, both exact, and nothing is summed across
lanes. Every output is one chain of fused multiply-adds over k = 0, 1, 2, ..., whatever the number of rows, threads or
tiles, so a row's result does not depend on its company.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import (
    F32,
    I64,
    LANES,
    constant_ir,
    f32x8,
    get_i64,
    i32x8,
    load_f32,
    load_ir,
    multiply_add_ir,
    multiply_f32,
    out_of_line,
    prefetch_ir,
    put_i64,
    splat_f32,
    splat_ir,
    store_f32,
    store_ir,
)
from stepkernel.cpu.vmath import round_bf16

PAIR_BYTES = 32  # 8 outputs x 2 inputs
UNROLL = 2  # pairs per iteration: one cache line of each group
CHUNK_PAIRS = 512  # inputs of a chunk / 2: 32 KiB of two groups stay close while further rows use them


def tile(groups: int, rows: int, ahead: int) -> Any:
    """A kernel for `groups` weight groups x `rows` rows, unrolled at compile time.

    Arguments: weights of the first group, bytes between groups, address of `rows` input pointers (float32), address of
    `rows` output pointers (float32), byte offset of the first group in an output row, bytes between groups there, byte
    offset of the first pair within a group, pairs, and whether the output holds a partial sum to go on from.
    `ahead` > 0 prefetches that many bytes in front.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def kernel(
        typing: Any,
        w: Any,
        w_step: Any,
        xs: Any,
        ys: Any,
        y_first: Any,
        y_step: Any,
        start: Any,
        pairs: Any,
        resume: Any,
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
            _emit_tile(builder, values, groups, rows, ahead)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 9)), generate

    return kernel


def _emit_tile(b: ir.IRBuilder, values: Sequence[ir.Value], groups: int, rows: int, ahead: int) -> None:
    w, w_step, xs, ys, y_first, y_step, start, pairs, resume = values

    def at(base: ir.Value, *offsets: ir.Value) -> ir.Value:
        for offset in offsets:
            base = b.add(base, offset)
        return base

    def number(value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    cells = [(g, r) for g in range(groups) for r in range(rows)]
    first = b.add(w, start)
    weights = [at(first, b.mul(w_step, number(g))) for g in range(groups)]
    x_start = b.lshr(start, number(2))  # 32 bytes of weights for 8 bytes of input
    inputs = [at(load_ir(b, at(xs, number(8 * r)), I64, 8), x_start) for r in range(rows)]
    outputs = {
        (g, r): at(load_ir(b, at(ys, number(8 * r)), I64, 8), y_first, b.mul(y_step, number(g))) for g, r in cells
    }
    entry = b.basic_block
    again, begin, body, done = (b.append_basic_block(name) for name in ("resume", "begin", "body", "done"))
    b.cbranch(b.icmp_signed("!=", resume, number(0)), again, begin)
    b.position_at_end(again)
    partial = {cell: load_ir(b, outputs[cell], f32x8.llvm) for cell in cells}
    b.branch(begin)
    b.position_at_end(begin)
    initial = {}
    for cell in cells:
        initial[cell] = b.phi(f32x8.llvm)
        initial[cell].add_incoming(constant_ir(f32x8, 0.0), entry)
        initial[cell].add_incoming(partial[cell], again)
    b.branch(body)
    b.position_at_end(body)
    step = b.phi(I64)
    step.add_incoming(number(0), begin)
    sums = {}
    for cell in cells:
        sums[cell] = b.phi(f32x8.llvm)
        sums[cell].add_incoming(initial[cell], begin)
    current = dict(sums)
    high = constant_ir(i32x8, -65536)
    w_offset, x_offset = b.mul(step, number(PAIR_BYTES)), b.mul(step, number(8))
    for u in range(UNROLL):
        loaded = [load_ir(b, at(weights[g], w_offset, number(PAIR_BYTES * u)), i32x8.llvm) for g in range(groups)]
        if ahead and u == 0:
            for g in range(groups):
                prefetch_ir(b, [at(weights[g], w_offset, number(ahead))])
        for parity in range(2):
            if parity == 0:
                exact = [b.bitcast(b.shl(v, constant_ir(i32x8, 16)), f32x8.llvm) for v in loaded]
            else:
                exact = [b.bitcast(b.and_(v, high), f32x8.llvm) for v in loaded]
            for r in range(rows):
                x = splat_ir(b, load_ir(b, at(inputs[r], x_offset, number(8 * u + 4 * parity)), F32, 4), LANES)
                for g in range(groups):
                    current[g, r] = multiply_add_ir(b, exact[g], x, current[g, r])
    following = b.add(step, number(UNROLL))
    step.add_incoming(following, body)
    for cell in cells:
        sums[cell].add_incoming(current[cell], body)
    b.cbranch(b.icmp_signed("<", following, pairs), body, done)
    b.position_at_end(done)
    for cell in cells:
        store_ir(b, outputs[cell], current[cell])


AHEAD = 1024
_4x1, _4x2 = tile(4, 1, AHEAD), tile(4, 2, AHEAD)
_2x1, _2x2, _2x3, _2x4 = (tile(2, rows, AHEAD) for rows in (1, 2, 3, 4))
_1x1, _1x2, _1x3, _1x4 = (tile(1, rows, 0) for rows in (1, 2, 3, 4))


@inner
def _one_group(w: int, xs: int, ys: int, y_first: int, start: int, pairs: int, resume: int, rows: int) -> None:
    if rows == 1:
        _1x1(w, 0, xs, ys, y_first, 0, start, pairs, resume)
    elif rows == 2:
        _1x2(w, 0, xs, ys, y_first, 0, start, pairs, resume)
    elif rows == 3:
        _1x3(w, 0, xs, ys, y_first, 0, start, pairs, resume)
    else:
        _1x4(w, 0, xs, ys, y_first, 0, start, pairs, resume)


@inner
def _two_groups(
    w: int,
    w_step: int,
    xs: int,
    ys: int,
    y_first: int,
    y_step: int,
    start: int,
    pairs: int,
    resume: int,
    rows: int,
) -> None:
    # 2 x 4 keeps its 8 sums and the weights in 16 registers; LLVM spills a sum of 3 x 4 (36 against 46 G mul-add/s).
    if rows == 1:
        _2x1(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)
    elif rows == 2:
        _2x2(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)
    elif rows == 3:
        _2x3(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)
    else:
        _2x4(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)


@inner
def gemm(w: int, group_bytes: int, xs: int, ys: int, rows: int, first: int, last: int, pairs: int) -> None:
    """Outputs of groups first..last for `rows` rows; `xs` and `ys` are addresses of row pointers.

    Groups that run together lie a quarter (a half) of the range apart: several far-apart streams read faster than one
    (100 % against 75 % of the roof). More than four rows go in tiles of at most four over chunks of the inputs.
    """
    out_of_line()
    together = 4 if rows <= 2 else 2
    chunk = pairs if rows <= 4 else CHUNK_PAIRS
    apart = (last - first) // together
    w_step, y_step = apart * group_bytes, apart * 32
    for g in range(first, first + apart):
        at, y = w + g * group_bytes, g * 32
        if rows == 1:
            _4x1(at, w_step, xs, ys, y, y_step, 0, pairs, 0)
        elif rows == 2:
            _4x2(at, w_step, xs, ys, y, y_step, 0, pairs, 0)
        else:
            for start in range(0, pairs, chunk):
                length = min(chunk, pairs - start)
                row, tiles = 0, (rows + 3) // 4
                while tiles > 0:
                    size = (rows - row + tiles - 1) // tiles
                    p = row * 8
                    _two_groups(at, w_step, xs + p, ys + p, y, y_step, start * PAIR_BYTES, length, start, size)
                    row, tiles = row + size, tiles - 1
    for g in range(first + together * apart, last):
        row, tiles = 0, (rows + 3) // 4
        while tiles > 0:
            size = (rows - row + tiles - 1) // tiles
            _one_group(w + g * group_bytes, xs + row * 8, ys + row * 8, g * 32, 0, pairs, 0, size)
            row, tiles = row + size, tiles - 1


@inner
def round_rows(ys: int, rows: int, first: int, last: int) -> None:
    """Rounds columns first..last (multiples of 8) of the rows to BF16."""
    for r in range(rows):
        y = get_i64(ys + r * 8)
        for c in range(first * 4, last * 4, 32):
            store_f32(y + c, round_bf16(load_f32(y + c)))


@inner
def scale_rows(ys: int, rows: int, first: int, last: int, scale: float) -> None:
    """Multiplies columns first..last (multiples of 8) of the rows by a factor."""
    factor = splat_f32(scale)
    for r in range(rows):
        y = get_i64(ys + r * 8)
        for c in range(first * 4, last * 4, 32):
            store_f32(y + c, multiply_f32(load_f32(y + c), factor))


@inner
def point_rows(table: int, base: int, stride: int, rows: int) -> None:
    """Writes the addresses of `rows` rows, `stride` bytes apart, to a pointer table."""
    for r in range(rows):
        put_i64(table + r * 8, base + r * stride)


@inner
def share(count: int, threads: int, thread: int) -> tuple[int, int]:
    """The part of `count` units that falls to a thread: contiguous, sizes differ by at most one."""
    return count * thread // threads, count * (thread + 1) // threads
