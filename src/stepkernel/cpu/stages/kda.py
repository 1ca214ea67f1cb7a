"""The KDA core: convolution, gates, delta-rule recurrence and gated norm (spec 2.5.2 to 2.5.7, 4.1, 5.5)."""

import math
from typing import Any

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.claim import claim
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    add_f32,
    get_f32,
    get_i32,
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
from stepkernel.cpu.stages.convolution import convolve
from stepkernel.cpu.stages.delta_rule import fold, keep, record_token, recur
from stepkernel.cpu.step import ACCEPTED, QUERIES, RECOVERS, REQUESTS, ROUNDS, STATE_COLUMNS, STATE_SLOTS
from stepkernel.cpu.vmath import exp, negative, round_if, sigmoid, softplus
from stepkernel.model.weights import Weights
from stepkernel.program.stages import KdaCore

_arguments = words(20)
_EPS, _RECORDS, _RECORDS_SLOT = 8 * 20, 8 * 21, 8 * 22
_NORM_EPS = np.float32(1e-6)  # inside the roots of the q and k norms (spec 2.5.3)


def pack(stage: KdaCore, weights: Weights, arena: Arena) -> tuple[int, ...]:
    """Filters [width, 3P], exp(A_log) [heads], dt_bias [P] and the output norm [d], all float32, in one block."""
    width = stage.heads * stage.head_dim
    block = arena.array(
        (3 * width * stage.conv_width + 8 * (-(-stage.heads // 8)) + width + stage.head_dim,), np.float32
    )
    filters = np.concatenate([weights.vector(name) for name in stage.conv])
    sizes = (filters.size, 8 * (-(-stage.heads // 8)), width)
    a, b, c = sizes[0], sizes[0] + sizes[1], sum(sizes)
    block[:a] = np.ascontiguousarray(filters.reshape(3 * width, stage.conv_width).T).reshape(-1)
    block[a : a + stage.heads] = np.exp(weights.vector(stage.a_log))
    block[b:c] = weights.vector(stage.dt_bias)
    block[c:] = weights.vector(stage.out_norm)
    return tuple(address(block) + 4 * offset for offset in (0, a, b, c))


def scratch(stage: KdaCore, queries: int, copies: bool) -> int:
    """`copies`: the states are worked on in a float32 copy of one head."""
    copy = stage.head_dim if copies else 0
    return 4 * stage.head_dim * (stage.conv_width - 1 + queries + 4 * queries + 2 + copy) + 256


def encode(
    stage: KdaCore,
    packed: tuple[int, ...],
    layout: Layout,
    conv: tuple[int, int],
    recurrent: tuple[int, int],
    records: tuple[int, int],
    wide: tuple[bool, bool],
    queries: int,
    group: int,
) -> list[Record]:
    """`conv`, `recurrent` and `records` (zeros: none): address, bytes of a slot. `wide`: whether windows and states are
    float32, else BF16. `group`: which of the step's slot tables."""
    bounded = 0.0 if stage.gate_lower_bound is None else float(stage.gate_lower_bound)
    places = (
        *layout.at(stage.qkv),
        *layout.at(stage.gamma),
        *layout.at(stage.gate),
        *layout.at(stage.beta),
        *layout.at(stage.out),
    )
    flags = (group << 2) | (int(wide[1]) << 1) | int(wide[0])
    shape = ((stage.head_dim << 32) | stage.heads, (stage.conv_width << 32) | flags)
    arguments = (*places, *packed, *conv, *recurrent, *shape, _float_pair(float(stage.eps), bounded), *records)
    return [Record(Operation.KDA, arguments, scratch(stage, queries, records[0] != 0 or not wide[1]))]


def _float_pair(low: float, high: float) -> int:
    return int(np.array([low, high], np.float32).view(np.int64)[0])


@inner
def kda(record: int, step: int, threads: int, scratch: int) -> None:
    """Units are (request, head); the tokens of a request run one after the other.

    Float32 states of a step that records nothing go from slot to slot. Others go through a copy of the head in private
    memory: it is rounded after each token as the cache would round it, so both ways to keep states compute the same.
    """
    out_of_line()
    (
        qkv,
        qkv_stride,
        gamma,
        gamma_stride,
        gate,
        gate_stride,
        beta,
        beta_stride,
        out,
        out_stride,
        filters,
        decay,
        bias,
        norm,
        conv,
        conv_slot,
        states,
        state_slot,
        shape,
        kind,
    ) = _arguments(record)
    eps, bound = get_f32(record + _EPS), get_f32(record + _EPS + 4)
    heads, dim = shape & 0xFFFFFFFF, shape >> 32
    wide, wide_state, group, taps = kind & 1, (kind >> 1) & 1, (kind & 0xFFFFFFFF) >> 2, kind >> 32
    queries = get_i64(step + QUERIES)
    rounds = get_i64(step + ROUNDS)
    slot_columns = get_i64(step + STATE_COLUMNS)
    slots = get_i64(step + STATE_SLOTS) + group * get_i64(step + REQUESTS) * slot_columns * 4
    size = dim * 4
    channels = 3 * heads * dim
    recovers = get_i64(step + RECOVERS)
    recording = int(recovers == 1)
    records, records_slot = get_i64(record + _RECORDS), get_i64(record + _RECORDS_SLOT)
    record_row = heads * 3 * size
    state_head = dim * size if wide_state != 0 else dim * size // 2
    # With one slot for all queries only the last state is kept, and the window that goes with it.
    dropped = queries - 1 if slot_columns == 1 and recording == 0 else 0
    window = scratch
    q = window + (taps - 1 + queries) * size
    k, v, alpha = q + queries * size, q + 2 * queries * size, q + 3 * queries * size
    o = alpha + queries * size
    errors, copy = o + size, o + 2 * size
    one: Any = np.float32(1.0)
    root = one / np.float32(math.sqrt(dim))
    units = get_i64(step + REQUESTS) * heads
    first, last = claim(record, units, threads, 1)
    while first < last:
        for unit in range(first, last):
            request = unit // heads
            head = unit - request * heads
            row = request * queries
            mine = slots + request * slot_columns * 4
            slot = get_i32(mine)
            if slot <= 0:
                for i in range(queries):
                    for c in range(0, size, 32):
                        store_f32(out + (row + i) * out_stride + head * size + c, zero_f32())
                continue
            accepted = get_i32(get_i64(step + ACCEPTED) + request * 4)
            before = max(accepted - 1, 0)
            state_of_conv = conv + slot * conv_slot
            for part in range(3):
                channel = (part * heads + head) * dim
                source = qkv + row * qkv_stride + channel * 4
                target = q + part * queries * size
                convolve(
                    source,
                    qkv_stride,
                    state_of_conv,
                    channel,
                    channels,
                    filters,
                    target,
                    window,
                    dim,
                    taps,
                    queries,
                    before,
                    dropped,
                    wide,
                )
            head_decay = get_f32(decay + head * 4)
            recorded = records + slot * records_slot + head * 3 * size
            source = 0 if recovers != 0 else before
            state = states + get_i32(mine + source * 4) * state_slot + head * state_head
            folded = accepted if recovers != 0 else np.int32(0)
            if recording != 0 or wide_state == 0 or folded > 0:
                fold(state, copy, recorded, record_row, folded, dim, wide_state)
            if recording != 0 or wide_state == 0:
                state = copy
            for i in range(queries):
                at = i * size
                _gate(
                    gamma + (row + i) * gamma_stride + head * size,
                    bias + head * size,
                    alpha + at,
                    dim,
                    head_decay,
                    bound,
                )
                _normalize(q + at, dim, root)
                _normalize(k + at, dim, one)
                strength = _sigmoid(get_f32(beta + (row + i) * beta_stride + head * 4))
                column = i if slot_columns > 1 else 0
                slot_of_query = states + get_i32(mine + column * 4) * state_slot + head * state_head
                target = copy if recording != 0 or wide_state == 0 else slot_of_query
                recur(state, target, q + at, k + at, v + at, alpha + at, strength, o, errors, dim)
                state = target
                if recording != 0:
                    record_token(recorded + i * record_row, errors, k + at, alpha + at, size)
                if wide_state == 0:
                    keep(copy, 0 if recording != 0 else slot_of_query, dim)
                _finish(
                    o,
                    norm,
                    gate + (row + i) * gate_stride + head * size,
                    out + (row + i) * out_stride + head * size,
                    dim,
                    eps,
                    rounds,
                )
        first, last = claim(record, units, threads, 1)


@inner
def _sigmoid(x: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-x)))


@inner
def _gate(gamma: int, bias: int, alpha: int, dim: int, decay: float, bound: float) -> None:
    """alpha = exp(bound * sigmoid(e^A z)), or exp(-e^A softplus(z)) without a bound (spec 2.5.4)."""
    out_of_line()
    factor = splat_f32(decay)
    for c in range(0, dim * 4, 32):
        z = add_f32(load_f32(gamma + c), load_f32(bias + c))
        if bound < np.float32(0.0):
            value = multiply_f32(splat_f32(bound), sigmoid(multiply_f32(factor, z)))
        else:
            value = negative(multiply_f32(factor, softplus(z)))
        store_f32(alpha + c, exp(value))


@inner
def _normalize(x: int, dim: int, scale: float) -> None:
    squares = zero_f32()
    for c in range(0, dim * 4, 32):
        value = load_f32(x + c)
        squares = multiply_add(value, value, squares)
    factor = splat_f32(scale / np.float32(math.sqrt(sum_f32(squares) + _NORM_EPS)))
    for c in range(0, dim * 4, 32):
        store_f32(x + c, multiply_f32(load_f32(x + c), factor))


@inner
def _finish(o: int, norm: int, gate: int, out: int, dim: int, eps: float, rounds: int) -> None:
    """RMSNorm of a head's output times sigmoid(gate), rounded once after the product (spec 2.5.7)."""
    squares = zero_f32()
    for c in range(0, dim * 4, 32):
        value = load_f32(o + c)
        squares = multiply_add(value, value, squares)
    scale = splat_f32(np.float32(1.0) / np.float32(math.sqrt(sum_f32(squares) / np.float32(dim) + eps)))
    for c in range(0, dim * 4, 32):
        value = multiply_f32(multiply_f32(load_f32(o + c), scale), load_f32(norm + c))
        store_f32(out + c, round_if(multiply_f32(value, sigmoid(load_f32(gate + c))), rounds))
