"""Asynchronous bulk copies: started by a lane, finished some sweeps later, waited for by mbarrier or by group."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.access import mark, place
from ptxcheck.machine.barriers import advance, mbarrier_at
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inner
from ptxcheck.machine.races import copy_row, join, tick, touch

LANES = 32
LATENCY = 3  # sweeps that an asynchronous copy takes when the order is fixed


@inner
def free_copy(m: Any, pc: Int, warp: Int, lane: Int) -> Int:
    apart()
    for i in range(len(at.copies(m))):
        if at.copies(m)[i, state.K_LIVE] == 0:
            return i
    report(m, state.F_TABLE_FULL, pc, warp, lane, 0, 1)
    return -1


@inner
def touch_copy(m: Any, pc: Int, warp: Int, lane: Int, spot: Int, size: Int, write: bool) -> None:
    """Race check of one side of an asynchronous copy, started by `warp`."""
    apart()
    if spot >= at.scalars(m)[state.CONSTANT_START]:
        return
    shift = at.scalars(m)[state.CELL_SHIFT]
    engine = at.scalars(m)[state.WARPS] + warp // at.scalars(m)[state.WARPS_PER_CTA]
    touch(
        m,
        spot >> shift,
        (spot + size - 1) >> shift,
        engine,
        1,
        warp,
        lane,
        0,
        write,
        0,
        False,
        pc,
    )


@inner
def start_copy(m: Any, pc: Int, warp: Int, active: Int, kind: Int) -> None:
    """cp.async.bulk: operands destination, source, size, mbarrier (or -1); p0, p1, p2 offsets of the addresses.

    kind 1: global to shared, completes on an mbarrier; 2: shared to global, completes by bulk group.
    """
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    p = state.C_P
    low = np.uint64(0xFFFFFFFF)
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        r = at.registers(m)[warp]
        size = np.int64(r[at.operands(m)[o + 2], lane] & low)
        if size % 16 or size == 0:
            report(m, state.F_COPY_SIZE, pc, warp, lane, size, 0)
            return
        to_space = codes.SHARED if kind == 1 else codes.GLOBAL
        from_space = codes.GLOBAL if kind == 1 else codes.SHARED
        target = r[at.operands(m)[o], lane] + np.uint64(at.code(m)[pc, p])
        source = r[at.operands(m)[o + 1], lane] + np.uint64(at.code(m)[pc, p + 1])
        to = place(m, pc, warp, lane, target, to_space, size, 16)
        origin = place(m, pc, warp, lane, source, from_space, size, 16)
        if to < 0 or origin < 0:
            return
        found: Int = -1
        if kind == 1:
            found = mbarrier_at(m, pc, warp, lane, r[at.operands(m)[o + 3], lane] + np.uint64(at.code(m)[pc, p + 2]))
            if found < 0:
                return
        elif to >= at.scalars(m)[state.CONSTANT_START]:
            report(m, state.F_WRITE_CONSTANT, pc, warp, lane, np.int64(target), 0)
            return
        for i in range(size):
            if at.status(m)[origin + i] != state.SET:
                report(m, state.F_UNSET_READ, pc, warp, lane, np.int64(source), 0)
                break
        mark(at.status(m), to, size, state.UNSET)
        slot = free_copy(m, pc, warp, lane)
        if slot < 0:
            return
        if at.scalars(m)[state.CHECK]:
            engine = at.scalars(m)[state.WARPS] + warp // at.scalars(m)[state.WARPS_PER_CTA]
            tick(at.clocks(m), engine)
            touch_copy(m, pc, warp, lane, origin, size, False)
            touch_copy(m, pc, warp, lane, to, size, True)
            copy_row(at.copy_clocks(m), slot, 0, at.clocks(m), 0, warp)
            at.copy_clocks(m)[slot, 0, engine] = at.clocks(m)[0, engine, engine]
        c = at.copies(m)[slot]
        c[state.K_LIVE] = kind
        c[state.K_SOURCE] = origin
        c[state.K_TARGET] = to
        c[state.K_BYTES] = size
        c[state.K_OBJECT] = found
        c[state.K_OWNER] = warp * LANES + lane
        c[state.K_GROUP] = at.lanes(m)[warp, state.L_GROUP, lane]
        c[state.K_DUE] = at.scalars(m)[state.SWEEP] + LATENCY
        at.scalars(m)[state.COPIES] += 1
        at.scalars(m)[state.PROGRESS] += 1


@inner
def prefetch(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """cp.async.bulk.prefetch.L2.global: operands address, size; p0 offset of the address. Nothing can be seen of it, so
    neither values nor order matter; counted are the sectors that it names."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    counters = at.counters(m)[pc]
    if active:
        counters[state.N_WARPS] += 1
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        r = at.registers(m)[warp]
        size = np.int64(r[at.operands(m)[o + 1], lane] & np.uint64(0xFFFFFFFF))
        if size % 16 or size == 0:
            report(m, state.F_COPY_SIZE, pc, warp, lane, size, 0)
            return
        address = r[at.operands(m)[o], lane] + np.uint64(at.code(m)[pc, state.C_P])
        spot = place(m, pc, warp, lane, address, codes.GLOBAL, size, 16)
        if spot < 0:
            return
        sectors = ((spot + size - 1) >> 5) - (spot >> 5) + 1
        counters[state.N_TRANSFERS] += sectors
        counters[state.N_IDEAL] += (size + 31) >> 5


@inner
def finish_copy(m: Any, slot: Int) -> None:
    """The bytes arrive, and the mbarrier is told."""
    apart()
    c = at.copies(m)[slot]
    size, to, origin = c[state.K_BYTES], c[state.K_TARGET], c[state.K_SOURCE]
    memory = at.memory(m)
    for i in range(size):
        memory[to + i] = memory[origin + i]
    mark(at.status(m), to, size, state.SET)
    at.scalars(m)[state.COPIES] -= 1
    at.scalars(m)[state.PROGRESS] += 1
    if c[state.K_LIVE] == 1:
        found = c[state.K_OBJECT]
        if at.objects(m)[found, state.O_KIND] == state.MBARRIER:
            for k in range(2):
                join(at.object_clocks(m), found, k, at.copy_clocks(m), slot, 0)
            owner = c[state.K_OWNER]
            advance(m, 0, owner // LANES, owner % LANES, found, 0, -size)
        c[state.K_LIVE] = 0
    else:
        c[state.K_LIVE] = 3  # done, to be waited for


@inner
def commit_group(m: Any, warp: Int, active: Int) -> None:
    apart()
    for lane in range(LANES):
        if (active >> lane) & 1:
            at.lanes(m)[warp, state.L_GROUP, lane] += 1


@inner
def group_done(m: Any, pc: Int, warp: Int, active: Int) -> bool:
    """cp.async.bulk.wait_group: p0 groups may be left. Only waits; false if the warp has to come back."""
    apart()
    for slot in range(len(at.copies(m))):
        c = at.copies(m)[slot]
        if c[state.K_LIVE] < 2 or c[state.K_OWNER] // LANES != warp:
            continue
        lane = c[state.K_OWNER] % LANES
        recent = at.lanes(m)[warp, state.L_GROUP, lane] - at.code(m)[pc, state.C_P]
        if not (active >> lane) & 1 or c[state.K_GROUP] >= recent:
            continue
        if c[state.K_LIVE] == 2:
            return False
        for k in range(2):
            join(at.clocks(m), k, warp, at.copy_clocks(m), slot, 0)
        c[state.K_LIVE] = 0
    return True
