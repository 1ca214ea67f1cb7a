"""Runs a launch: warps in turn, each for some instructions, lanes of a warp in groups of equal program counter."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.access import load, store
from ptxcheck.machine.atomics import atomic
from ptxcheck.machine.barriers import (
    arrive,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_invalidate,
    mbarrier_wait,
)
from ptxcheck.machine.convert import convert
from ptxcheck.machine.copies import commit_group, finish_copy, group_done, prefetch, start_copy
from ptxcheck.machine.findings import report
from ptxcheck.machine.floating import floating
from ptxcheck.machine.integer import integer
from ptxcheck.machine.jit import Entry, Int, apart, inner
from ptxcheck.machine.multicast import store_all
from ptxcheck.machine.races import fence
from ptxcheck.machine.schedule import (
    FAR,
    FULL,
    LANES,
    draw,
    first_lane,
    gather,
    lanes_bits,
    leave,
    pick_group,
    population,
    set_counter,
)
from ptxcheck.machine.warp import elect, matrix_multiply, redux, shuffle, vote

DONE, FAILED, DEADLOCK, LIVELOCK, TOO_LONG = 0, 1, 2, 3, 4


@inner
def run_warp(m: Any, warp: Int, quantum: Int, pick: Int, out: Any, offsets: Any) -> Int:
    """Runs one warp for up to `quantum` instructions; returns how many."""
    apart()
    executed = 0
    p = state.C_P
    while executed < quantum and at.masks(m)[warp, state.M_RUN] and at.scalars(m)[state.FATAL] == 0:
        group = pick_group(m, warp, pick)
        pc = int(at.lanes(m)[warp, state.L_PC, first_lane(group)])
        others = at.masks(m)[warp, state.M_RUN] & ~group
        meet = FAR
        for lane in range(LANES):
            if (others >> lane) & 1:
                meet = min(meet, at.lanes(m)[warp, state.L_PC, lane])
        while True:
            row = at.code(m)[pc]
            op = row[state.C_OP]
            executed += 1
            at.scalars(m)[state.SERIAL] += 1
            at.scalars(m)[state.EXECUTED] += population(group)
            active = group
            if row[state.C_GUARD] >= 0:
                bits = lanes_bits(m, warp, row[state.C_GUARD], group)
                active = group & ~bits if row[state.C_NEGATED] else bits
            stop = False
            if op < codes.NOP:
                if active:
                    o = row[state.C_OPERANDS]
                    a, b, c = at.operands(m)[o + 1], at.operands(m)[o + 2], at.operands(m)[o + 3]
                    r = at.registers(m)[warp]
                    if op < 100:
                        integer(op, out, r, a, b, c, row[p], row[p + 1], row[p + 2])
                    elif op < 200:
                        floating(op, out, r, a, b, c, row[p], row[p + 1], row[p + 2])
                    else:
                        convert(op, out, r, a, b, row[p], row[p + 1], row[p + 2])
                    d = at.operands(m)[o]
                    if active == FULL:
                        for lane in range(LANES):
                            r[d, lane] = out[lane]
                    else:
                        for lane in range(LANES):
                            if (active >> lane) & 1:
                                r[d, lane] = out[lane]
                pc += 1
            elif op == codes.BRANCH:
                target = row[p]
                if active == group:
                    # A jump backwards yields, so that no loop keeps the machine for itself.
                    pc = target
                elif active == 0:
                    pc += 1
                else:
                    set_counter(m, warp, active, target)
                    set_counter(m, warp, group & ~active, pc + 1)
                    break
            elif op == codes.EXIT:
                if active:
                    leave(m, pc, warp, active)
                set_counter(m, warp, group & ~active, pc + 1)
                break
            elif op >= codes.BARRIER and op <= codes.LDMATRIX and op != codes.ACTIVE_MASK:
                if active != group and active != 0:
                    set_counter(m, warp, active, pc)
                    set_counter(m, warp, group & ~active, pc + 1)
                    break
                if active:
                    set_counter(m, warp, group, pc)
                    have = gather(m, pc, warp, group)
                    if have == 0:
                        break
                    group = have
                    others = at.masks(m)[warp, state.M_RUN] & ~group
                    if op == codes.SHUFFLE:
                        shuffle(m, pc, warp, group)
                    elif op == codes.BARRIER:
                        o = row[state.C_OPERANDS]
                        leader = first_lane(group)
                        identity = np.int64(at.registers(m)[warp, at.operands(m)[o], leader] & np.uint64(FULL))
                        expected: Int = 0
                        if at.operands(m)[o + 1] >= 0:
                            expected = np.int64(at.registers(m)[warp, at.operands(m)[o + 1], leader] & np.uint64(FULL))
                        set_counter(m, warp, group, pc + 1)
                        arrive(m, pc, warp, group, identity, expected, row[p] == 0)
                        break
                    elif op == codes.WARP_BARRIER:
                        at.warps(m)[warp, state.W_EPOCH] += 1
                        # Lanes may have waited at other such barriers.
                        for lane in range(LANES):
                            if (group >> lane) & 1:
                                at.lanes(m)[warp, state.L_PC, lane] += 1
                        break
                    elif op == codes.VOTE:
                        vote(m, pc, warp, group)
                    elif op == codes.ELECT:
                        elect(m, pc, warp, group)
                    elif op == codes.REDUX:
                        redux(m, pc, warp, group)
                    elif op == codes.MMA:
                        if group != FULL:
                            report(m, state.F_PARTIAL_WARP, pc, warp, 0, group, 0)
                        matrix_multiply(m, pc, warp)
                pc += 1
            elif op == codes.LOAD:
                if active:
                    load(m, pc, warp, active, offsets)
                    stop = row[p + 3] != codes.WEAK
                pc += 1
            elif op == codes.STORE:
                if active:
                    store(m, pc, warp, active, offsets)
                pc += 1
            elif op == codes.STORE_ALL:
                if active:
                    store_all(m, pc, warp, active)
                pc += 1
            elif op == codes.ATOMIC:
                if active:
                    atomic(m, pc, warp, active)
                pc += 1
            elif op == codes.FENCE:
                if active:
                    fence(m, warp, row[p], row[p + 1])
                pc += 1
            elif op == codes.MBARRIER_INIT:
                mbarrier_init(m, pc, warp, active)
                pc += 1
            elif op == codes.MBARRIER_ARRIVE:
                mbarrier_arrive(m, pc, warp, active)
                pc += 1
            elif op == codes.MBARRIER_WAIT:
                stop = mbarrier_wait(m, pc, warp, active)
                pc += 1
            elif op == codes.MBARRIER_INVALIDATE:
                mbarrier_invalidate(m, pc, warp, active)
                pc += 1
            elif op == codes.BULK_LOAD:
                start_copy(m, pc, warp, active, 1)
                pc += 1
            elif op == codes.BULK_STORE:
                start_copy(m, pc, warp, active, 2)
                pc += 1
            elif op == codes.BULK_PREFETCH:
                prefetch(m, pc, warp, active)
                pc += 1
            elif op == codes.BULK_COMMIT:
                commit_group(m, warp, active)
                pc += 1
            elif op == codes.BULK_WAIT:
                if active == 0 or group_done(m, pc, warp, active):
                    pc += 1
                else:
                    set_counter(m, warp, group, pc)
                    at.scalars(m)[state.POLLED] += 1
                    return executed
            elif op == codes.ACTIVE_MASK:
                for lane in range(LANES):
                    if (active >> lane) & 1:
                        at.registers(m)[warp, at.operands(m)[row[state.C_OPERANDS]], lane] = np.uint64(group)
                pc += 1
            elif op == codes.TRAP:
                if active:
                    report(m, state.F_TRAP, pc, warp, first_lane(active), 0, 0)
                pc += 1
            else:
                pc += 1
            if stop or executed >= quantum or at.scalars(m)[state.FATAL]:
                set_counter(m, warp, group, pc)
                if stop:
                    at.scalars(m)[state.POLLED] += 1
                    return executed
                break
            if others and (pc == meet or (pc > meet and pick < 0)):
                set_counter(m, warp, group, pc)
                break
    return executed


@inner
def finish_copies(m: Any, idle: bool) -> None:
    """Completes copies that are due: after some sweeps, at random with a seed, at once if nobody can run."""
    apart()
    seeded = at.scalars(m)[state.SEED] != 0
    for slot in range(len(at.copies(m))):
        live = at.copies(m)[slot, state.K_LIVE]
        if live == 1 or live == 2:
            due = at.copies(m)[slot, state.K_DUE] <= at.scalars(m)[state.SWEEP]
            if seeded:
                due = draw(at.scalars(m), 8) == 0
            if due or idle:
                finish_copy(m, slot)


@Entry
def run(m: Any) -> Int:
    """Runs the launch to its end or to the first fatal finding."""
    out = np.zeros(LANES, np.uint64)
    offsets = np.zeros(LANES, np.int64)
    warps = at.scalars(m)[state.WARPS]
    seeded = at.scalars(m)[state.SEED] != 0
    quiet = 0
    while True:
        at.scalars(m)[state.SWEEP] += 1
        before = at.scalars(m)[state.PROGRESS]
        at.scalars(m)[state.POLLED] = 0
        turns = 0
        alive = False
        shift = draw(at.scalars(m), warps) if seeded else 0
        for k in range(warps):
            warp = (k + shift) % warps
            if at.masks(m)[warp, state.M_ALIVE]:
                alive = True
            if at.masks(m)[warp, state.M_RUN] == 0:
                continue
            turns += 1
            if seeded:
                if draw(at.scalars(m), 4) == 0:
                    at.scalars(m)[state.POLLED] += 1
                    continue
                pick = draw(at.scalars(m), 64) - LANES
                run_warp(m, warp, 1 + draw(at.scalars(m), at.scalars(m)[state.QUANTUM]), pick, out, offsets)
            else:
                pick = at.scalars(m)[state.SWEEP] % LANES if at.scalars(m)[state.SWEEP] % 4 == 3 else -1
                run_warp(m, warp, at.scalars(m)[state.QUANTUM], pick, out, offsets)
            if at.scalars(m)[state.FATAL]:
                return FAILED
        if at.scalars(m)[state.COPIES]:
            finish_copies(m, turns == 0)
            if at.scalars(m)[state.FATAL]:
                return FAILED
        if not alive and at.scalars(m)[state.COPIES] == 0:
            return DONE
        if at.scalars(m)[state.PROGRESS] != before or at.scalars(m)[state.COPIES]:
            quiet = 0
        elif turns == 0:
            return DEADLOCK
        elif at.scalars(m)[state.POLLED] == turns:
            # Everybody polls and nothing changes.
            quiet += 1
            if quiet > at.scalars(m)[state.SPIN_LIMIT]:
                return LIVELOCK
        if at.scalars(m)[state.EXECUTED] > at.scalars(m)[state.INSTRUCTION_LIMIT]:
            return TOO_LONG
