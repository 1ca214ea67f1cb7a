"""The work of a routed-expert stage: one entry for each expert that has tokens, with a list of these."""

from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import get_i32, get_i64, out_of_line, put_i64

ENTRY = 24  # bytes: expert, first place in the order, slots


@inner
def group(ids: int, ids_stride: int, rows: int, top_k: int, experts: int, scratch: int) -> int:
    """Sorts slots by expert (stable: by row, then slot) and lists the entries; returns how many.

    Scratch: ends of each expert [experts + 1], slot order [slots], entries [slots].
    """
    out_of_line()
    order = scratch + 8 * (experts + 1)
    entries = order + 8 * rows * top_k
    for e in range(experts + 1):
        put_i64(scratch + e * 8, 0)
    for row in range(rows):
        for slot in range(top_k):
            at = scratch + (get_i32(ids + row * ids_stride + slot * 4) + 1) * 8
            put_i64(at, get_i64(at) + 1)
    count = 0
    for e in range(experts):
        begin = get_i64(scratch + e * 8)
        size = get_i64(scratch + (e + 1) * 8)
        put_i64(scratch + (e + 1) * 8, begin + size)
        if size > 0:
            put_i64(entries + count * ENTRY, e)
            put_i64(entries + count * ENTRY + 8, begin)
            put_i64(entries + count * ENTRY + 16, size)
            count += 1
    for row in range(rows):
        for slot in range(top_k):
            at = scratch + get_i32(ids + row * ids_stride + slot * 4) * 8
            place = get_i64(at)
            put_i64(order + place * 8, row * top_k + slot)
            put_i64(at, place + 1)
    return count


@inner
def cost(slots: int, bits: int) -> int:
    """Relative time of a group for `slots` tokens: MXFP4 tiles of two rows take 1.5 times as long as tiles of one; BF16
    is bound by memory for up to four rows."""
    if bits == 0:
        return 1 + (slots + 3) // 4
    return 3 * (slots // 2) + 2 * (slots % 2)


@inner
def weigh(entries: int, count: int, groups: int, bits: int) -> int:
    total = 0
    for e in range(count):
        total += groups * cost(get_i64(entries + e * ENTRY + 16), bits)
    return total
