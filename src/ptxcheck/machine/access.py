"""Loads, stores and atomics of a warp: addresses, initialisation, races, sectors and bank conflicts."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.bits import BF16, F16, decode, encode, f32, f32_bits, mask_of, signed
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inner
from ptxcheck.machine.races import acquire, release, touch

LANES = 32


@inner
def flat_offset(scalars: Any, address: Any, space: Int, cta: Int) -> Int:
    """Offset in `memory` of a PTX address, or -1. Bounds within the areas are `status`'s business."""
    a = np.int64(address)
    if space == codes.SHARED or (
        space == codes.GENERIC and state.SHARED_BASE <= a < state.SHARED_BASE + state.SHARED_WINDOW
    ):
        if space == codes.GENERIC:
            a -= state.SHARED_BASE
        if a < 0 or a >= scalars[state.SHARED_BYTES]:
            return -1
        return int(scalars[state.SHARED_START] + cta * scalars[state.SHARED_STRIDE] + a)
    if a >= state.GLOBAL_BASE:
        a -= state.GLOBAL_BASE
        return int(a) if a < scalars[state.WRITABLE] else -1
    a -= state.CONSTANT_BASE
    if a < 0 or a >= scalars[state.CONSTANT_BYTES]:
        return -1
    return int(scalars[state.CONSTANT_START] + a)


@inner
def place(m: Any, pc: Int, warp: Int, lane: Int, address: Any, space: Int, size: Int, align: Int) -> Int:
    """Flat offset of a checked access of `size` bytes, or -1 after a fatal finding."""
    apart()
    cta = warp // at.scalars(m)[state.WARPS_PER_CTA]
    offset = flat_offset(at.scalars(m), address, space, cta)
    if offset < 0 or offset + size > len(at.memory(m)):
        report(m, state.F_OUT_OF_BOUNDS, pc, warp, lane, np.int64(address), size)
        return -1
    for i in range(size):
        if at.status(m)[offset + i] == state.OUTSIDE:
            report(m, state.F_OUT_OF_BOUNDS, pc, warp, lane, np.int64(address), size)
            return -1
    if np.int64(address) & (align - 1):
        report(m, state.F_MISALIGNED, pc, warp, lane, np.int64(address), align)
        return -1
    return offset


@inner
def read(memory: Any, offset: Int, width: Int) -> Any:
    value = np.uint64(0)
    for i in range(width):
        value |= np.uint64(memory[offset + i]) << np.uint64(8 * i)
    return value


@inner
def write(memory: Any, offset: Int, width: Int, value: Any) -> None:
    for i in range(width):
        memory[offset + i] = np.uint8((value >> np.uint64(8 * i)) & np.uint64(255))


@inner
def watch(
    m: Any, pc: Int, warp: Int, lane: Int, offset: Int, size: Int, write_: bool, strong: bool, benign: bool
) -> None:
    """Race check of one lane's access; constant memory has no shadow."""
    apart()
    if offset >= at.scalars(m)[state.CONSTANT_START]:
        return
    shift = at.scalars(m)[state.CELL_SHIFT]
    touch(
        m,
        offset >> shift,
        (offset + size - 1) >> shift,
        warp,
        0,
        warp,
        lane,
        at.warps(m)[warp, state.W_EPOCH],
        write_,
        strong,
        benign,
        pc,
    )


@inner
def count_transfers(m: Any, pc: Int, active: Int, offsets: Any, size: Int, space: Int) -> None:
    """Sectors of 32 bytes that a global access touches, or passes that a shared one needs over 32 banks of 4 bytes.

    A shared access of 8 or 16 bytes per lane is served by half or quarter warps. Ideal: the sectors of the bytes asked
    for, or one pass per such group.
    """
    apart()
    row = at.counters(m)[pc]
    row[state.N_WARPS] += 1
    if space == codes.GLOBAL:
        total = 0
        useful = 0
        for i in range(LANES):
            if not (active >> i) & 1:
                continue
            fresh = True
            for j in range(i):
                if (active >> j) & 1 and offsets[j] == offsets[i]:
                    fresh = False
                    break
            if fresh:
                useful += size
            for sector in range(offsets[i] >> 5, ((offsets[i] + size - 1) >> 5) + 1):
                known = False
                for j in range(i - 1, -1, -1):
                    if (active >> j) & 1 and offsets[j] >> 5 <= sector <= (offsets[j] + size - 1) >> 5:
                        known = True
                        break
                if not known:
                    total += 1
        row[state.N_TRANSFERS] += total
        row[state.N_IDEAL] += (useful + 31) // 32
        return
    words = max(size // 4, 1)
    group = LANES // words
    for start in range(0, LANES, group):
        worst = 0
        anything = False
        for i in range(start, start + group):
            if not (active >> i) & 1:
                continue
            anything = True
            # Distinct words of this lane's banks among the lanes so far.
            for k in range(words):
                word = (offsets[i] >> 2) + k
                depth = 1
                known = False
                for j in range(start, i):
                    if not (active >> j) & 1:
                        continue
                    for q in range(words):
                        other = (offsets[j] >> 2) + q
                        if other == word:
                            known = True
                        elif (other & 31) == (word & 31):
                            depth += 1
                if not known:
                    worst = max(worst, depth)
        row[state.N_TRANSFERS] += worst
        row[state.N_IDEAL] += 1 if anything else 0


@inner
def load(m: Any, pc: Int, warp: Int, active: Int, offsets: Any) -> None:
    """ld: p0 width, p1 count, p2 space, p3 order, p4 scope, p5 offset, p6 = register width << 8 | signed."""
    apart()
    row = at.code(m)[pc]
    o = row[state.C_OPERANDS]
    p = state.C_P
    width, count, space = row[p], row[p + 1], row[p + 2]
    order, scope, displacement, flags = row[p + 3], row[p + 4], row[p + 5], row[p + 6]
    size = width * count
    address_row = at.operands(m)[o]
    check = at.scalars(m)[state.CHECK] != 0
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, address_row, lane] + np.uint64(displacement)
        spot = place(m, pc, warp, lane, address, space, size, size)
        if spot < 0:
            return
        offsets[lane] = spot
        for i in range(size):
            if at.status(m)[spot + i] != state.SET:
                report(m, state.F_UNSET_READ, pc, warp, lane, np.int64(address), 0)
                break
        if check:
            if order != codes.WEAK:
                acquire(m, warp, spot, order, scope)
            watch(m, pc, warp, lane, spot, size, False, order != codes.WEAK, False)
        for k in range(count):
            target = at.operands(m)[o + 1 + k]
            if target >= 0:
                value = read(at.memory(m), spot + k * width, width)
                if flags & 1:
                    value = np.uint64(signed(value, 8 * width)) & mask_of(flags >> 8)
                at.registers(m)[warp, target, lane] = value
    if at.scalars(m)[state.COUNT]:
        where = (
            codes.SHARED
            if at.scalars(m)[state.SHARED_START] <= spot < at.scalars(m)[state.CONSTANT_START]
            else codes.GLOBAL
        )
        count_transfers(m, pc, active, offsets, size, where)


@inner
def store(m: Any, pc: Int, warp: Int, active: Int, offsets: Any) -> None:
    """st: parameters as for `load`."""
    apart()
    row = at.code(m)[pc]
    o = row[state.C_OPERANDS]
    p = state.C_P
    width, count, space = row[p], row[p + 1], row[p + 2]
    order, scope, displacement = row[p + 3], row[p + 4], row[p + 5]
    size = width * count
    check = at.scalars(m)[state.CHECK] != 0
    changed = False
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(displacement)
        spot = place(m, pc, warp, lane, address, space, size, size)
        if spot < 0:
            return
        if spot >= at.scalars(m)[state.CONSTANT_START]:
            report(m, state.F_WRITE_CONSTANT, pc, warp, lane, np.int64(address), 0)
            return
        offsets[lane] = spot
        same = True
        for k in range(count):
            value = at.registers(m)[warp, at.operands(m)[o + 1 + k], lane] & mask_of(8 * width)
            if read(at.memory(m), spot + k * width, width) != value:
                same = False
        for i in range(size):
            if at.status(m)[spot + i] != state.SET:
                same = False
                at.status(m)[spot + i] = state.SET
        if check:
            if order != codes.WEAK:
                release(m, warp, spot, order, scope, False)
            watch(m, pc, warp, lane, spot, size, True, order != codes.WEAK, same)
        if not same:
            changed = True
            for k in range(count):
                write(at.memory(m), spot + k * width, width, at.registers(m)[warp, at.operands(m)[o + 1 + k], lane])
    if changed:
        at.scalars(m)[state.PROGRESS] += 1
    if at.scalars(m)[state.COUNT]:
        where = codes.SHARED if spot >= at.scalars(m)[state.SHARED_START] else codes.GLOBAL
        count_transfers(m, pc, active, offsets, size, where)


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
            watch(m, pc, warp, lane, spot, width * count, True, True, False)
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
