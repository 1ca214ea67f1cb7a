"""The two per-head products of absorbed MLA (spec 2.6): query into the latent space, mixed latent into values."""

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import gemm, point_rows, round_rows, share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.pack import bf16_bytes, pack_bf16
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import get_i64, load_f32, multiply_f32, out_of_line, store_f32, words
from stepkernel.cpu.step import ROUNDS, ROWS, TABLES, X_ROWS, Y_ROWS
from stepkernel.cpu.vmath import round_if, sigmoid
from stepkernel.model.weights import Weights
from stepkernel.program.stages import Absorb, ValueGate

_arguments = words(15)


def pack(stage: Absorb | ValueGate, weights: Weights, arena: Arena) -> tuple[int, ...]:
    """W_UK transposed (outputs = latent) or W_UV (outputs = values), one packed matrix a head."""
    kv_b = weights.matrix(stage.kv_b).reshape(stage.heads, stage.nope + stage.value, stage.lora)
    if isinstance(stage, Absorb):
        heads = [np.ascontiguousarray(head[: stage.nope].T) for head in kv_b]
    else:
        heads = [head[stage.nope :] for head in kv_b]
    outputs, inputs = heads[0].shape
    target = arena.array((stage.heads * bf16_bytes(outputs, inputs),), np.uint8)
    pack_bf16(heads, target, [stage.kv_b] * stage.heads)
    weights.release()
    return (address(target),)


def encode(stage: Absorb | ValueGate, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    copied = 0
    gate = (0, 0)
    if isinstance(stage, Absorb):
        outputs, inputs = stage.lora, stage.nope
        x_head, y_head = stage.nope + stage.rope, stage.lora + stage.rope
        copied = stage.rope
    else:
        outputs, inputs = stage.value, stage.lora
        x_head, y_head = stage.lora, stage.value
        gate = (0, 0) if stage.gate is None else layout.at(stage.gate)
    x, y = layout.at(stage.x), layout.at(stage.out)
    shape = (stage.heads, outputs // 8, inputs * 16, inputs // 2)
    arguments = (packed[0], *shape, *x, x_head * 4, *y, y_head * 4, copied, *gate, inputs * 4)
    return [Record(Operation.HEADS, arguments, scratch=TABLES)]


@inner
def heads(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Groups of all heads are shared out. The `copied` inputs that follow a head's
    product inputs go behind its outputs unchanged."""
    out_of_line()
    (
        matrix,
        count,
        groups,
        group_bytes,
        pairs,
        x,
        x_stride,
        x_head,
        y,
        y_stride,
        y_head,
        copied,
        gate,
        gate_stride,
        tail,
    ) = _arguments(record)
    rows = get_i64(step + ROWS)
    rounds = get_i64(step + ROUNDS)
    first, last = share(count * groups, threads, thread)
    while first < last:
        head = first // groups
        begin, end = first - head * groups, min(last - head * groups, groups)
        point_rows(scratch + X_ROWS, x + head * x_head, x_stride, rows)
        point_rows(scratch + Y_ROWS, y + head * y_head, y_stride, rows)
        w = matrix + head * groups * group_bytes
        gemm(w, group_bytes, scratch + X_ROWS, scratch + Y_ROWS, rows, begin, end, pairs)
        if rounds != 0:
            round_rows(scratch + Y_ROWS, rows, begin * 8, end * 8)
        if copied != 0 and begin == 0:
            for row in range(rows):
                source, target = x + head * x_head + row * x_stride + tail, y + head * y_head + row * y_stride
                for i in range(0, copied * 4, 32):
                    store_f32(target + groups * 32 + i, load_f32(source + i))
        if gate != 0:
            for row in range(rows):
                target, opening = y + head * y_head + row * y_stride, gate + head * y_head + row * gate_stride
                for i in range(begin * 32, end * 32, 32):
                    value = multiply_f32(load_f32(target + i), sigmoid(load_f32(opening + i)))
                    store_f32(target + i, round_if(value, rounds))
        first = head * groups + end
