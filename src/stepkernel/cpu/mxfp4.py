"""Products of MXFP4 weights (E2M1 values, one E8M0 scale per 32 inputs) and rows quantised to integers.

A group of 8 outputs is stored as `[K / 32][8]` scale bytes, then `[K / 32][4][8 outputs][4 bytes]` of nibbles in the
file's own order (low nibble = even input), so repacking only moves 4-byte words. Twice a weight is an integer in
-12..12; the tables hold it plus 12, unsigned, which `maddubs` takes without sign tricks; `-12 * sum(x)` corrects it.

A row of activations becomes one record per 32 inputs: float32 half scale, int32 correction, then its integers. With
15 bits `x = scale * (128 * high + low)`, both parts one byte (relative error 7e-5, far below BF16's 2e-3); with 8 bits
only `high` (9e-3). The integer sums are exact, so the AVX2 and the generic path give the same bits.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stepkernel.cpu import isa
from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import (
    I32,
    I64,
    Vector,
    constant_ir,
    declare,
    f32x8,
    i8x8,
    i32x8,
    load_ir,
    multiply_add_ir,
    opaque_ir,
    out_of_line,
    prefetch_ir,
    splat_ir,
    store_ir,
)

GROUP = 32  # inputs that share a scale
SCALES, NIBBLES = 8, 128  # bytes of a group for 8 outputs
HEADER = 64  # half scale and correction, eight copies each
RECORD_15, RECORD_8 = HEADER + 512, HEADER + 256
AHEAD = 2048

_i8x32, _i16x16 = Vector("i8", 32), Vector("i16", 16)
_DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def record_bytes(bits: int) -> int:
    """Bytes of a quantised row per 32 inputs."""
    return RECORD_15 if bits == 15 else RECORD_8


def tile(groups: int, rows: int, bits: int) -> Any:
    """A kernel for `groups` groups of 8 outputs x `rows` rows.

    Arguments: address of the first group, bytes between groups, address of `rows` pointers to quantised rows, address
    of `rows` output pointers (float32), byte offset of the first group in an output row, bytes between groups there,
    K / 32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def kernel(typing: Any, w: Any, w_step: Any, xs: Any, ys: Any, y_first: Any, y_step: Any, blocks: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
            _emit_tile(builder, values, groups, rows, bits)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 7)), generate

    return kernel


def _emit_tile(b: ir.IRBuilder, values: Sequence[ir.Value], groups: int, rows: int, bits: int) -> None:
    w, w_step, xs, ys, y_first, y_step, blocks = values

    def number(value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    cells = [(g, r) for g in range(groups) for r in range(rows)]
    bases = [b.add(w, b.mul(w_step, number(g))) for g in range(groups)]
    nibbles = [b.add(base, b.mul(blocks, number(SCALES))) for base in bases]
    inputs = [load_ir(b, b.add(xs, number(8 * r)), I64, 8) for r in range(rows)]
    outputs = {
        (g, r): b.add(b.add(load_ir(b, b.add(ys, number(8 * r)), I64, 8), y_first), b.mul(y_step, number(g)))
        for g, r in cells
    }
    entry = b.basic_block
    body, done = b.append_basic_block("body"), b.append_basic_block("done")
    b.branch(body)
    b.position_at_end(body)
    block = b.phi(I64)
    block.add_incoming(number(0), entry)
    sums = {}
    for cell in cells:
        sums[cell] = b.phi(f32x8.llvm)
        sums[cell].add_incoming(constant_ir(f32x8, 0.0), entry)
    records = [b.add(x, b.mul(block, number(record_bytes(bits)))) for x in inputs]
    product = _generic_products if isa.chosen() == "generic" else _avx2_products
    starts = [b.add(base, b.mul(block, number(NIBBLES))) for base in nibbles]
    for start in starts:
        for line in range(0, NIBBLES, 64):
            prefetch_ir(b, [b.add(start, number(AHEAD + line))])
    totals = product(b, starts, records, bits)
    following = {}
    for g, r in cells:
        scale_bytes = load_ir(b, b.add(bases[g], b.mul(block, number(SCALES))), i8x8.llvm)
        scale = b.bitcast(b.shl(b.zext(scale_bytes, i32x8.llvm), constant_ir(i32x8, 23)), f32x8.llvm)
        correction = load_ir(b, b.add(records[r], number(32)), i32x8.llvm)
        value = b.sitofp(b.add(totals[g, r], correction), f32x8.llvm)
        factor = b.fmul(scale, load_ir(b, records[r], f32x8.llvm))
        following[g, r] = multiply_add_ir(b, value, factor, sums[g, r])
    after = b.add(block, number(1))
    block.add_incoming(after, body)
    for cell in cells:
        sums[cell].add_incoming(following[cell], body)
    b.cbranch(b.icmp_signed("<", after, blocks), body, done)
    b.position_at_end(done)
    for cell in cells:
        store_ir(b, outputs[cell], following[cell])


Totals = dict[tuple[int, int], ir.Value]


def _avx2_products(b: ir.IRBuilder, starts: Sequence[ir.Value], records: Sequence[ir.Value], bits: int) -> Totals:
    """Integer sums of (2 w + 12) * x over 32 inputs of 8 outputs, for each group and row: int32x8.

    Partial sums stay in int16. |low| <= 64, so the low parts of all 32 inputs share one sum: 24 * 64 * 2 products * 8 =
    24576. Of the high parts two words do: 24 * 127 * 2 * 4 = 24384; one more product would overflow.
    """
    bytes32, words16 = _i8x32.llvm, _i16x16.llvm
    look_up = declare(b, "llvm.x86.avx2.pshuf.b", bytes32, [bytes32, bytes32])
    multiply_bytes = declare(b, "llvm.x86.avx2.pmadd.ub.sw", words16, [bytes32, bytes32])
    multiply_words = declare(b, "llvm.x86.avx2.pmadd.wd", i32x8.llvm, [words16, words16])
    table = constant_ir(_i8x32, [value + 12 for value in _DOUBLED] * 2)
    low_mask = constant_ir(_i8x32, 15)
    weight = constant_ir(_i16x16, 128 if bits == 15 else 1)
    ones = constant_ir(_i16x16, 1)
    high: Totals = {}
    low: Totals = {}
    totals: Totals = {}

    def add(sums: Totals, cell: tuple[int, int], value: ir.Value) -> None:
        sums[cell] = b.add(sums[cell], value) if cell in sums else value

    part = 16 if bits == 15 else 8
    own = [[opaque_ir(b, record) for record in records] for _ in starts]
    for g, start in enumerate(starts):
        for word in range(4):
            x = {
                (r, offset): _four_bytes(b, record, HEADER + 8 * (part * word + offset))
                for r, record in enumerate(own[g])
                for offset in range(0, part, 4)
            }
            packed = load_ir(b, b.add(start, ir.Constant(I64, 32 * word)), bytes32)
            shifted = b.bitcast(b.lshr(b.bitcast(packed, words16), constant_ir(_i16x16, 4)), bytes32)
            w_even = b.call(look_up, [table, b.and_(packed, low_mask)])
            w_odd = b.call(look_up, [table, b.and_(shifted, low_mask)])
            for r in range(len(records)):
                add(high, (g, r), b.call(multiply_bytes, [w_even, x[r, 0]]))
                add(high, (g, r), b.call(multiply_bytes, [w_odd, x[r, 4]]))
                if bits == 15:
                    add(low, (g, r), b.call(multiply_bytes, [w_even, x[r, 8]]))
                    add(low, (g, r), b.call(multiply_bytes, [w_odd, x[r, 12]]))
                if word % 2 == 1:
                    add(totals, (g, r), b.call(multiply_words, [high.pop((g, r)), weight]))
    for cell, value in low.items():
        add(totals, cell, b.call(multiply_words, [value, ones]))
    return totals


def _four_bytes(b: ir.IRBuilder, record: ir.Value, offset: int) -> ir.Value:
    """Four integers of a row, repeated for each output: int8x32."""
    return load_ir(b, b.add(record, ir.Constant(I64, offset)), _i8x32.llvm)


def _generic_products(b: ir.IRBuilder, starts: Sequence[ir.Value], records: Sequence[ir.Value], bits: int) -> Totals:
    """The same sums with plain vector arithmetic."""
    part = 16 if bits == 15 else 8

    def byte(address: ir.Value, offset: int) -> ir.Value:
        return b.sext(load_ir(b, b.add(address, ir.Constant(I64, offset)), ir.IntType(8)), I32)

    totals: Totals = {}
    for g, start in enumerate(starts):
        for word in range(4):
            packed = load_ir(b, b.add(start, ir.Constant(I64, 32 * word)), i32x8.llvm)
            for index in range(8):
                nibble = b.and_(b.lshr(packed, constant_ir(i32x8, 4 * index)), constant_ir(i32x8, 15))
                weight = b.add(_doubled_value(b, nibble), constant_ir(i32x8, 12))
                parity, position = index % 2, index // 2
                offset = HEADER + 8 * (part * word + 4 * parity) + position
                for r, record in enumerate(records):
                    x = byte(record, offset)
                    if bits == 15:
                        x = b.add(b.mul(x, ir.Constant(I32, 128)), byte(record, offset + 64))
                    product = b.mul(weight, splat_ir(b, x, 8))
                    totals[g, r] = b.add(totals[g, r], product) if (g, r) in totals else product
    return totals


def _doubled_value(b: ir.IRBuilder, nibble: ir.Value) -> ir.Value:
    """Twice an E2M1 value: the magnitude m below 4 is itself, above it (2 + m % 2) << (m / 2 - 1)."""

    def number(value: int) -> ir.Constant:
        return constant_ir(i32x8, value)

    m = b.and_(nibble, number(7))
    exponent = b.sub(b.lshr(m, number(1)), number(1))
    # An exponent of -1 (m < 2) would be an undefined shift; those lanes take m itself.
    normal = b.shl(b.add(number(2), b.and_(m, number(1))), b.and_(exponent, number(3)))
    magnitude = b.select(b.icmp_signed("<", m, number(4)), m, normal)
    return b.select(b.icmp_signed(">", nibble, number(7)), b.sub(number(0), magnitude), magnitude)


# More than two rows at a time gain nothing: the weights are decoded from the L1 again (22 against 24 GB/s x rows).
_15_2x1, _15_1x1, _15_1x2 = tile(2, 1, 15), tile(1, 1, 15), tile(1, 2, 15)
_8_2x1, _8_1x1, _8_1x2 = tile(2, 1, 8), tile(1, 1, 8), tile(1, 2, 8)


@inner
def gemm(w: int, group_bytes: int, xs: int, ys: int, rows: int, first: int, last: int, blocks: int, bits: int) -> None:
    """Outputs of groups first..last (8 each) for `rows` quantised rows; `xs` and `ys` are addresses of row pointers.

    One row takes two groups half the range apart, because two streams read faster (14 against 11 GB/s from memory).
    """
    out_of_line()
    begin = first
    if rows == 1:
        half = (last - first) // 2
        for g in range(first, first + half):
            if bits == 15:
                _15_2x1(w + g * group_bytes, half * group_bytes, xs, ys, g * 32, half * 32, blocks)
            else:
                _8_2x1(w + g * group_bytes, half * group_bytes, xs, ys, g * 32, half * 32, blocks)
        begin = first + 2 * half
    for g in range(begin, last):
        at, y = w + g * group_bytes, g * 32
        for row in range(0, rows, 2):
            p = row * 8
            if row + 1 < rows:
                if bits == 15:
                    _15_1x2(at, 0, xs + p, ys + p, y, 0, blocks)
                else:
                    _8_1x2(at, 0, xs + p, ys + p, y, 0, blocks)
            elif bits == 15:
                _15_1x1(at, 0, xs + p, ys + p, y, 0, blocks)
            else:
                _8_1x1(at, 0, xs + p, ys + p, y, 0, blocks)
