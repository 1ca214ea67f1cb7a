"""Which lanes of a warp run together: groups of equal program counter, where they meet, how they leave."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.barriers import complete_barrier
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inline, inner

LANES = 32
FULL = 0xFFFFFFFF
FAR = 1 << 30
ANY_WARP_BARRIER = -2


@inner
def draw(scalars: Any, below: Int) -> Int:
    """A pseudo-random number in 0..below-1 (xorshift)."""
    x = np.uint64(scalars[state.RANDOM])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    scalars[state.RANDOM] = np.int64(x)
    return np.int64((x >> np.uint64(11)) % np.uint64(below))


@inner
def lanes_bits(m: Any, warp: Int, row: Int, active: Int) -> Int:
    """The active lanes whose predicate in `row` is true."""
    bits = 0
    for lane in range(LANES):
        if at.registers(m)[warp, row, lane]:
            bits |= 1 << lane
    return bits & active


@inner
def population(bits: Int) -> Int:
    count = 0
    while bits:
        bits &= bits - 1
        count += 1
    return count


@inner
def gather(m: Any, pc: Int, warp: Int, group: Int) -> Int:
    """All lanes that take part in a warp-wide instruction, or 0 if some are still to come.

    `.aligned` instructions need every living lane, others the lanes of their member mask.
    """
    apart()
    alive = at.masks(m)[warp, state.M_ALIVE]
    op = at.code(m)[pc, state.C_OP]
    row = at.code(m)[pc, state.C_P + 5]
    needed = alive
    if row >= 0:  # a member mask
        first = 0
        while not (group >> first) & 1:
            first += 1
        needed = np.int64(at.registers(m)[warp, row, first] & np.uint64(FULL))
        if group & ~needed:
            report(m, state.F_MEMBER_MASK, pc, warp, first, needed, 0)
        needed &= alive
    key = ANY_WARP_BARRIER if op == codes.WARP_BARRIER else pc + 1
    have = group
    for lane in range(LANES):
        if at.lanes(m)[warp, state.L_SYNC, lane] == key:
            have |= 1 << lane
    if needed & ~have:
        at.masks(m)[warp, state.M_RUN] &= ~group
        for lane in range(LANES):
            if (group >> lane) & 1:
                at.lanes(m)[warp, state.L_SYNC, lane] = key
                at.lanes(m)[warp, state.L_PC, lane] = pc
        return 0
    at.masks(m)[warp, state.M_RUN] |= have
    for lane in range(LANES):
        if (have >> lane) & 1:
            at.lanes(m)[warp, state.L_SYNC, lane] = 0
    return have


@inner
def leave(m: Any, pc: Int, warp: Int, lanes: Int) -> None:
    """Lanes exit; who waits for them may go on."""
    apart()
    at.masks(m)[warp, state.M_ALIVE] &= ~lanes
    at.masks(m)[warp, state.M_RUN] &= ~lanes
    at.scalars(m)[state.PROGRESS] += 1
    for lane in range(LANES):
        if at.lanes(m)[warp, state.L_SYNC, lane]:
            at.lanes(m)[warp, state.L_SYNC, lane] = 0
            at.masks(m)[warp, state.M_RUN] |= 1 << lane
    for slot in range(len(at.copies(m)) if at.scalars(m)[state.COPIES] else 0):
        c = at.copies(m)[slot]
        if c[state.K_LIVE] == 2 and c[state.K_OWNER] // LANES == warp and (lanes >> (c[state.K_OWNER] % LANES)) & 1:
            report(m, state.F_COPY_UNFINISHED, pc, warp, c[state.K_OWNER] % LANES, 0, 0)
    if at.masks(m)[warp, state.M_ALIVE] == 0:
        cta = warp // at.scalars(m)[state.WARPS_PER_CTA]
        for identity in range(16):
            complete_barrier(m, pc, warp, cta, identity)


@inner
def pick_group(m: Any, warp: Int, pick: Int) -> Int:
    """Lanes of one program counter: the least, where branches meet again, or that of a lane chosen by `pick`."""
    apart()
    run = at.masks(m)[warp, state.M_RUN]
    pc = FAR
    if pick >= 0:
        for k in range(LANES):
            lane = (pick + k) % LANES
            if (run >> lane) & 1:
                pc = at.lanes(m)[warp, state.L_PC, lane]
                break
    else:
        for lane in range(LANES):
            if (run >> lane) & 1 and at.lanes(m)[warp, state.L_PC, lane] < pc:
                pc = at.lanes(m)[warp, state.L_PC, lane]
    group = 0
    for lane in range(LANES):
        if (run >> lane) & 1 and at.lanes(m)[warp, state.L_PC, lane] == pc:
            group |= 1 << lane
    return group


@inline
def first_lane(bits: Int) -> Int:
    lane = 0
    while not (bits >> lane) & 1:
        lane += 1
    return lane


@inner
def set_counter(m: Any, warp: Int, lanes: Int, pc: Int) -> None:
    for lane in range(LANES):
        if (lanes >> lane) & 1:
            at.lanes(m)[warp, state.L_PC, lane] = pc
