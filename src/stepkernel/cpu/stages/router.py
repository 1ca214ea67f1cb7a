"""Router selection (spec 2.8.1), activation (2.7), weighted sum with latent norm (2.8.4, 2.8.5), and the arg max."""

import math
from typing import Any

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout, padded
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    add_f32,
    broadcast_f32,
    get_f32,
    get_i64,
    is_equal,
    is_nan,
    largest_f32,
    load_f32,
    max_f32,
    multiply_add,
    multiply_f32,
    or_i32,
    out_of_line,
    put_f32,
    put_i32,
    splat_f32,
    store_f32,
    sum_f32,
    sum_i32,
    words,
    zero_f32,
    zero_i32,
)
from stepkernel.cpu.step import ROUNDS, ROWS
from stepkernel.cpu.vmath import activation, round_if, sigmoid
from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.stages import Activate, Argmax, Combine, Select

_select_arguments, _activate_arguments, _combine_arguments, _norm_arguments, _argmax_arguments = (
    words(count) for count in (10, 5, 9, 4, 5)
)
_SCALING, _BETA, _EPS, _NORM_EPS = 8 * 10, 8 * 5, 8 * 9, 8 * 4


def pack_select(stage: Select, weights: Weights, arena: Arena) -> tuple[int, ...]:
    bias = arena.array((padded(stage.experts),), np.float32)
    bias[: stage.experts] = weights.vector(stage.bias)
    return (address(bias),)


def encode_select(stage: Select, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    places = (*layout.at(stage.logits), *layout.at(stage.ids), *layout.at(stage.weights))
    arguments = (*places, packed[0], stage.experts, stage.top_k, int(stage.renormalize), float(stage.scaling))
    return [Record(Operation.SELECT, arguments, scratch=8 * padded(stage.experts))]


@inner
def select(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Rows are shared out. Selection takes the largest key `top_k` times; `>` keeps the lower id among equals."""
    out_of_line()
    logits, logits_stride, ids, ids_stride, weights, weights_stride, bias, experts, top_k, renormalize = (
        _select_arguments(record)
    )
    scaling = get_f32(record + _SCALING)
    first, last = share(get_i64(step + ROWS), threads, thread)
    keys, size = scratch, (experts + 7) // 8 * 32
    scores = keys + size
    taken = np.float32(-np.inf)
    for row in range(first, last):
        for i in range(0, size, 32):
            score = sigmoid(load_f32(logits + row * logits_stride + i))
            store_f32(scores + i, score)
            store_f32(keys + i, add_f32(score, load_f32(bias + i)))
        for e in range(experts):
            key = get_f32(keys + e * 4)
            # A NaN key would make ids depend on the comparison's order; below every number it keeps them valid.
            if not key >= np.float32(-3e38):
                put_f32(keys + e * 4, np.float32(-3e38))
        total = np.float32(0.0)
        for slot in range(top_k):
            best, top = 0, taken
            for e in range(experts):
                key = get_f32(keys + e * 4)
                if key > top:
                    best, top = e, key
            put_f32(keys + best * 4, taken)
            score = get_f32(scores + best * 4)
            put_i32(ids + row * ids_stride + slot * 4, np.int32(best))
            put_f32(weights + row * weights_stride + slot * 4, score)
            total += score
        for slot in range(top_k):
            at = weights + row * weights_stride + slot * 4
            value = get_f32(at)
            if renormalize != 0:
                value /= total + np.float32(1e-20)
            put_f32(at, value * scaling)


def encode_activate(stage: Activate, layout: Layout, config: ModelConfig) -> list[Record]:
    arguments = (*layout.at(stage.x), *layout.at(stage.out), stage.width, *activation_constants(config))
    return [Record(Operation.ACTIVATE, arguments)]


def activation_constants(config: ModelConfig) -> tuple[float, float]:
    """(beta, linear beta) of SiTU; 0 stands for "none", and beta 0 for SiLU."""
    if config.activation == "silu":
        return 0.0, 0.0
    return float(config.situ_beta or 0.0), float(config.situ_linear_beta or 0.0)


@inner
def activate(record: int, step: int, threads: int, thread: int) -> None:
    """Groups of 8 values over all rows are shared out."""
    out_of_line()
    x, x_stride, out, out_stride, width = _activate_arguments(record)
    beta, linear_beta = get_f32(record + _BETA), get_f32(record + _BETA + 8)
    rounds = get_i64(step + ROUNDS)
    groups = width // 8
    first, last = share(get_i64(step + ROWS) * groups, threads, thread)
    for unit in range(first, last):
        row = unit // groups
        i = (unit - row * groups) * 32
        source = x + row * x_stride + i
        value = activation(load_f32(source), load_f32(source + width * 4), beta, linear_beta)
        store_f32(out + row * out_stride + i, round_if(value, rounds))


def pack_combine(stage: Combine, weights: Weights, arena: Arena) -> tuple[int, ...]:
    if stage.norm is None:
        return (0,)
    norm = arena.array((stage.width,), np.float32)
    norm[...] = weights.vector(stage.norm)
    return (address(norm),)


def encode_combine(stage: Combine, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    """With an exchange, that rounds the sum over the ranks, and the norm comes after it, by `encode_norm`."""
    alone = stage.exchange == "none"
    places = (*layout.at(stage.x), *layout.at(stage.weights), *layout.at(stage.out))
    shape = (packed[0] if alone else 0, stage.top_k, stage.width, float(stage.eps), int(alone))
    return [Record(Operation.COMBINE, (*places, *shape))]


@inner
def combine(record: int, step: int, threads: int, thread: int) -> None:
    """Rows are shared out; slots are summed in order."""
    out_of_line()
    x, x_stride, weights, weights_stride, out, out_stride, norm, top_k, width = _combine_arguments(record)
    eps = get_f32(record + _EPS)
    rounds = get_i64(step + ROUNDS) * get_i64(record + _EPS + 8)
    first, last = share(get_i64(step + ROWS), threads, thread)
    size = width * 4
    for row in range(first, last):
        target = out + row * out_stride
        for i in range(0, size, 32):
            total = zero_f32()
            for slot in range(top_k):
                weight = broadcast_f32(weights + row * weights_stride + slot * 4)
                total = multiply_add(weight, load_f32(x + row * x_stride + slot * size + i), total)
            store_f32(target + i, round_if(total, rounds))
        if norm != 0:
            _normalize(target, norm, width, eps, rounds)


def encode_norm(stage: Combine, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    if stage.norm is None:
        return []
    return [Record(Operation.NORM, (*layout.at(stage.out), packed[0], stage.width, float(stage.eps)))]


@inner
def norm_rows(record: int, step: int, threads: int, thread: int) -> None:
    """The latent norm of rows that were summed over the ranks; shared out like those of `combine`."""
    out_of_line()
    out, out_stride, norm, width = _norm_arguments(record)
    rounds = get_i64(step + ROUNDS)
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        _normalize(out + row * out_stride, norm, width, get_f32(record + _NORM_EPS), rounds)


@inner
def _normalize(x: int, norm: int, width: int, eps: float, rounds: int) -> None:
    squares = zero_f32()
    for i in range(0, width * 4, 32):
        value = load_f32(x + i)
        squares = multiply_add(value, value, squares)
    scale = splat_f32(np.float32(1.0) / np.float32(math.sqrt(sum_f32(squares) / np.float32(width) + eps)))
    for i in range(0, width * 4, 32):
        value = multiply_f32(multiply_f32(load_f32(x + i), scale), load_f32(norm + i))
        store_f32(x + i, round_if(value, rounds))


def encode_argmax(stage: Argmax, layout: Layout) -> list[Record]:
    return [Record(Operation.ARGMAX, (*layout.at(stage.logits), *layout.at(stage.out), stage.vocab))]


@inner
def argmax(record: int, step: int, threads: int, thread: int) -> None:
    """Rows are shared out. A row with a NaN gives -1: the arg max of NaN must never look like token 0."""
    out_of_line()
    logits, stride, out, out_stride, vocab = _argmax_arguments(record)
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        put_i32(out + row * out_stride, largest_of(logits + row * stride, vocab))


@inner
def largest_of(line: int, vocab: int) -> Any:
    """Index of the largest of `vocab` values, the lower one among equals; -1 if there is a NaN."""
    out_of_line()
    whole = vocab // 8 * 8
    highest, broken = splat_f32(np.float32(-np.inf)), zero_i32()
    for i in range(0, whole, 8):
        value = load_f32(line + i * 4)
        highest = max_f32(highest, value)
        broken = or_i32(broken, is_nan(value))
    top, bad = largest_f32(highest), sum_i32(broken) != 0
    for i in range(whole, vocab):
        value = get_f32(line + i * 4)
        bad = bad or value != value
        top = max(top, value)
    best, wanted = 0, splat_f32(top)
    while best < whole and sum_i32(is_equal(load_f32(line + best * 4), wanted)) == 0:
        best += 8
    while best < vocab - 1 and get_f32(line + best * 4) != top:
        best += 1
    return np.int32(-1 if bad else best)
