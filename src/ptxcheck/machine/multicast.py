"""Stores to a multicast address: one store to the same place of several allocations."""

from typing import Any

import numpy as np

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.access import LANES, place, put
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inner


@inner
def store_all(m: Any, pc: Int, warp: Int, active: Int) -> None:
    """multimem.st: parameters as for `load`; the address belongs to a row of `multicast`."""
    apart()
    row = at.code(m)[pc]
    o = row[state.C_OPERANDS]
    p = state.C_P
    size = row[p] * row[p + 1]
    for lane in range(LANES):
        if not (active >> lane) & 1:
            continue
        address = np.int64(at.registers(m)[warp, at.operands(m)[o], lane] + np.uint64(row[p + 5]))
        found = -1
        for k in range(len(at.multicast(m))):
            start = address - at.multicast(m)[k, state.R_ADDRESS]
            if start >= 0 and start + size <= at.multicast(m)[k, state.R_BYTES]:
                found = k
        if found < 0:
            report(m, state.F_NO_MULTICAST, pc, warp, lane, address, size)
            return
        start = address - at.multicast(m)[found, state.R_ADDRESS]
        for k in range(state.R_FIRST, at.multicast(m).shape[1]):
            target = at.multicast(m)[found, k]
            if target == 0:
                continue
            spot = place(m, pc, warp, lane, np.uint64(target + start), codes.GLOBAL, size, size)
            if spot < 0:
                return
            if put(m, pc, warp, lane, spot, o + 1):
                at.scalars(m)[state.PROGRESS] += 1
