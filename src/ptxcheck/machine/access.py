"""Loads and stores of a warp: addresses, initialisation, races."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.bits import mask_of, signed
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inner
from ptxcheck.machine.races import acquire, release, touch
from ptxcheck.machine.transfers import count_transfers

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
def mark(status: Any, start: Int, size: Int, value: Int) -> None:
    apart()
    for i in range(size):
        status[start + i] = value


@inner
def strength(order: Int, scope: Int) -> Int:
    """0 for a weak access, else its scope + 1."""
    return 0 if order == codes.WEAK else scope + 1


@inner
def watch(
    m: Any, pc: Int, warp: Int, lane: Int, offset: Int, size: Int, write_: bool, strong: Int, benign: bool
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
            watch(m, pc, warp, lane, spot, size, False, strength(order, scope), False)
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
def put(m: Any, pc: Int, warp: Int, lane: Int, spot: Int, row_start: Int) -> bool:
    """One lane's store to a checked place; the values are operands from `row_start` on. True if memory changed."""
    apart()
    row = at.code(m)[pc]
    p = state.C_P
    width, count, order, scope = row[p], row[p + 1], row[p + 3], row[p + 4]
    size = width * count
    same = True
    for k in range(count):
        value = at.registers(m)[warp, at.operands(m)[row_start + k], lane] & mask_of(8 * width)
        if read(at.memory(m), spot + k * width, width) != value:
            same = False
    for i in range(size):
        if at.status(m)[spot + i] != state.SET:
            same = False
            at.status(m)[spot + i] = state.SET
    if at.scalars(m)[state.CHECK]:
        if order != codes.WEAK:
            release(m, warp, spot, order, scope, False)
        watch(m, pc, warp, lane, spot, size, True, strength(order, scope), same)
    if not same:
        for k in range(count):
            write(at.memory(m), spot + k * width, width, at.registers(m)[warp, at.operands(m)[row_start + k], lane])
    return not same


@inner
def store(m: Any, pc: Int, warp: Int, active: Int, offsets: Any) -> None:
    """st: parameters as for `load`."""
    apart()
    row = at.code(m)[pc]
    o = row[state.C_OPERANDS]
    p = state.C_P
    size = row[p] * row[p + 1]
    changed = False
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(row[p + 5])
        spot = place(m, pc, warp, lane, address, row[p + 2], size, size)
        if spot < 0:
            return
        if spot >= at.scalars(m)[state.CONSTANT_START]:
            report(m, state.F_WRITE_CONSTANT, pc, warp, lane, np.int64(address), 0)
            return
        offsets[lane] = spot
        if put(m, pc, warp, lane, spot, o + 1):
            changed = True
    if changed:
        at.scalars(m)[state.PROGRESS] += 1
    if at.scalars(m)[state.COUNT]:
        where = codes.SHARED if spot >= at.scalars(m)[state.SHARED_START] else codes.GLOBAL
        count_transfers(m, pc, active, offsets, size, where)
