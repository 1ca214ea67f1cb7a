"""The stages that only a DSpark draft has: rotation, Markov bias, choice of a token, confidence (spec 5.1, 5.3)."""

import math

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import gemm, point_rows, share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout, padded
from stepkernel.cpu.pack import bf16_bytes, pack_bf16
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    add_f32,
    f32x8,
    get_f32,
    get_i32,
    get_i64,
    load_f32,
    multiply_add,
    multiply_f32,
    out_of_line,
    put_f32,
    put_i32,
    put_i64,
    shuffle,
    splat_f32,
    store_f32,
    subtract_f32,
    sum_f32,
    words,
    zero_f32,
)
from stepkernel.cpu.stages.router import largest_of
from stepkernel.cpu.step import (
    POSITIONS,
    REQUESTS,
    ROUNDS,
    ROWS,
    TABLES,
    TEMPERATURES,
    TOKENS,
    UNIFORMS,
    X_ROWS,
    Y_ROWS,
)
from stepkernel.cpu.vmath import exp, load_bf16, round_if
from stepkernel.model.weights import Weights
from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate

_rotate_arguments, _markov_arguments, _choose_arguments, _confidence_arguments = (words(n) for n in (6, 14, 7, 12))
_swapped = shuffle(f32x8, [1, 0, 3, 2, 5, 4, 7, 6])


def pack_rotation(stage: Rotate, positions: int, arena: Arena) -> tuple[int, ...]:
    """For each position cosines, each twice, then sines as (-s, s): x * cosines + swapped(x) * sines rotates."""
    powers = np.arange(0, stage.rope, 2, dtype=np.float32) / np.float32(stage.rope)
    frequencies = (1.0 / np.float32(stage.theta) ** powers).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    table = arena.array((positions, 2 * stage.rope), np.float32)
    table[:, : stage.rope] = np.repeat(np.cos(angles), 2, axis=1)
    table[:, stage.rope :: 2], table[:, stage.rope + 1 :: 2] = -np.sin(angles), np.sin(angles)
    return (address(table),)


def encode_rotate(stage: Rotate, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    arguments = (*layout.at(stage.x), stage.heads, stage.width * 4, stage.rope * 4, packed[0])
    return [Record(Operation.ROTATE, arguments)]


@inner
def rotate(record: int, step: int, threads: int, thread: int) -> None:
    """Rows are shared out."""
    out_of_line()
    x, stride, heads, width, rope, table = _rotate_arguments(record)
    rounds = get_i64(step + ROUNDS)
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        cosines = table + get_i32(get_i64(step + POSITIONS) + row * 4) * 2 * rope
        for head in range(heads):
            at = x + row * stride + (head + 1) * width - rope
            for i in range(0, rope, 32):
                value = load_f32(at + i)
                turned = multiply_f32(_swapped(value), load_f32(cosines + rope + i))
                store_f32(at + i, round_if(multiply_add(value, load_f32(cosines + i), turned), rounds))


def pack_markov(stage: MarkovBias, weights: Weights, arena: Arena) -> tuple[int, ...]:
    """Rows of w_in as stored, and w_out as a product's matrix."""
    rows = weights.matrix(stage.w_in)
    table = arena.array(rows.shape, rows.dtype)
    table[...] = rows
    out = arena.array((bf16_bytes(stage.vocab, stage.rank),), np.uint8)
    pack_bf16([weights.matrix(stage.w_out)], out, [stage.w_out])
    weights.release()
    return address(table), address(out)


def encode_markov(stage: MarkovBias, packed: tuple[int, ...], layout: Layout, requests: int) -> list[Record]:
    places = (*layout.at(stage.logits), *layout.at(stage.drafts), *layout.at(stage.bias))
    shape = (padded(stage.vocab) // 8, stage.rank, stage.position, stage.drafts_per_request, stage.vocab)
    arguments = (*packed, stage.rank * 16, *places, *shape)
    return [Record(Operation.MARKOV, arguments, scratch=TABLES + requests * stage.rank * 4)]


@inner
def markov_bias(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Outputs are shared out; every thread widens the few rows of w_in for itself."""
    out_of_line()
    (
        table,
        matrix,
        group_bytes,
        logits,
        logits_stride,
        drafts,
        drafts_stride,
        bias,
        bias_stride,
        groups,
        rank,
        position,
        per_request,
        _,
    ) = _markov_arguments(record)
    requests = get_i64(step + REQUESTS)
    first, last = share(groups, threads, thread)
    for request in range(requests):
        row = request * per_request + position
        token = get_i32(get_i64(step + TOKENS) + row * 4)
        if position > 0:
            token = max(get_i32(drafts + (row - 1) * drafts_stride), np.int32(0))
        source, target = table + token * rank * 2, scratch + TABLES + request * rank * 4
        for i in range(0, rank, 8):
            store_f32(target + i * 4, load_bf16(source + i * 2))
        put_i64(scratch + X_ROWS + request * 8, target)
    point_rows(scratch + Y_ROWS, bias, bias_stride, requests)
    gemm(matrix, group_bytes, scratch + X_ROWS, scratch + Y_ROWS, requests, first, last, rank // 2)
    for request in range(requests):
        added = bias + request * bias_stride
        line = logits + (request * per_request + position) * logits_stride
        for i in range(first * 32, last * 32, 32):
            store_f32(line + i, add_f32(load_f32(line + i), load_f32(added + i)))


def encode_choose(stage: ChooseDraft, layout: Layout) -> list[Record]:
    places = (*layout.at(stage.logits), *layout.at(stage.drafts))
    arguments = (*places, stage.position, stage.drafts_per_request, stage.vocab)
    return [Record(Operation.CHOOSE, arguments)]


@inner
def choose_draft(record: int, step: int, threads: int, thread: int) -> None:
    """Requests are shared out."""
    out_of_line()
    logits, stride, drafts, drafts_stride, position, per_request, vocab = _choose_arguments(record)
    first, last = share(get_i64(step + REQUESTS), threads, thread)
    for request in range(first, last):
        row = request * per_request + position
        line = logits + row * stride
        chosen = largest_of(line, vocab)
        temperature = get_f32(get_i64(step + TEMPERATURES) + request * 4)
        if chosen >= 0 and temperature > np.float32(0.0):
            number = get_f32(get_i64(step + UNIFORMS) + row * 4)
            chosen = _draw(line, vocab, get_f32(line + chosen * 4), temperature, number)
        put_i32(drafts + row * drafts_stride, chosen)


@inner
def _draw(line: int, vocab: int, top: float, temperature: float, number: float) -> object:
    """The first token at which the cumulative exp((logit - top) / temperature) exceeds `number` of its total; groups of
    eight are summed as one."""
    out_of_line()
    highest, scale = splat_f32(top), splat_f32(np.float32(1.0) / temperature)
    whole = vocab // 8 * 8
    total = np.float32(0.0)
    for i in range(0, whole * 4, 32):
        total += sum_f32(exp(multiply_f32(subtract_f32(load_f32(line + i), highest), scale)))
    for i in range(whole, vocab):
        total += np.float32(math.exp((get_f32(line + i * 4) - top) / temperature))
    wanted, reached, start = number * total, np.float32(0.0), 0
    while start < whole:
        added = sum_f32(exp(multiply_f32(subtract_f32(load_f32(line + start * 4), highest), scale)))
        if reached + added > wanted:
            break
        reached += added
        start += 8
    last = np.int32(0)
    for i in range(start, vocab):
        share_of_one = np.float32(math.exp((get_f32(line + i * 4) - top) / temperature))
        if share_of_one > np.float32(0.0):
            last = np.int32(i)
        reached += share_of_one
        if reached > wanted:
            return last
    return last


def pack_confidence(stage: Confidence, weights: Weights, arena: Arena, table: int) -> tuple[int, ...]:
    """`table`: address of the packed rows of w_in, 0 without."""
    target = arena.array((padded(stage.width + stage.rank) + 8,), np.float32)
    target[: stage.width + stage.rank] = weights.vector(stage.weight)
    target[-8] = weights.vector(stage.bias)[0]
    return address(target), address(target[-8:]), table


def encode_confidence(stage: Confidence, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    places = (*layout.at(stage.hidden), *layout.at(stage.drafts), *layout.at(stage.out))
    arguments = (*packed, *places, stage.drafts_per_request, stage.width, stage.rank)
    return [Record(Operation.CONFIDENCE, arguments)]


@inner
def confidence(record: int, step: int, threads: int, thread: int) -> None:
    """Rows are shared out."""
    out_of_line()
    weight, bias, table, hidden, stride, drafts, drafts_stride, out, out_stride, per_request, width, rank = (
        _confidence_arguments(record)
    )
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        total = zero_f32()
        for i in range(0, width * 4, 32):
            total = multiply_add(load_f32(hidden + row * stride + i), load_f32(weight + i), total)
        token = get_i32(get_i64(step + TOKENS) + row * 4)
        if row % per_request > 0:
            token = max(get_i32(drafts + (row - 1) * drafts_stride), np.int32(0))
        for i in range(0, rank, 8):
            total = multiply_add(load_bf16(table + (token * rank + i) * 2), load_f32(weight + (width + i) * 4), total)
        put_f32(
            out + row * out_stride,
            np.float32(1.0) / (np.float32(1.0) + np.float32(math.exp(-(sum_f32(total) + get_f32(bias))))),
        )
