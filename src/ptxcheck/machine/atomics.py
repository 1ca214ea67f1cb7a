"""Atomic operations of a warp."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.access import place, read, strength, watch, write
from ptxcheck.machine.bits import BF16, F16, decode, encode, f32, f32_bits, mask_of, signed
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inner
from ptxcheck.machine.races import acquire, release

LANES = 32


@inner
def combine(old: Any, value: Any, comparand: Any, op: Int, kind: Int, width: Int) -> Any:
    """New contents of a location after an atomic operation."""
    apart()
    m = mask_of(8 * width)
    if op == codes.A_EXCH:
        return value & m
    if op == codes.A_CAS:
        return value & m if old == comparand & m else old
    if op == codes.A_AND:
        return old & value
    if op == codes.A_OR:
        return old | (value & m)
    if op == codes.A_XOR:
        return old ^ (value & m)
    if op == codes.A_INC:
        return np.uint64(0) if old >= value & m else old + np.uint64(1)
    if op == codes.A_DEC:
        return value & m if old == 0 or old > value & m else old - np.uint64(1)
    if kind == codes.T_F32:
        return f32_bits(f32(old) + f32(value))
    if kind == codes.T_BF16X2 or kind == codes.T_F16X2:
        form = BF16 if kind == codes.T_BF16X2 else F16
        result = np.uint64(0)
        for k in range(2):
            shift = np.uint64(16 * k)
            low = np.uint64(0xFFFF)
            total = decode((old >> shift) & low, form) + decode((value >> shift) & low, form)
            result |= encode(total, form, False) << shift
        return result
    if op == codes.A_ADD:
        return (old + value) & m
    if kind == codes.T_SIGNED:
        s, t = signed(old, 8 * width), signed(value, 8 * width)
        return np.uint64(min(s, t) if op == codes.A_MIN else max(s, t)) & m
    return min(old, value & m) if op == codes.A_MIN else max(old, value & m)


@inner
def atomic(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """atom, red: p0 width, p2 space, p3 order, p4 scope, p5 offset, p6 = type << 8 | operation."""
    apart()
    row = at.code(m)[pc]
    o = row[state.C_OPERANDS]
    p = state.C_P
    width, count, space = row[p], row[p + 1], row[p + 2]
    order, scope, displacement, flags = row[p + 3], row[p + 4], row[p + 5], row[p + 6]
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(displacement)
        spot = place(m, pc, warp, lane, address, space, width * count, width * count)
        if spot < 0:
            return
        if spot >= at.scalars(m)[state.CONSTANT_START]:
            report(m, state.F_WRITE_CONSTANT, pc, warp, lane, np.int64(address), 0)
            return
        for i in range(width * count):
            if at.status(m)[spot + i] != state.SET:
                report(m, state.F_UNSET_READ, pc, warp, lane, np.int64(address), 0)
                break
        if at.scalars(m)[state.CHECK]:
            acquire(m, warp, spot, order, scope)
            release(m, warp, spot, order, scope, True)
            # It reads what it replaces, so it comes after it.
            watch(m, pc, warp, lane, spot, width * count, False, strength(order, scope), False)
            watch(m, pc, warp, lane, spot, width * count, True, strength(order, scope), False)
        comparand = np.uint64(0)
        if at.operands(m)[o + 2] >= 0:
            comparand = at.registers(m)[warp, at.operands(m)[o + 2], lane]
        for k in range(count):
            value = at.registers(m)[warp, at.operands(m)[o + 3 + k], lane]
            old = read(at.memory(m), spot + k * width, width)
            new = combine(old, value, comparand, flags & 255, flags >> 8, width)
            write(at.memory(m), spot + k * width, width, new)
            if at.operands(m)[o + 1] >= 0:
                at.registers(m)[warp, at.operands(m)[o + 1], lane] = old
            if new != old:
                at.scalars(m)[state.PROGRESS] += 1
