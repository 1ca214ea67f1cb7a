"""Products of BF16 weights and float32 rows: the kernel nearly all of a step's bytes go through.

Every output is one chain of fused multiply-adds over k = 0, 1, 2, ... (with AVX-512 one over even and one over odd
pairs), whatever the number of rows, threads or tiles, so a row's result does not depend on its company.
"""

from stepkernel.cpu import isa
from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import get_i64, load_f32, multiply_f32, out_of_line, put_i64, splat_f32, store_f32
from stepkernel.cpu.tile import PAIR_BYTES, tile
from stepkernel.cpu.vmath import round_bf16

LANES = isa.gemm_lanes()
# Inputs of a chunk / 2: 48 KiB of three groups stay close while further rows use them. 16-lane sums cannot be resumed.
CHUNK_PAIRS = 512 if LANES == 8 else 1 << 40
AHEAD = 512
# 3 x 4 runs at 48 G multiply-adds/s of 54 possible, if rows and groups do not all fall on the same lines of the L1
# (layout.py); it needs the reload, without which LLVM spills a sum.
_4x1, _4x2 = tile(4, 1, AHEAD, LANES), tile(4, 2, AHEAD, LANES, reload=True)
_3x2, _3x3, _3x4 = tile(3, 2, AHEAD, LANES), tile(3, 3, AHEAD, LANES), tile(3, 4, AHEAD, LANES, reload=True)
_1x1, _1x2, _1x3, _1x4 = (tile(1, rows, 0, LANES) for rows in (1, 2, 3, 4))


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
def _three_groups(
    w: int, w_step: int, xs: int, ys: int, y_first: int, y_step: int, start: int, pairs: int, resume: int, rows: int
) -> None:
    if rows == 2:
        _3x2(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)
    elif rows == 3:
        _3x3(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)
    else:
        _3x4(w, w_step, xs, ys, y_first, y_step, start, pairs, resume)


@inner
def _spacing(apart: int, group_bytes: int) -> int:
    """At most `apart` groups, so that far-apart streams do not meet in one bank of the memory.

    Addresses that differ by 2^m +- 2^(m-5) bytes do on the machines measured: 18-20 GB/s instead of 22-23 at 992, 1056,
    1984, 2112 and 4224 KiB, one group less or more is enough.
    """
    for m in range(20, 28):
        if abs(apart * group_bytes - (1 << m)) == 1 << (m - 5):
            return apart - 1
    return apart


@inner
def gemm(w: int, group_bytes: int, xs: int, ys: int, rows: int, first: int, last: int, pairs: int) -> None:
    """Outputs of groups first..last for `rows` rows; `xs` and `ys` are addresses of row pointers.

    Groups that run together lie about a quarter (a third) of the range apart: far-apart streams read faster than one
    (100 % against 75 % of the roof). More than four rows go in tiles of at most four over chunks of the inputs.
    """
    out_of_line()
    together = 4 if rows <= 2 else 3
    chunk = pairs if rows <= 4 else CHUNK_PAIRS
    while last - first >= together:
        apart = _spacing((last - first) // together, group_bytes)
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
                        _three_groups(at, w_step, xs + p, ys + p, y, y_step, start * PAIR_BYTES, length, start, size)
                        row, tiles = row + size, tiles - 1
        first += together * apart
    for g in range(first, last):
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
