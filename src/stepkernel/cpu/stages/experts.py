"""Routed experts (spec 2.8.3): tokens are grouped by expert, so that an expert's weights are read once a step.

Both stages walk the same list of entries (expert, its slots). A thread takes a contiguous share of the work, counted as
groups of 8 outputs times the cost of a group for the entry's number of tokens (`entries.cost`).
"""

import numpy as np

from stepkernel.cpu import gemm as bf16
from stepkernel.cpu import mxfp4
from stepkernel.cpu.arena import LINE, Arena, address
from stepkernel.cpu.claim import claim
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.pack import bf16_bytes, pack_bf16, pack_mxfp4
from stepkernel.cpu.quantize import quantize
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import get_f32, get_i64, load_f32, out_of_line, prefetch, put_i64, store_f32, words
from stepkernel.cpu.stages.entries import ENTRY, cost, group, weigh
from stepkernel.cpu.stages.router import activation_constants
from stepkernel.cpu.step import ROUNDS, ROWS
from stepkernel.cpu.vmath import activation, round_if
from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.stages import ExpertsDown, ExpertsUp, Matrix

_arguments = words(15)
_BETA = 8 * 15
_GRAIN = 96  # of cost, at least what may be claimed at once
_ANNOUNCED = 2048


def group_bytes(matrix: Matrix) -> int:
    """Bytes of 8 outputs."""
    if matrix.format == "bf16":
        return matrix.columns * 16
    return matrix.columns // mxfp4.GROUP * (mxfp4.SCALES + mxfp4.NIBBLES)


def pack_up(stage: ExpertsUp, weights: Weights, arena: Arena) -> tuple[int, ...]:
    """All experts one after the other; groups of W1 and W3 alternate, so that a gate and its up lie together."""
    size, groups = group_bytes(stage.w1), stage.w1.rows // 8
    target = arena.array((stage.experts, groups, 2, size), np.uint8)
    for expert in range(stage.experts):
        for which, matrix in enumerate((stage.w1, stage.w3)):
            _pack_expert(matrix, expert, weights, target[expert, :, which])
        weights.release()
    return (address(target),)


def pack_down(stage: ExpertsDown, weights: Weights, arena: Arena) -> tuple[int, ...]:
    target = arena.array((stage.experts, stage.w2.rows // 8, group_bytes(stage.w2)), np.uint8)
    for expert in range(stage.experts):
        _pack_expert(stage.w2, expert, weights, target[expert])
        weights.release()
    return (address(target),)


def _pack_expert(
    matrix: Matrix, expert: int, weights: Weights, target: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
) -> None:
    name = matrix.name.format(expert)
    if matrix.format == "mxfp4":
        pack_mxfp4(weights.packed(name), target, name)
        return
    flat = np.empty(bf16_bytes(matrix.rows, matrix.columns), np.uint8)
    pack_bf16([weights.matrix(name)], flat, [name])
    target[...] = flat.reshape(target.shape)


def scratch(stage: ExpertsUp | ExpertsDown, rows: int, bits: int) -> int:
    """Lists and pointer tables, quantised inputs, and for the first stage its products before the activation."""
    slots = rows * stage.top_k
    matrix = stage.w1 if isinstance(stage, ExpertsUp) else stage.w2
    inputs = rows if isinstance(stage, ExpertsUp) else slots
    records = inputs * (matrix.columns // mxfp4.GROUP) * mxfp4.record_bytes(bits) if matrix.format == "mxfp4" else 0
    products = rows * 2 * matrix.rows * 4 if isinstance(stage, ExpertsUp) else 0
    return _lists(stage.experts, slots) + records + products + 256


def _lists(experts: int, slots: int) -> int:
    size = 8 * (experts + 1) + 8 * slots + ENTRY * slots + 16 * slots
    return -(-size // LINE) * LINE


def encode(
    stage: ExpertsUp | ExpertsDown,
    packed: tuple[int, ...],
    layout: Layout,
    config: ModelConfig,
    rows: int,
    bits: int,
) -> list[Record]:
    up = isinstance(stage, ExpertsUp)
    matrix = stage.w1 if isinstance(stage, ExpertsUp) else stage.w2
    size, groups = group_bytes(matrix), matrix.rows // 8
    slots = rows * stage.top_k
    arguments = (
        packed[0],
        size,
        groups * size * (2 if up else 1),
        groups,
        matrix.columns,
        bits if matrix.format == "mxfp4" else 0,
        *layout.at(stage.x),
        *layout.at(stage.ids),
        *layout.at(stage.out),
        (stage.experts << 32) | stage.top_k,
        _lists(stage.experts, slots),
        matrix.columns // mxfp4.GROUP * mxfp4.record_bytes(bits) if matrix.format == "mxfp4" else 0,
        *activation_constants(config),
    )
    operation = Operation.EXPERTS_UP if up else Operation.EXPERTS_DOWN
    return [Record(operation, arguments, scratch(stage, rows, bits))]


@inner
def _quantized(x: int, columns: int, bits: int, record: int) -> int:
    """Address of the row the product reads: itself for BF16 weights, its integer record for MXFP4."""
    if bits == 0:
        return x
    quantize(x, record, columns, bits)
    return record


@inner
def _multiply(w: int, size: int, xs: int, ys: int, count: int, first: int, last: int, columns: int, bits: int) -> None:
    if bits == 0:
        bf16.gemm(w, size, xs, ys, count, first, last, columns // 2)
    else:
        mxfp4.gemm(w, size, xs, ys, count, first, last, columns // 32, bits)


@inner
def _announce(start: int, expert_bytes: int) -> None:
    """Prefetches where the two streams of the next expert begin: without it each expert costs a microsecond more."""
    for line in range(start, start + _ANNOUNCED, 64):
        prefetch(line)
        prefetch(line + expert_bytes // 2)


@inner
def experts_up(record: int, step: int, threads: int, scratch: int) -> None:
    """out[row, slot] = act(x W1^T, x W3^T)."""
    out_of_line()
    (
        matrix,
        size,
        expert_bytes,
        groups,
        columns,
        bits,
        x,
        x_stride,
        ids,
        ids_stride,
        out,
        out_stride,
        shape,
        lists,
        record_size,
    ) = _arguments(record)
    beta, linear_beta = get_f32(record + _BETA), get_f32(record + _BETA + 8)
    experts, top_k = shape >> 32, shape & 0xFFFFFFFF
    rows = get_i64(step + ROWS)
    rounds = get_i64(step + ROUNDS)
    count = group(ids, ids_stride, rows, top_k, experts, scratch)
    order = scratch + 8 * (experts + 1)
    entries = order + 8 * rows * top_k
    xs = entries + ENTRY * rows * top_k
    ys = xs + 8 * rows * top_k
    records = scratch + lists
    products = records + rows * record_size
    product_size = groups * 64
    for row in range(rows):
        put_i64(ys + row * 8, products + row * product_size)
        _quantized(x + row * x_stride, columns, bits, records + row * record_size)
    total = weigh(entries, count, groups, bits)
    first, last = claim(record, total, threads, _GRAIN)
    while first < last:
        before = 0
        for e in range(count):
            entry = entries + e * ENTRY
            start, slots = get_i64(entry + 8), get_i64(entry + 16)
            price = cost(slots, bits)
            begin = max(0, (first - before + price - 1) // price)
            end = min(groups, (last - before + price - 1) // price)
            before += groups * price
            if begin >= end:
                continue
            w = matrix + get_i64(entry) * expert_bytes
            coming, half = products, 0
            if e + 1 < count:
                coming, half = matrix + get_i64(entry + ENTRY) * expert_bytes, expert_bytes // 2
            # `rows` slots at a time: all of them if a router names an expert once a row, and all the products can hold.
            for done in range(0, slots, rows):
                some = min(rows, slots - done)
                for s in range(some):
                    row = get_i64(order + (start + done + s) * 8) // top_k
                    put_i64(xs + s * 8, x + row * x_stride if bits == 0 else records + row * record_size)
                _multiply(w, size, xs, ys, some, 2 * begin, 2 * end, columns, bits)
                for s in range(some):
                    place = get_i64(order + (start + done + s) * 8)
                    row = place // top_k
                    target = out + row * out_stride + (place - row * top_k) * groups * 32
                    source = products + s * product_size
                    for g in range(begin, end):
                        # The memory would rest while activations are computed: both streams of the next expert.
                        for line in range((g - begin) * 128, (g - begin + 1) * 128, 64):
                            prefetch(coming + line)
                            prefetch(coming + half + line)
                        gate = round_if(load_f32(source + g * 64), rounds)
                        up = round_if(load_f32(source + g * 64 + 32), rounds)
                        store_f32(target + g * 32, round_if(activation(gate, up, beta, linear_beta), rounds))
        first, last = claim(record, total, threads, _GRAIN)


@inner
def experts_down(record: int, step: int, threads: int, scratch: int) -> None:
    """out[row, slot] = h W2^T."""
    out_of_line()
    (
        matrix,
        size,
        expert_bytes,
        groups,
        columns,
        bits,
        x,
        x_stride,
        ids,
        ids_stride,
        out,
        out_stride,
        shape,
        lists,
        record_size,
    ) = _arguments(record)
    experts, top_k = shape >> 32, shape & 0xFFFFFFFF
    rows = get_i64(step + ROWS)
    rounds = get_i64(step + ROUNDS)
    count = group(ids, ids_stride, rows, top_k, experts, scratch)
    order = scratch + 8 * (experts + 1)
    entries = order + 8 * rows * top_k
    xs = entries + ENTRY * rows * top_k
    ys = xs + 8 * rows * top_k
    records = scratch + lists
    total = weigh(entries, count, groups, bits)
    first, last = claim(record, total, threads, _GRAIN)
    while first < last:
        before = 0
        for e in range(count):
            entry = entries + e * ENTRY
            start, slots = get_i64(entry + 8), get_i64(entry + 16)
            price = cost(slots, bits)
            begin = max(0, (first - before + price - 1) // price)
            end = min(groups, (last - before + price - 1) // price)
            before += groups * price
            if begin >= end:
                continue
            for s in range(slots):
                place = get_i64(order + (start + s) * 8)
                row = place // top_k
                source = x + row * x_stride + (place - row * top_k) * columns * 4
                put_i64(xs + s * 8, _quantized(source, columns, bits, records + s * record_size))
                put_i64(ys + s * 8, out + row * out_stride + (place - row * top_k) * groups * 32)
            w = matrix + get_i64(entry) * expert_bytes
            if e + 1 < count:
                _announce(matrix + get_i64(entry + ENTRY) * expert_bytes, expert_bytes)
            _multiply(w, size, xs, ys, slots, begin, end, columns, bits)
            if rounds != 0:
                bf16.round_rows(ys, slots, begin * 8, end * 8)
        first, last = claim(record, total, threads, _GRAIN)
