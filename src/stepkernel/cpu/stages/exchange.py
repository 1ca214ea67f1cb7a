"""Exchanges between tensor-parallel ranks inside a step (spec 3.5, 6.4): sums in rank order, and parts put together.

A stage with an exchange ends in three kinds of records. POST copies what this thread has just produced into its rank's
slot. REARM clears an old slot while the others' values are on their way. TAKE reads every rank's slot and writes the
stage's output. A value is its own flag: a slot word that is zero has not been written, and +0 travels as -0. So a
reader waits for single vectors, whatever the threads and the pace of the writers, and every NaN passes as it is.

Barriers. POST reads what the same thread wrote, TAKE writes only the stage's output, whose readers wait for the stage
anyway, so the barriers that the program's hazards ask for are enough inside a rank (`waits` adds one between two
stages with exchanges that have none). Let m count exchanges. All threads of a rank have left TAKE of m before one of
them reaches POST of m + 1.

Copies. Exchange m uses copy m mod 4 of each slot. (a) A rank clears its copy of m - 2 in exchange m. By then one of its
threads has taken values of m - 1 from every other rank; those were posted after all threads of that rank had taken
m - 2, so nobody still reads it. (b) That copy is next used in m + 2. A reader gets there after it has taken values of
m + 1 from the owner, posted after all its threads had cleared in m: it sees zeros or new values, never old ones. With
three copies a reader could come to m + 1 while a thread of the owner that had nothing to post was still clearing.

Waits are bounded by time that the rank itself spent waiting. A rank that gives up says so in its report and raises the
alarm; from then on nobody waits any more: every rank runs to the end of its step on whatever it has, and raises an
error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from stepkernel.cpu import mailbox as box
from stepkernel.cpu.atomics import (
    fence,
    fetch_add,
    futex_wait_shared,
    futex_wake_shared,
    load_acquire,
    load_sequential,
    pause,
    store_release,
    store_sequential,
)
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout, padded, product_of
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import (
    I32,
    add_f32,
    broadcast_f32,
    constant_ir,
    declare,
    f32_as_i32,
    get_f32,
    get_i32,
    get_i64,
    i32_as_f32,
    i32x8,
    load_f32,
    load_i32,
    multiply_add,
    multiply_f32,
    operation,
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
from stepkernel.cpu.stages.linear import joint_parts
from stepkernel.cpu.step import ROUNDS, ROWS
from stepkernel.cpu.team import BARRIER_SPINS
from stepkernel.cpu.vmath import round_if
from stepkernel.program.program import Program, barriers
from stepkernel.program.stages import PARTIAL, Combine, Embed, GatherQueries, Linear, MergeContext, Stage

_post_arguments, _rearm_arguments, _take_arguments, _greet_arguments, _merge_arguments = (
    words(count) for count in (8, 3, 11, 3, 10)
)
HEAD = 64  # bytes of a slot before the rows: what the step is
_SCRATCH = 64


@dataclass(frozen=True)
class Piece:
    """What one exchange moves of a stage's output.

    source  buffer that holds this rank's contribution; `out` gets the result
    width   columns of the contribution; `gathered`: the result is that of all ranks side by side, otherwise the sum
    joint   (first group, groups) in a product shared out by groups of 8 columns; None: the stage shares out rows
    merged  (ranks, heads of a rank, lora): the contribution holds partial sums of all heads; a rank merges its own
    """

    source: str
    out: str
    width: int
    gathered: bool
    joint: tuple[int, int] | None
    merged: tuple[int, int, int] | None = None

    @property
    def groups(self) -> int:
        return padded(self.width) // 8


def pieces(stage: Stage, exact: frozenset[str]) -> list[Piece]:
    """What a stage exchanges: nothing for most."""
    match stage:
        case Embed() if stage.exchange != "none":
            return [Piece(stage.out, stage.out, stage.table.columns, False, None)]
        case Combine() if stage.exchange != "none":
            return [Piece(stage.out, stage.out, stage.width, False, None)]
        case GatherQueries():
            return [Piece(stage.x, stage.out, stage.width, True, None)]
        case MergeContext():
            width = stage.ranks * stage.heads * (stage.lora + PARTIAL)
            return [Piece(stage.x, stage.out, width, False, None, (stage.ranks, stage.heads, stage.lora))]
        case Linear():
            found = []
            for parts in joint_parts(stage, exact):
                total, first = sum(padded(p.matrix.rows) for p in parts) // 8, 0
                for p in parts:
                    if p.exchange != "none":
                        gathered = p.exchange == "all_gather"
                        found.append(Piece(product_of(p)[0], p.out, p.matrix.rows, gathered, (first, total)))
                    first += padded(p.matrix.rows) // 8
            return found
        case _:
            return []


def waits(stages: Sequence[Stage], exact: frozenset[str]) -> list[bool]:
    """The barriers of a program, and one before a stage with an exchange if there is none since the last exchange."""
    found, pending = [], False
    for stage, wait in zip(stages, barriers(tuple(stages)), strict=True):
        exchanges = bool(pieces(stage, exact))
        found.append(wait or (exchanges and pending))
        pending = exchanges or (pending and not found[-1])
    return found


def slot_bytes(program: Program) -> int:
    """What a mailbox needs for one exchange of one rank."""
    exact = frozenset(b.name for b in program.buffers if b.dtype != "bf16")
    groups = max(sum(piece.groups for piece in pieces(stage, exact)) for stage in program.stages)
    return -(-(HEAD + program.rows * groups * 32) // box.PAGE) * box.PAGE


def check(program: Program, mailbox: "box.Mailbox | None") -> None:
    """Raises ValueError if a program cannot use a mailbox."""
    if mailbox is None:
        if program.shard.size > 1:
            raise ValueError(f"program of rank {program.shard.rank} of {program.shard.size}: needs a mailbox")
        return
    if mailbox.shard != program.shard:
        raise ValueError(f"mailbox of {mailbox.shard}, program of {program.shard}: expected the same")
    if program.shard.size > 1 and mailbox.slot_bytes < slot_bytes(program):
        raise ValueError(f"mailbox with slots of {mailbox.slot_bytes} bytes: the program needs {slot_bytes(program)}")


def encode(stage: Stage, index: int, number: int, group: int, layout: Layout, exact: frozenset[str]) -> list[Record]:
    """The records of exchange `number` of a program, in its stage `index`. `group`: address of the mailbox's block."""
    found = pieces(stage, exact)
    posts, takes, before = [], [], 0
    for piece in found:
        first, joint = piece.joint or (0, 0)
        where = (piece.groups, before)
        posts.append(Record(Operation.POST, (group, number, *layout.at(piece.source), *where, first, joint)))
        place, rounded = (group, number, index, *where, *layout.at(piece.out)), int(piece.out not in exact)
        if piece.merged is None:
            arguments = (*place, piece.width, int(piece.gathered), rounded, int(piece.joint is None))
            takes.append(Record(Operation.TAKE, arguments, _SCRATCH))
        else:
            ranks, heads, lora = piece.merged
            takes.append(Record(Operation.MERGE, (*place, heads, lora, rounded), _SCRATCH + 4 * ranks))
        before += piece.groups
    greet = [Record(Operation.GREET, (group, number, index), _SCRATCH)] if number == 0 else []
    return [*posts, Record(Operation.REARM, (group, number, before)), *greet, *takes]


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


_unwritten = operation(types.int32, i32x8, emit=_any_zero)
_sealed, _opened = _swap(0, -(1 << 31)), _swap(-(1 << 31), 0)


@inner
def _slot(group: int, number: int, rank: int) -> int:
    """Address of a rank's slot in exchange `number` of the running program."""
    copy = (get_i64(group + box.EXCHANGE) + number) & 3
    place = copy * get_i64(group + box.GROUP_SIZE) + rank
    found: int = get_i64(group + box.BASE) + place * get_i64(group + box.SLOT_BYTES)
    return found


@inner
def _announce(group: int) -> None:
    """Wakes who sleeps until this rank posts."""
    mine = get_i64(group + box.HEADER) + box.RANKS + get_i64(group + box.RANK) * box.RANK_BYTES
    fetch_add(mine + box.POSTED, np.int32(1))
    if load_sequential(mine + box.WAITERS) != 0:
        futex_wake_shared(mine + box.POSTED, 1 << 20)


@inner
def post(record: int, step: int, threads: int, thread: int) -> None:
    """Copies this thread's share of the stage's output, the same share as in the stage, into the rank's slot."""
    out_of_line()
    group, number, x, x_stride, groups, before, start, joint = _post_arguments(record)
    rows = get_i64(step + ROWS)
    target = _slot(group, number, get_i64(group + box.RANK)) + HEAD + rows * before * 32
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
            store_i32(target + row * groups * 32 + i, _sealed(value))
    if first_row < last_row and first < last:
        _announce(group)


@inner
def rearm(record: int, step: int, threads: int, thread: int) -> None:
    """Clears the rank's slot of two exchanges ago and notes how much this exchange writes."""
    out_of_line()
    group, number, groups = _rearm_arguments(record)
    now = get_i64(group + box.EXCHANGE) + number
    sent = get_i64(group + box.SENT + ((now + 2) & 3) * 8)
    target = _slot(group, number + 2, get_i64(group + box.RANK))
    first, last = share(sent, threads, thread)
    for i in range(first * 32, last * 32, 32):
        store_i32(target + i, zero_i32())
    if thread == 0:
        put_i64(group + box.SENT + (now & 3) * 8, HEAD // 32 + get_i64(step + ROWS) * groups)


@inner
def _stop(group: int, kind: int, about: int, stage: int) -> None:
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
    while _unwritten(load_i32(at)) != 0:
        if load_acquire(header + box.ALARM) != 0:
            put_i64(group + box.BROKEN, 1)
            return
        spins += 1
        if spins <= BARRIER_SPINS:
            pause()
            continue
        fetch_add(waiters, np.int32(1))
        seen = load_sequential(posted)
        if _unwritten(load_i32(at)) != 0:
            waited += futex_wait_shared(posted, seen, group + box.NAP_TIME, scratch)
        fetch_add(waiters, np.int32(-1))
        if waited > get_i64(group + box.LIMIT):
            _stop(group, 1, rank, stage)


@inner
def _received(at: int, group: int, rank: int, stage: int, scratch: int) -> Any:
    """The vector at `at` of a slot of `rank`, as soon as it is there."""
    value = load_i32(at)
    if _unwritten(value) != 0:
        _await(at, group, rank, stage, scratch)
        value = load_i32(at)
    return _opened(value)


@inner
def take(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    """Sums over the ranks in their order, rounded once, or puts their parts side by side.

    Where the stage shares out rows (`by_rows`), so does this, because the latent norm goes on with the same rows.
    """
    out_of_line()
    group, number, stage, groups, before, y, y_stride, width, gathered, rounded, by_rows = _take_arguments(record)
    rows, size = get_i64(step + ROWS), get_i64(group + box.GROUP_SIZE)
    rounds = get_i64(step + ROUNDS) * rounded
    slot, slot_size = _slot(group, number, 0) + HEAD + rows * before * 32, get_i64(group + box.SLOT_BYTES)
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
                    part = _received(line + rank * slot_size + i, group, rank, stage, scratch)
                    total = add_f32(total, i32_as_f32(part))
                store_f32(out + i, round_if(total, rounds))
        else:
            for rank in range(size):
                source, target = line + rank * slot_size, out + rank * width * 4
                for i in range(begin, end, 32):
                    part = i32_as_f32(_received(source + i, group, rank, stage, scratch))
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
    slot, slot_size = _slot(group, number, 0) + HEAD + rows * before * 32, get_i64(group + box.SLOT_BYTES)
    weights = scratch + _SCRATCH
    first, last = share(rows * heads, threads, thread)
    for unit in range(first, last):
        row = unit // heads
        head = unit - row * heads
        part = slot + row * groups * 32 + (get_i64(group + box.RANK) * heads + head) * (lora + PARTIAL) * 4
        top = np.float32(-3e38)
        for rank in range(size):
            facts = part + rank * slot_size + lora * 4
            _received(facts, group, rank, stage, scratch)
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
                values = i32_as_f32(_received(part + rank * slot_size + i, group, rank, stage, scratch))
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
    store_i32(_slot(group, number, get_i64(group + box.RANK)), splat_i32(facts))
    _announce(group)
    for rank in range(get_i64(group + box.GROUP_SIZE)):
        at = _slot(group, number, rank)
        _received(at, group, rank, stage, scratch)
        other = get_i32(at)
        if other != facts and other != 0:
            _stop(group, 2, rank, stage)
