"""Work that goes to whichever thread is free: a counter in each record, from which threads claim parts.

With fixed shares every barrier waits for the thread that was disturbed most, and a processor whose core has another
tenant runs 10-30 % slower for milliseconds at a time. The parts of a record get smaller towards its end, so that the
threads finish together. Who computes an output never changes its bits.
"""

import numpy as np

from stepkernel.cpu.atomics import fetch_add
from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import put_i32
from stepkernel.cpu.step import RECORD_BYTES, RECORD_HEADER

_COUNTER = RECORD_BYTES - 8  # the last word of a record, in a cache line that only its own arguments share


@inner
def reset(table: int, first: int, last: int) -> None:
    """Nothing of records first..last is claimed. No thread may be at work on them."""
    for index in range(first, last):
        put_i32(table + index * RECORD_BYTES + _COUNTER, np.int32(0))


@inner
def claim(record: int, count: int, threads: int, grain: int) -> tuple[int, int]:
    """The next part of units 0..count that nobody has: first and last + 1, or equal if nothing is left.

    `record` is the address of the arguments. A part is two thirds of an equal share of what is left, in whole grains,
    at least one; a single thread gets everything at once.
    """
    turn = int(fetch_add(record - RECORD_HEADER + _COUNTER, np.int32(1)))
    if threads == 1:
        return (0, count) if turn == 0 else (count, count)
    start, size = 0, _part(count, threads, grain)
    while turn > 0 and start < count:
        start += size
        size = _part(count - start, threads, grain)
        turn -= 1
    return min(start, count), min(start + size, count)


@inner
def _part(left: int, threads: int, grain: int) -> int:
    return max(1, left * 2 // (3 * threads * grain)) * grain
