"""Slots of a mailbox as the kernels of an exchange see them (exchange.py): where they lie, and waiting for a vector."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from stepkernel.cpu import mailbox as box
from stepkernel.cpu.atomics import (
    fetch_add,
    futex_wait_shared,
    futex_wake_shared,
    load_acquire,
    load_sequential,
    pause,
    store_release,
    store_sequential,
)
from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import (
    I32,
    constant_ir,
    declare,
    get_i64,
    i32x8,
    load_i32,
    operation,
    out_of_line,
    put_i32,
    put_i64,
)
from stepkernel.cpu.team import BARRIER_SPINS

HEAD = 64  # bytes of a slot before the rows: what the step is
SCRATCH = 64  # bytes that waiting takes of a thread's scratch


def _any_zero(b: ir.IRBuilder, v: Sequence[ir.Value]) -> ir.Value:
    empty = b.icmp_signed("==", v[0], constant_ir(i32x8, 0))
    function = declare(b, "llvm.vector.reduce.or.v8i1", ir.IntType(1), [ir.VectorType(ir.IntType(1), 8)])
    return b.zext(b.call(function, [empty]), I32)


def _swap(old: int, new: int) -> Any:
    """Replaces words that equal `old`."""
    return operation(
        i32x8,
        i32x8,
        emit=lambda b, v: b.select(b.icmp_signed("==", v[0], constant_ir(i32x8, old)), constant_ir(i32x8, new), v[0]),
    )


unwritten = operation(types.int32, i32x8, emit=_any_zero)
sealed, opened = _swap(0, -(1 << 31)), _swap(-(1 << 31), 0)


@inner
def slot_of(group: int, number: int, rank: int) -> int:
    """Address of a rank's slot in exchange `number` of the running program."""
    copy = (get_i64(group + box.EXCHANGE) + number) & 3
    place = copy * get_i64(group + box.GROUP_SIZE) + rank
    found: int = get_i64(group + box.BASE) + place * get_i64(group + box.SLOT_BYTES)
    return found


@inner
def announce(group: int) -> None:
    """Wakes who sleeps until this rank posts."""
    mine = get_i64(group + box.HEADER) + box.RANKS + get_i64(group + box.RANK) * box.RANK_BYTES
    fetch_add(mine + box.POSTED, np.int32(1))
    if load_sequential(mine + box.WAITERS) != 0:
        futex_wake_shared(mine + box.POSTED, 1 << 20)


@inner
def stop(group: int, kind: int, about: int, stage: int) -> None:
    """Reports why and raises the alarm; the first alarm of the group stands."""
    header, rank = get_i64(group + box.HEADER), get_i64(group + box.RANK)
    mine = header + box.RANKS + rank * box.RANK_BYTES
    put_i64(group + box.BROKEN, 1)
    if load_acquire(header + box.ALARM) != 0:
        return
    put_i32(mine + box.ABOUT, np.int32(about))
    put_i32(mine + box.STAGE, np.int32(stage))
    store_release(mine + box.KIND, np.int32(kind))
    store_sequential(header + box.ALARM, np.int32(rank + 1))


@inner
def _await(at: int, group: int, rank: int, stage: int, scratch: int) -> None:
    """Returns when the vector at `at` has been written by `rank`, or when the group has stopped."""
    out_of_line()
    header = get_i64(group + box.HEADER)
    posted = header + box.RANKS + rank * box.RANK_BYTES + box.POSTED
    waiters = posted + box.WAITERS
    spins, waited = 0, 0
    while unwritten(load_i32(at)) != 0:
        if load_acquire(header + box.ALARM) != 0:
            put_i64(group + box.BROKEN, 1)
            return
        spins += 1
        if spins <= BARRIER_SPINS:
            pause()
            continue
        fetch_add(waiters, np.int32(1))
        seen = load_sequential(posted)
        if unwritten(load_i32(at)) != 0:
            waited += futex_wait_shared(posted, seen, group + box.NAP_TIME, scratch)
        fetch_add(waiters, np.int32(-1))
        if waited > get_i64(group + box.LIMIT):
            stop(group, 1, rank, stage)


@inner
def received(at: int, group: int, rank: int, stage: int, scratch: int) -> Any:
    """The vector at `at` of a slot of `rank`, as soon as it is there."""
    value = load_i32(at)
    if unwritten(value) != 0:
        _await(at, group, rank, stage, scratch)
        value = load_i32(at)
    return opened(value)
