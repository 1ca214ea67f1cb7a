"""Residual update, AttnRes mix and RMSNorm (spec 2.3, 2.4)."""

import math

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    add_f32,
    get_f32,
    get_i64,
    load_f32,
    multiply_add,
    multiply_f32,
    out_of_line,
    put_f32,
    splat_f32,
    store_f32,
    sum_f32,
    words,
    zero_f32,
)
from stepkernel.cpu.step import ROUNDS, ROWS
from stepkernel.cpu.vmath import round_if
from stepkernel.model.weights import Weights
from stepkernel.program.program import BLOCKS, PREFIX
from stepkernel.program.stages import MixNorm

_UPDATES = {"none": 0, "add": 1, "restart": 2}
_arguments = words(21)
_EPS = 8 * 21


def pack(stage: MixNorm, weights: Weights, arena: Arena) -> tuple[int, ...]:
    """Score vector (norm x query, folded in float32; 0 if there is none) and norm weight, float32 [H] each."""
    norm = arena.array((stage.width,), np.float32)
    norm[...] = weights.vector(stage.norm)
    if stage.score_norm is None or stage.score_proj is None:
        return 0, address(norm)
    score = arena.array((stage.width,), np.float32)
    score[...] = weights.vector(stage.score_norm) * weights.vector(stage.score_proj).reshape(-1)
    return address(score), address(norm)


def encode(stage: MixNorm, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    deltas = [layout.at(name) for name in stage.delta] + [(0, 0)] * (2 - len(stage.delta))
    blocks = (
        (layout.base(BLOCKS), layout.copy_stride(BLOCKS), layout.stride(BLOCKS))
        if BLOCKS in layout.buffers
        else (0, 0, 0)
    )
    save = -1 if stage.save is None else stage.save
    tap, tap_stride = (0, 0) if stage.tap is None else layout.at(stage.tap.out)
    kinds = int(stage.round_mix) | (2 if stage.tap is not None and stage.tap.mixed else 0)
    arguments = (
        _UPDATES[stage.update],
        len(stage.delta),
        *deltas[0],
        *deltas[1],
        stage.sources,
        save,
        *layout.at(PREFIX),
        *blocks,
        *packed,
        stage.width,
        *layout.at(stage.out),
        kinds,
        tap + (0 if stage.tap is None else 4 * stage.tap.offset),
        tap_stride,
        float(stage.eps),
    )
    return [Record(Operation.MIX, arguments, scratch=8 * (stage.sources + 1))]


@inner
def mix(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Rows are shared out; the scores of a row's sources live in `scratch`."""
    out_of_line()
    (
        update,
        deltas,
        d0,
        d0_stride,
        d1,
        d1_stride,
        sources,
        save,
        prefix,
        prefix_stride,
        blocks,
        copy_stride,
        row_stride,
        score,
        norm,
        width,
        out,
        out_stride,
        kinds,
        tap,
        tap_stride,
    ) = _arguments(record)
    eps = get_f32(record + _EPS)
    rounds = get_i64(step + ROUNDS)
    first, last = share(get_i64(step + ROWS), threads, thread)
    size = width * 4
    for row in range(first, last):
        p = prefix + row * prefix_stride
        if update != 0:
            _update(p, update, deltas, d0 + row * d0_stride, d1 + row * d1_stride, size, rounds)
        mixed = p
        if score != 0:
            mixed = out + row * out_stride
            _mix_sources(p, blocks + row * row_stride, copy_stride, sources, score, mixed, width, eps, scratch)
        if tap != 0:
            tapped = mixed if kinds & 2 != 0 else p
            for i in range(0, size, 32):
                store_f32(tap + row * tap_stride + i, round_if(load_f32(tapped + i), rounds))
        _normalize(mixed, out + row * out_stride, norm, width, eps, kinds & 1, rounds)
        if save >= 0:
            target = blocks + save * copy_stride + row * row_stride
            for i in range(0, size, 32):
                store_f32(target + i, load_f32(p + i))


@inner
def _update(p: int, update: int, deltas: int, d0: int, d1: int, size: int, rounds: int) -> None:
    for i in range(0, size, 32):
        delta = load_f32(d0 + i)
        if deltas == 2:
            delta = round_if(add_f32(delta, load_f32(d1 + i)), rounds)
        if update == 1:
            delta = round_if(add_f32(load_f32(p + i), delta), rounds)
        store_f32(p + i, delta)


@inner
def _source(index: int, sources: int, p: int, blocks: int, copy_stride: int) -> int:
    """Address of a source: the saved blocks in order, the prefix last."""
    return p if index == sources else blocks + index * copy_stride


@inner
def _mix_sources(
    p: int,
    blocks: int,
    copy_stride: int,
    sources: int,
    score: int,
    out: int,
    width: int,
    eps: float,
    scores: int,
) -> None:
    size = width * 4
    top = np.float32(-np.inf)
    for s in range(sources + 1):
        at = _source(s, sources, p, blocks, copy_stride)
        squares, dot = zero_f32(), zero_f32()
        for i in range(0, size, 32):
            x = load_f32(at + i)
            squares = multiply_add(x, x, squares)
            dot = multiply_add(x, load_f32(score + i), dot)
        scale = np.float32(1.0) / np.float32(math.sqrt(sum_f32(squares) / np.float32(width) + eps))
        value = sum_f32(dot) * scale
        put_f32(scores + s * 4, value)
        if value > top:
            top = value
    total = np.float32(0.0)
    for s in range(sources + 1):
        value = np.float32(math.exp(get_f32(scores + s * 4) - top))
        put_f32(scores + s * 4, value)
        total += value
    for s in range(sources + 1):
        weight = splat_f32(get_f32(scores + s * 4) / total)
        at = _source(s, sources, p, blocks, copy_stride)
        for i in range(0, size, 32):
            x = multiply_f32(weight, load_f32(at + i))
            store_f32(out + i, x if s == 0 else add_f32(load_f32(out + i), x))


@inner
def _normalize(x: int, out: int, norm: int, width: int, eps: float, rounds_input: int, rounds: int) -> None:
    """RMSNorm of a row; `x` may be `out`."""
    size = width * 4
    squares = zero_f32()
    for i in range(0, size, 32):
        value = round_if(load_f32(x + i), rounds_input & rounds)
        store_f32(out + i, value)
        squares = multiply_add(value, value, squares)
    scale = splat_f32(np.float32(1.0) / np.float32(math.sqrt(sum_f32(squares) / np.float32(width) + eps)))
    for i in range(0, size, 32):
        value = multiply_f32(multiply_f32(load_f32(out + i), scale), load_f32(norm + i))
        store_f32(out + i, round_if(value, rounds))
