"""Operations that exchange values between the lanes of a warp."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, state
from ptxcheck.machine.bits import decode, f32, signed
from ptxcheck.machine.findings import report
from ptxcheck.machine.floating import bits_of
from ptxcheck.machine.jit import Int, apart, inner

LANES = 32


@inner
def shuffle(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """shfl.sync: operands d, p (or -1), a, b, c."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    mode = at.code(m)[pc, state.C_P]
    r = at.registers(m)[warp]
    values = np.empty(LANES, np.uint64)
    inside = np.empty(LANES, np.uint64)
    for lane in range(LANES):
        b = np.int64(r[at.operands(m)[o + 3], lane] & np.uint64(31))
        c = np.int64(r[at.operands(m)[o + 4], lane])
        segment, limit = (c >> 8) & 31, c & 31
        most = (lane & segment) | (limit & ~segment & 31)
        if mode == 0:
            source = lane - b
            valid = source >= most
        elif mode == 1:
            source = lane + b
            valid = source <= most
        elif mode == 2:
            source = lane ^ b
            valid = source <= most
        else:
            source = (lane & segment) | (b & ~segment & 31)
            valid = source <= most
        if not valid:
            source = np.int64(lane)
        values[lane] = r[at.operands(m)[o + 2], source] & np.uint64(0xFFFFFFFF)
        inside[lane] = np.uint64(1 if valid else 0)
        if (active >> lane) & 1 and not (active >> source) & 1:
            report(m, state.F_INACTIVE_LANE, pc, warp, lane, source, 0)
    for lane in range(LANES):
        if (active >> lane) & 1:
            if at.operands(m)[o] >= 0:
                r[at.operands(m)[o], lane] = values[lane]
            if at.operands(m)[o + 1] >= 0:
                r[at.operands(m)[o + 1], lane] = inside[lane]


@inner
def vote(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """vote.sync: operands d, predicate; p1 negates it."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    mode, negate = at.code(m)[pc, state.C_P], at.code(m)[pc, state.C_P + 1]
    r = at.registers(m)[warp]
    ballot = 0
    for lane in range(LANES):
        if (active >> lane) & 1 and (r[at.operands(m)[o + 1], lane] != 0) != (negate != 0):
            ballot |= 1 << lane
    if mode == 0:
        result = np.uint64(1 if ballot == active else 0)
    elif mode == 1:
        result = np.uint64(1 if ballot else 0)
    elif mode == 2:
        result = np.uint64(1 if ballot == active or ballot == 0 else 0)
    else:
        result = np.uint64(ballot)
    for lane in range(LANES):
        if (active >> lane) & 1:
            r[at.operands(m)[o], lane] = result


@inner
def elect(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """elect.sync: operands d (or -1), p. The lowest active lane is elected."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    leader = 0
    while not (active >> leader) & 1:
        leader += 1
    for lane in range(LANES):
        if (active >> lane) & 1:
            if at.operands(m)[o] >= 0:
                at.registers(m)[warp, at.operands(m)[o], lane] = np.uint64(leader)
            at.registers(m)[warp, at.operands(m)[o + 1], lane] = np.uint64(1 if lane == leader else 0)


@inner
def redux(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """redux.sync on 32-bit integers: operands d, a."""
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    op, is_signed = at.code(m)[pc, state.C_P], at.code(m)[pc, state.C_P + 1]
    first = True
    total = np.uint64(0)
    low = np.uint64(0xFFFFFFFF)
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        x = at.registers(m)[warp, at.operands(m)[o + 1], lane] & low
        if first:
            total = x
            first = False
        elif op == 0:
            total = (total + x) & low
        elif op == 3:
            total &= x
        elif op == 4:
            total |= x
        elif op == 5:
            total ^= x
        else:
            less = signed(x, 32) < signed(total, 32) if is_signed else x < total
            if less == (op == 1):
                total = x
    for lane in range(LANES):
        if (active >> lane) & 1:
            at.registers(m)[warp, at.operands(m)[o], lane] = total


@inner
def matrix_multiply(m: Any, pc: Int, warp: Int) -> None:
    """mma.sync.m16n8k16: 4 registers d, 4 a, 2 b, 4 c; p0 the format of a and b.

    Products are exact and summed in float64, then rounded once; tensor cores keep fewer bits between additions.
    """
    apart()
    o = at.code(m)[pc, state.C_OPERANDS]
    kind = at.code(m)[pc, state.C_P]
    r = at.registers(m)[warp]
    a = np.zeros((16, 16), np.float64)
    b = np.zeros((16, 8), np.float64)
    low = np.uint64(0xFFFF)
    for lane in range(LANES):
        group, thread = lane >> 2, lane & 3
        for k in range(4):
            word = r[at.operands(m)[o + 4 + k], lane]
            row = group + 8 * (k & 1)
            column = 2 * thread + 8 * (k >> 1)
            a[row, column] = decode(word & low, kind)
            a[row, column + 1] = decode((word >> np.uint64(16)) & low, kind)
        for k in range(2):
            word = r[at.operands(m)[o + 8 + k], lane]
            row = 2 * thread + 8 * k
            b[row, group] = decode(word & low, kind)
            b[row + 1, group] = decode((word >> np.uint64(16)) & low, kind)
    result = np.empty((4, LANES), np.uint64)
    for lane in range(LANES):
        group, thread = lane >> 2, lane & 3
        for k in range(4):
            row, column = group + 8 * (k >> 1), 2 * thread + (k & 1)
            total = np.float64(f32(r[at.operands(m)[o + 10 + k], lane]))
            for q in range(16):
                total += a[row, q] * b[q, column]
            result[k, lane] = bits_of(np.float32(total))
    for k in range(4):
        for lane in range(LANES):
            r[at.operands(m)[o + k], lane] = result[k, lane]
