"""The innermost kernel of BF16 products: a tile of weight groups x rows, as LLVM with vectors of 8 or 16 values.

A weight matrix [N, K] is stored `[N / 8][K / 2][8 outputs][2 inputs]`: a 32-byte load is 8 outputs x 2 inputs (a pair)
of a *group*. The even input is `bits << 16`, the odd one `bits & 0xffff0000`, both exact, and nothing is summed across
lanes. With 16 lanes (AVX-512) a load is two pairs: the lower half of a sum collects even pairs, the upper half odd.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from stepkernel.cpu.simd import (
    F32,
    I32,
    I64,
    Vector,
    constant_ir,
    f32x8,
    load_ir,
    multiply_add_ir,
    opaque_ir,
    prefetch_ir,
    store_ir,
)

PAIR_BYTES = 32  # 8 outputs x 2 inputs
STEP_BYTES = 64  # of each group in one iteration: a cache line, 4 inputs


def tile(groups: int, rows: int, ahead: int, lanes: int, reload: bool = False) -> Any:
    """A kernel for `groups` weight groups x `rows` rows, unrolled, with `lanes` (8 or 16) values in a vector.

    Arguments: weights of the first group, bytes between groups, address of `rows` input pointers (float32), address of
    `rows` output pointers (float32), byte offset of the first group in an output row, bytes between groups there, byte
    offset of the first pair within a group, pairs (even), and whether the output holds a partial sum to go on from (8
    lanes only). `ahead` > 0 prefetches that many bytes in front. `reload` loads the weights again for
    the odd inputs instead of keeping them, which saves `groups` registers.
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
            _emit(builder, values, groups, rows, ahead, lanes, reload)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 9)), generate

    return kernel


def _emit(
    b: ir.IRBuilder, values: Sequence[ir.Value], groups: int, rows: int, ahead: int, lanes: int, reload: bool
) -> None:
    w, w_step, xs, ys, y_first, y_step, start, pairs, resume = values
    floats, words = Vector("f32", lanes), Vector("i32", lanes)

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
    zero = constant_ir(floats, 0.0)
    going_on, begin, body, done = (b.append_basic_block(name) for name in ("resume", "begin", "body", "done"))
    if lanes == 8:
        b.cbranch(b.icmp_signed("!=", resume, number(0)), going_on, begin)
    else:
        b.branch(begin)
    b.position_at_end(going_on)
    partial = {cell: load_ir(b, outputs[cell], floats.llvm) if lanes == 8 else zero for cell in cells}
    b.branch(begin)
    b.position_at_end(begin)
    initial = {}
    for cell in cells:
        initial[cell] = b.phi(floats.llvm)
        initial[cell].add_incoming(zero, entry)
        initial[cell].add_incoming(partial[cell], going_on)
    b.branch(body)
    b.position_at_end(body)
    step = b.phi(I64)
    step.add_incoming(number(0), begin)
    sums = {}
    for cell in cells:
        sums[cell] = b.phi(floats.llvm)
        sums[cell].add_incoming(initial[cell], begin)
    current = dict(sums)
    high, sixteen = constant_ir(words, -65536), constant_ir(words, 16)
    w_offset, x_offset = b.mul(step, number(PAIR_BYTES)), b.mul(step, number(8))
    if ahead:
        for g in range(groups):
            prefetch_ir(b, [at(weights[g], w_offset, number(ahead))])
    for offset in range(0, STEP_BYTES, 4 * lanes):
        loaded = [load_ir(b, at(weight, w_offset, number(offset)), words.llvm) for weight in weights]
        for parity in range(2):
            if parity == 1 and reload:
                again = [opaque_ir(b, weight) for weight in weights]
                loaded = [load_ir(b, at(weight, w_offset, number(offset)), words.llvm) for weight in again]
            if parity == 0:
                exact = [b.bitcast(b.shl(v, sixteen), floats.llvm) for v in loaded]
            else:
                exact = [b.bitcast(b.and_(v, high), floats.llvm) for v in loaded]
            for r in range(rows):
                x = _input(b, at(inputs[r], x_offset, number(offset // 4)), parity, lanes)
                for g in range(groups):
                    current[g, r] = multiply_add_ir(b, exact[g], x, current[g, r])
    following = b.add(step, number(STEP_BYTES // PAIR_BYTES))
    step.add_incoming(following, body)
    for cell in cells:
        sums[cell].add_incoming(current[cell], body)
    b.cbranch(b.icmp_signed("<", following, pairs), body, done)
    b.position_at_end(done)
    for cell in cells:
        store_ir(b, outputs[cell], _fold(b, current[cell], lanes))


def _input(b: ir.IRBuilder, address: ir.Value, parity: int, lanes: int) -> ir.Value:
    """Input `parity` of each pair of a vector, repeated for its 8 outputs."""
    if lanes == 8:
        one = load_ir(b, b.add(address, ir.Constant(I64, 4 * parity)), F32, 4)
        empty = ir.Constant(f32x8.llvm, ir.Undefined)
        first = b.insert_element(empty, one, ir.Constant(I32, 0))
        return b.shuffle_vector(first, empty, ir.Constant(ir.VectorType(I32, 8), [0] * 8))
    four = load_ir(b, address, ir.VectorType(F32, 4))
    order = [parity] * 8 + [2 + parity] * 8
    return b.shuffle_vector(four, four, ir.Constant(ir.VectorType(I32, 16), order))


def _fold(b: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """The sums of 8 outputs: lower half plus upper half."""
    if lanes == 8:
        return value
    halves = [b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, 8), list(range(h, h + 8)))) for h in (0, 8)]
    return b.fadd(*halves)
