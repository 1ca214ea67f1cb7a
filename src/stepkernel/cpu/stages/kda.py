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
    put_f32,
    splat_f32,
    store_f32,
    sum_f32,
    words,
    zero_f32,
)
from stepkernel.cpu.step import ACCEPTED, QUERIES, REQUESTS, ROUNDS, STATE_COLUMNS, STATE_SLOTS
from stepkernel.cpu.vmath import exp, load_as, negative, round_if, sigmoid, silu, softplus, store_as
from stepkernel.model.weights import Weights
from stepkernel.program.stages import KdaCore

_arguments = words(20)
_EPS = 8 * 20
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


def scratch(stage: KdaCore, queries: int) -> int:
    return 4 * stage.head_dim * (stage.conv_width - 1 + queries + 4 * queries + 1) + 256


def encode(
    stage: KdaCore,
    packed: tuple[int, ...],
    layout: Layout,
    conv: tuple[int, int],
    recurrent: tuple[int, int],
    wide: bool,
    queries: int,
    group: int,
) -> list[Record]:
    """`conv` and `recurrent`: address of the state, bytes of a slot. `group`: which of the step's slot tables."""
    bounded = 0.0 if stage.gate_lower_bound is None else float(stage.gate_lower_bound)
    places = (
        *layout.at(stage.qkv),
        *layout.at(stage.gamma),
        *layout.at(stage.gate),
        *layout.at(stage.beta),
        *layout.at(stage.out),
    )
    shape = ((stage.head_dim << 32) | stage.heads, (stage.conv_width << 32) | (group << 1) | int(wide))
    arguments = (*places, *packed, *conv, *recurrent, *shape, _float_pair(float(stage.eps), bounded))
    return [Record(Operation.KDA, arguments, scratch(stage, queries))]


def _float_pair(low: float, high: float) -> int:
    return int(np.array([low, high], np.float32).view(np.int64)[0])


@inner
def kda(record: int, step: int, threads: int, scratch: int) -> None:
    """Units are (request, head); the tokens of a request run one after the other."""
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
    wide, group, taps = kind & 1, (kind & 0xFFFFFFFF) >> 1, kind >> 32
    queries = get_i64(step + QUERIES)
    rounds = get_i64(step + ROUNDS)
    slot_columns = get_i64(step + STATE_COLUMNS)
    slots = get_i64(step + STATE_SLOTS) + group * get_i64(step + REQUESTS) * slot_columns * 4
    size = dim * 4
    channels = 3 * heads * dim
    # With one slot for all queries only the last state is kept, and the window that goes with it.
    dropped = queries - 1 if slot_columns == 1 else 0
    window = scratch
    q = window + (taps - 1 + queries) * size
    k, v, alpha = q + queries * size, q + 2 * queries * size, q + 3 * queries * size
    o = alpha + queries * size
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
            state_of_conv = conv + slot * conv_slot
            for part in range(3):
                channel = (part * heads + head) * dim
                source = qkv + row * qkv_stride + channel * 4
                target = q + part * queries * size
                _convolve(
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
                    accepted,
                    dropped,
                    wide,
                )
            head_decay = get_f32(decay + head * 4)
            state = states + get_i32(mine + (accepted - 1) * 4) * state_slot + head * dim * size
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
                target = states + get_i32(mine + column * 4) * state_slot + head * dim * size
                _recur(state, target, q + at, k + at, v + at, alpha + at, strength, o, dim)
                state = target
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
def _convolve(
    x: int,
    x_stride: int,
    state: int,
    channel: int,
    channels: int,
    filters: int,
    out: int,
    window: int,
    dim: int,
    taps: int,
    queries: int,
    accepted: int,
    dropped: int,
    wide: int,
) -> None:
    """Causal filter and SiLU of one head's q, k or v, and the rolled window back into the state.

    The history of the first token starts at column `accepted - 1`; afterwards the state holds the history's last
    `taps - 2` columns and the new raw inputs (spec 5.5), without the first `dropped` of these.
    """
    out_of_line()
    size = dim * 4
    history = taps - 1
    for j in range(history):
        at = (accepted - 1 + j) * channels + channel
        for c in range(0, dim, 8):
            store_f32(window + j * size + c * 4, load_as(state, at + c, wide))
    for i in range(queries):
        for c in range(0, size, 32):
            store_f32(window + (history + i) * size + c, load_f32(x + i * x_stride + c))
    for i in range(queries):
        for c in range(0, size, 32):
            total = zero_f32()
            for j in range(taps):
                weight = load_f32(filters + (j * channels + channel) * 4 + c)
                total = multiply_add(weight, load_f32(window + (i + j) * size + c), total)
            store_f32(out + i * size + c, silu(total))
    for j in range(history - 1 + queries - dropped):
        source = window + (j + 1 + dropped) * size
        for c in range(0, dim, 8):
            store_as(state, j * channels + channel + c, load_f32(source + c * 4), wide)


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
def _recur(state: int, target: int, q: int, k: int, v: int, alpha: int, strength: float, o: int, dim: int) -> None:
    """One token: S <- S diag(alpha); e = beta (v - S k); S <- S + e k^T; o = S q, reading and writing S once.

    o = (S diag(alpha)) q + e (k . q), so both products come from the decayed row before it is updated.
    """
    out_of_line()
    size = dim * 4
    overlap = zero_f32()
    for c in range(0, size, 32):
        overlap = multiply_add(load_f32(q + c), load_f32(k + c), overlap)
    both = sum_f32(overlap)
    for row in range(dim):
        source, out = state + row * size, target + row * size
        along_k, along_q = zero_f32(), zero_f32()
        for c in range(0, size, 32):
            decayed = multiply_f32(load_f32(source + c), load_f32(alpha + c))
            along_k = multiply_add(decayed, load_f32(k + c), along_k)
            along_q = multiply_add(decayed, load_f32(q + c), along_q)
        error = strength * (get_f32(v + row * 4) - sum_f32(along_k))
        put_f32(o + row * 4, sum_f32(along_q) + error * both)
        step = splat_f32(error)
        for c in range(0, size, 32):
            decayed = multiply_f32(load_f32(source + c), load_f32(alpha + c))
            store_f32(out + c, multiply_add(step, load_f32(k + c), decayed))


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
