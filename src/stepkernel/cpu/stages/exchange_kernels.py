"""The records of an exchange (exchange.py says why they are right): post, rearm, take or merge, and greet."""

import math

import numpy as np

from stepkernel.cpu import mailbox as box
from stepkernel.cpu.atomics import fence
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import (
    add_f32,
    broadcast_f32,
    f32_as_i32,
    get_f32,
    get_i32,
    get_i64,
    i32_as_f32,
    load_f32,
    multiply_add,
    multiply_f32,
    out_of_line,
    put_f32,
    put_i32,
    put_i64,
    splat_f32,
    splat_i32,
    store_f32,
    store_i32,
    words,
    zero_f32,
    zero_i32,
)
from stepkernel.cpu.stages.exchange_slots import HEAD, SCRATCH, announce, received, sealed, slot_of, stop
from stepkernel.cpu.step import ROUNDS, ROWS
from stepkernel.cpu.vmath import round_if
from stepkernel.program.stages import PARTIAL

_post_arguments, _rearm_arguments, _take_arguments, _greet_arguments, _merge_arguments = (
    words(count) for count in (8, 3, 11, 3, 10)
)


@inner
def post(record: int, step: int, threads: int, thread: int) -> None:
    """Copies this thread's share of the stage's output, the same share as in the stage, into the rank's slot."""
    out_of_line()
    group, number, x, x_stride, groups, before, start, joint = _post_arguments(record)
    rows = get_i64(step + ROWS)
    target = slot_of(group, number, get_i64(group + box.RANK)) + HEAD + rows * before * 32
    first_row, last_row, first, last = 0, rows, 0, groups
    if joint == 0:
        first_row, last_row = share(rows, threads, thread)
    else:
        begin, end = share(joint, threads, thread)
        first, last = max(begin - start, 0), min(end - start, groups)
    fence()
    for row in range(first_row, last_row):
        for i in range(first * 32, last * 32, 32):
            value = f32_as_i32(load_f32(x + row * x_stride + i))
            store_i32(target + row * groups * 32 + i, sealed(value))
    if first_row < last_row and first < last:
        announce(group)


@inner
def rearm(record: int, step: int, threads: int, thread: int) -> None:
    """Clears the rank's slot of two exchanges ago and notes how much this exchange writes."""
    out_of_line()
    group, number, groups = _rearm_arguments(record)
    now = get_i64(group + box.EXCHANGE) + number
    sent = get_i64(group + box.SENT + ((now + 2) & 3) * 8)
    target = slot_of(group, number + 2, get_i64(group + box.RANK))
    first, last = share(sent, threads, thread)
    for i in range(first * 32, last * 32, 32):
        store_i32(target + i, zero_i32())
    if thread == 0:
        put_i64(group + box.SENT + (now & 3) * 8, HEAD // 32 + get_i64(step + ROWS) * groups)


@inner
def take(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Sums over the ranks in their order, rounded once, or puts their parts side by side.

    Where the stage shares out rows (`by_rows`), so does this, because the latent norm goes on with the same rows.
    """
    out_of_line()
    group, number, stage, groups, before, y, y_stride, width, gathered, rounded, by_rows = _take_arguments(record)
    rows, size = get_i64(step + ROWS), get_i64(group + box.GROUP_SIZE)
    rounds = get_i64(step + ROUNDS) * rounded
    slot, slot_size = slot_of(group, number, 0) + HEAD + rows * before * 32, get_i64(group + box.SLOT_BYTES)
    if by_rows != 0:
        first, last = share(rows, threads, thread)
        first, last = first * groups, last * groups
    else:
        first, last = share(rows * groups, threads, thread)
    while first < last:
        row = first // groups
        begin, end = (first - row * groups) * 32, min(last - row * groups, groups) * 32
        line, out = slot + row * groups * 32, y + row * y_stride
        if gathered == 0:
            for i in range(begin, end, 32):
                total = zero_f32()
                for rank in range(size):
                    part = received(line + rank * slot_size + i, group, rank, stage, scratch)
                    total = add_f32(total, i32_as_f32(part))
                store_f32(out + i, round_if(total, rounds))
        else:
            for rank in range(size):
                source, target = line + rank * slot_size, out + rank * width * 4
                for i in range(begin, end, 32):
                    part = i32_as_f32(received(source + i, group, rank, stage, scratch))
                    if i + 32 <= width * 4:
                        store_f32(target + i, part)
                    else:
                        for c in range(i, width * 4, 4):
                            value = get_i32(source + c)
                            put_i32(target + c, np.int32(0) if value == np.int32(-(1 << 31)) else value)
        first = row * groups + end // 32
    fence()


@inner
def merge(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """This rank's heads from the partial sums of all ranks, in rank order (spec 4.3). Heads of all rows are shared out.

    A rank without rows has a total of 0 and a largest score below every other. A NaN reaches the output.
    """
    out_of_line()
    group, number, stage, groups, before, y, y_stride, heads, lora, rounded = _merge_arguments(record)
    rows, size = get_i64(step + ROWS), get_i64(group + box.GROUP_SIZE)
    rounds = get_i64(step + ROUNDS) * rounded
    slot, slot_size = slot_of(group, number, 0) + HEAD + rows * before * 32, get_i64(group + box.SLOT_BYTES)
    weights = scratch + SCRATCH
    first, last = share(rows * heads, threads, thread)
    for unit in range(first, last):
        row = unit // heads
        head = unit - row * heads
        part = slot + row * groups * 32 + (get_i64(group + box.RANK) * heads + head) * (lora + PARTIAL) * 4
        top = np.float32(-3e38)
        for rank in range(size):
            facts = part + rank * slot_size + lora * 4
            received(facts, group, rank, stage, scratch)
            value = get_f32(facts)
            if not value <= top:
                top = value
        total = np.float32(0.0)
        for rank in range(size):
            facts = part + rank * slot_size + lora * 4
            weight = np.float32(math.exp(get_f32(facts) - top))
            put_f32(weights + rank * 4, weight)
            total += weight * get_f32(facts + 4)
        inverse = splat_f32(np.float32(1.0) / total) if total != np.float32(0.0) else zero_f32()
        target = y + row * y_stride + head * lora * 4
        for i in range(0, lora * 4, 32):
            merged = zero_f32()
            for rank in range(size):
                values = i32_as_f32(received(part + rank * slot_size + i, group, rank, stage, scratch))
                merged = multiply_add(broadcast_f32(weights + rank * 4), values, merged)
            store_f32(target + i, round_if(multiply_f32(merged, inverse), rounds))
    fence()


@inner
def greet(record: int, step: int, thread: int, scratch: int) -> None:
    """The first thread compares what the step is with all ranks: numbers of different steps must never be summed."""
    out_of_line()
    if thread != 0:
        return
    group, number, stage = _greet_arguments(record)
    facts = np.int32(get_i64(group + box.FACTS))
    store_i32(slot_of(group, number, get_i64(group + box.RANK)), splat_i32(facts))
    announce(group)
    for rank in range(get_i64(group + box.GROUP_SIZE)):
        at = slot_of(group, number, rank)
        received(at, group, rank, stage, scratch)
        other = get_i32(at)
        if other != facts and other != 0:
            stop(group, 2, rank, stage)
