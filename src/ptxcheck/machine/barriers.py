"""CTA barriers and mbarriers."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.access import mark, place, watch
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inner
from ptxcheck.machine.races import clear, copy_row, find_object, join, tick

LANES = 32


@inner
def arrive(m: Any, pc: Int, warp: Int, active: Int, identity: Int, expected: Int, waits: bool) -> None:
    """One warp's arrival spot barrier `identity` of its CTA; `expected` threads, 0 for all of the CTA."""
    apart()
    cta = warp // at.scalars(m)[state.WARPS_PER_CTA]
    if identity < 0 or identity > 15:
        report(m, state.F_BARRIER_ID, pc, warp, 0, identity, 0)
        return
    if expected % LANES:
        report(m, state.F_BARRIER_COUNT, pc, warp, 0, expected, 0)
    b = at.barriers(m)[cta * 16 + identity]
    wanted = expected if expected else -1
    if b[0] and b[1] != wanted:
        report(m, state.F_BARRIER_COUNT, pc, warp, 0, expected, b[1])
    b[0] += LANES
    b[1] = wanted
    for k in range(2):
        join(at.barrier_clocks(m), cta * 16 + identity, k, at.clocks(m), k, warp)
    tick(at.clocks(m), warp)
    if waits:
        at.masks(m)[warp, state.M_RUN] &= ~active
        for lane in range(LANES):
            if (active >> lane) & 1:
                at.lanes(m)[warp, state.L_BARRIER, lane] = identity + 1
    complete_barrier(m, pc, warp, cta, identity)


@inner
def complete_barrier(m: Any, pc: Int, warp: Int, cta: Int, identity: Int) -> None:
    """Lets the waiting warps go if all have arrived; exited warps are not waited for."""
    apart()
    b = at.barriers(m)[cta * 16 + identity]
    if b[0] == 0:
        return
    first = cta * at.scalars(m)[state.WARPS_PER_CTA]
    last = first + at.scalars(m)[state.WARPS_PER_CTA]
    wanted = b[1]
    if wanted < 0:
        wanted = 0
        for w in range(first, last):
            if at.masks(m)[w, state.M_ALIVE]:
                wanted += LANES
    if b[0] > wanted:
        report(m, state.F_BARRIER_OVERFLOW, pc, warp, 0, b[0], wanted)
    if b[0] < wanted:
        return
    for w in range(first, last):
        waiting = 0
        for lane in range(LANES):
            if at.lanes(m)[w, state.L_BARRIER, lane] == identity + 1:
                waiting |= 1 << lane
                at.lanes(m)[w, state.L_BARRIER, lane] = 0
        if waiting:
            at.masks(m)[w, state.M_RUN] |= waiting
            at.warps(m)[w, state.W_EPOCH] += 1
            for k in range(2):
                join(at.clocks(m), k, w, at.barrier_clocks(m), cta * 16 + identity, k)
    for k in range(2):
        clear(at.barrier_clocks(m), cta * 16 + identity, k)
    b[0] = 0
    at.scalars(m)[state.PROGRESS] += 1


@inner
def mbarrier_at(m: Any, pc: Int, warp: Int, lane: Int, address: Any) -> Int:
    """Row of the mbarrier spot a shared address, or -1 after a fatal finding."""
    apart()
    spot = place(m, pc, warp, lane, address, codes.SHARED, 8, 8)
    if spot < 0:
        return -1
    found = find_object(m, spot, False)
    if found < 0 or at.objects(m)[found, state.O_KIND] != state.MBARRIER:
        report(m, state.F_NO_MBARRIER, pc, warp, lane, np.int64(address), 0)
        return -1
    if at.scalars(m)[state.CHECK]:
        # Races with the initialisation.
        watch(m, pc, warp, lane, spot, 8, False, True, False)
    return found


@inner
def mbarrier_init(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """mbarrier.init: operands address, count; p0 offset."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(at.code(m)[pc, state.C_P])
        spot = place(m, pc, warp, lane, address, codes.SHARED, 8, 8)
        if spot < 0:
            return
        mark(at.status(m), spot, 8, state.SET)
        if at.scalars(m)[state.CHECK]:
            watch(m, pc, warp, lane, spot, 8, True, False, False)
        found = find_object(m, spot, True)
        if found < 0:
            return
        count = np.int64(at.registers(m)[warp, at.operands(m)[o + 1], lane] & np.uint64(0xFFFFF))
        row = at.objects(m)[found]
        row[state.O_KIND] = state.MBARRIER
        row[state.O_COUNT] = count
        row[state.O_PENDING] = count
        row[state.O_BYTES] = 0
        row[state.O_PHASE] = 0
        for k in range(4):
            clear(at.object_clocks(m), found, k)
        at.scalars(m)[state.PROGRESS] += 1


@inner
def mbarrier_invalidate(m: Any, pc: Int, warp: Int, active: Int) -> None:
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    for lane in range(LANES):
        if (active >> lane) & 1:
            address = at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(at.code(m)[pc, state.C_P])
            found = mbarrier_at(m, pc, warp, lane, address)
            if found < 0:
                return
            at.objects(m)[found, state.O_KIND] = 0


@inner
def advance(m: Any, pc: Int, warp: Int, lane: Int, found: Int, arrivals: Int, transactions: Int) -> None:
    """Counts arrivals and bytes of an mbarrier; a complete phase hands its clocks to those who wait."""
    apart()
    row = at.objects(m)[found]
    row[state.O_BYTES] += transactions
    row[state.O_PENDING] -= arrivals
    at.scalars(m)[state.PROGRESS] += 1
    if row[state.O_PENDING] < 0:
        report(m, state.F_MBARRIER_OVERFLOW, pc, warp, lane, row[state.O_COUNT], 0)
        return
    if row[state.O_PENDING] == 0 and row[state.O_BYTES] == 0:
        row[state.O_PHASE] ^= 1
        row[state.O_PENDING] = row[state.O_COUNT]
        for k in range(2):
            copy_row(at.object_clocks(m), found, 2 + k, at.object_clocks(m), found, k)
            clear(at.object_clocks(m), found, k)


@inner
def mbarrier_arrive(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """mbarrier.arrive, .expect_tx: operands address, value (or -1); p0 offset, p1 the value is bytes, p2 arrives."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    p = state.C_P
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(at.code(m)[pc, p])
        found = mbarrier_at(m, pc, warp, lane, address)
        if found < 0:
            return
        value = np.int64(1)
        if at.operands(m)[o + 1] >= 0:
            value = np.int64(at.registers(m)[warp, at.operands(m)[o + 1], lane] & np.uint64(0xFFFFFFFF))
        for k in range(2):
            join(at.object_clocks(m), found, k, at.clocks(m), k, warp)
        if at.code(m)[pc, p + 1]:
            advance(m, pc, warp, lane, found, at.code(m)[pc, p + 2], value)
        else:
            advance(m, pc, warp, lane, found, value, 0)
        if at.scalars(m)[state.FATAL]:
            return
    tick(at.clocks(m), warp)


@inner
def mbarrier_wait(m: Any, pc: Int, warp: Int, active: Int) -> bool:
    """mbarrier.try_wait.parity: operands predicate, address, parity; p0 offset. True if some lane has to go on."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    waits = False
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, at.operands(m)[o + 1], lane] + np.uint64(at.code(m)[pc, state.C_P])
        found = mbarrier_at(m, pc, warp, lane, address)
        if found < 0:
            return False
        parity = np.int64(at.registers(m)[warp, at.operands(m)[o + 2], lane] & np.uint64(1))
        done = at.objects(m)[found, state.O_PHASE] != parity
        at.registers(m)[warp, at.operands(m)[o], lane] = np.uint64(1 if done else 0)
        if done:
            for k in range(2):
                join(at.clocks(m), k, warp, at.object_clocks(m), found, 2 + k)
        else:
            waits = True
    return waits
