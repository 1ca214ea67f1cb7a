"""This step's rows enter the latent cache of MLA, normalised; and the norm of low-rank queries (spec 2.6, 4.2)."""

import math

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    get_f32,
    get_i64,
    load_f32,
    multiply_add,
    multiply_f32,
    out_of_line,
    splat_f32,
    store_f32,
    sum_f32,
    words,
    zero_f32,
)
from stepkernel.cpu.step import ROUNDS, ROWS, SLOT_MAPPING
from stepkernel.cpu.vmath import round_if, store_as
from stepkernel.model.weights import Weights
from stepkernel.program.stages import LatentInsert

_arguments = words(14)
_EPS, _SCALE = 8 * 14, 8 * 15


def pack(stage: LatentInsert, weights: Weights, arena: Arena) -> tuple[int, ...]:
    found = []
    for name in (stage.kv_norm, stage.query_norm):
        if name is None:
            found.append(0)
            continue
        source = weights.vector(name)
        target = arena.array(source.shape, np.float32)
        target[...] = source
        found.append(address(target))
    return tuple(found)


def encode(
    stage: LatentInsert,
    packed: tuple[int, ...],
    layout: Layout,
    cache: int,
    row_bytes: int,
    kind: int,
    latent_scale: float,
) -> list[Record]:
    """`kind`: format of the cache's values; what is stored is divided by `latent_scale` (1 unless it is FP8)."""
    low = (0, 0) if stage.query_low is None else layout.at(stage.query_low)
    out = (0, 0) if stage.query_out is None else layout.at(stage.query_out)
    arguments = (
        *layout.at(stage.kv),
        *packed,
        cache,
        row_bytes,
        kind,
        stage.lora,
        stage.rope,
        *low,
        *out,
        stage.query_rank,
        float(stage.eps),
        1.0 / latent_scale,
    )
    return [Record(Operation.INSERT, arguments)]


@inner
def insert(record: int, step: int, threads: int, thread: int) -> None:
    """Rows are shared out; a negative slot is not written."""
    out_of_line()
    (
        kv,
        kv_stride,
        kv_norm,
        q_norm,
        cache,
        row_bytes,
        kind,
        lora,
        rope,
        low,
        low_stride,
        out,
        out_stride,
        rank,
    ) = _arguments(record)
    eps = get_f32(record + _EPS)
    shrink = splat_f32(get_f32(record + _SCALE))
    rounds = get_i64(step + ROUNDS)
    mapping = get_i64(step + SLOT_MAPPING)
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        if low != 0:
            x, y = low + row * low_stride, out + row * out_stride
            scale = _inverse_rms(x, rank, eps)
            for i in range(0, rank * 4, 32):
                value = multiply_f32(multiply_f32(load_f32(x + i), scale), load_f32(q_norm + i))
                store_f32(y + i, round_if(value, rounds))
        slot = get_i64(mapping + row * 8)
        if slot < 0:
            continue
        x, target = kv + row * kv_stride, cache + slot * row_bytes
        scale = _inverse_rms(x, lora, eps)
        for i in range(0, lora, 8):
            value = multiply_f32(multiply_f32(load_f32(x + i * 4), scale), load_f32(kv_norm + i * 4))
            store_as(target, i, multiply_f32(round_if(value, rounds), shrink), kind)
        for i in range(lora, lora + rope, 8):
            store_as(target, i, multiply_f32(load_f32(x + i * 4), shrink), kind)


@inner
def _inverse_rms(x: int, width: int, eps: float) -> object:
    squares = zero_f32()
    for i in range(0, width * 4, 32):
        value = load_f32(x + i)
        squares = multiply_add(value, value, squares)
    return splat_f32(np.float32(1.0) / np.float32(math.sqrt(sum_f32(squares) / np.float32(width) + eps)))
