"""What ranks have posted into the own mailbox (`exchange`), taken chunk by chunk."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import poll_words, post_words, ptx, store_words
from stepkernel.cuda.dims import THREADS
from stepkernel.cuda.stages.mailbox import await_rank, lowest, opened
from stepkernel.cuda.values import floats, pair, quotient, remainder
from stepkernel.cuda.walk import step_words

AT_ONCE = 8  # ranks whose words a thread asks for together


def as_float(word: Int32) -> Float32:
    return ptx("mov.b32 <<$w0>>, <<$r0>>;", [Float32], word)


@cute.jit
def take_chunk(
    at: Int64,
    target: Int64,
    width: Int64,
    failed: Int32,
    step: Int64,
    sync: Int64,
    patience: cutlass.Constexpr[int],
    mode: cutlass.Constexpr[str],
    ranks: cutlass.Constexpr[int],
    wide: cutlass.Constexpr[bool],
) -> Int32:
    """16 bytes at `at` of the own mailbox and at the same place of all ranks' slots: their sum in BF16, of float32
    (`wide`) or BF16 values, to `target`; or each for itself, `width` bytes from a rank to the next. 1 if the group has
    failed; then nothing is waited for."""
    (slot_bytes,) = step_words(step, "slot_bytes")
    sums = [Float32(0.0)] * (4 if wide else 8)
    for first in cutlass.range_constexpr(0, ranks, AT_ONCE):
        count = min(AT_ONCE, ranks - first)
        found = []
        for k in cutlass.range_constexpr(count):
            found += poll_words(at + (first + k) * slot_bytes)
        if lowest(found) == 0 and failed == 0:
            for k in cutlass.range(count, unroll=1):
                other = first + k
                if failed == 0:
                    here = at + Int64(other) * slot_bytes
                    failed = await_rank(here, Int64(0), sync, step, other, patience, ranks, True)
            found = []
            for k in cutlass.range_constexpr(count):
                found += poll_words(at + (first + k) * slot_bytes)
        for k in cutlass.range_constexpr(count):
            post_words(at + (first + k) * slot_bytes, [Int32(0)] * 4)
            values = opened(found[4 * k : 4 * k + 4])
            if cutlass.const_expr(mode != "reduce"):
                store_words(target + (first + k) * width, values)
            elif cutlass.const_expr(wide):
                for i in cutlass.range_constexpr(4):
                    sums[i] = sums[i] + as_float(values[i])
            else:
                for i in cutlass.range_constexpr(4):
                    low, high = floats(values[i])
                    sums[2 * i] = sums[2 * i] + low
                    sums[2 * i + 1] = sums[2 * i + 1] + high
    if cutlass.const_expr(mode == "reduce"):
        store_words(target, [pair(sums[2 * i], sums[2 * i + 1]) for i in range(len(sums) // 2)])
    return failed


@cute.jit
def take_parts(
    start: Int32,
    last: Int32,
    at: Int64,
    out: Int64,
    width: Int64,
    step: Int64,
    sync: Int64,
    patience: cutlass.Constexpr[int],
    ranks: cutlass.Constexpr[int],
) -> Int32:
    """All ranks' parts of one row, each `width` bytes at `at` of their slots, side by side to `out`: a thread takes 16
    bytes of a rank, those of number `start` and every 256 further, up to `last`. 1 if the group has failed."""
    (slot_bytes,) = step_words(step, "slot_bytes")
    chunks = quotient(Int32(width), 16)
    failed = Int32(0)
    for index in cutlass.range(start, last, THREADS, unroll=1):
        rank = quotient(index, chunks)
        column = Int64(remainder(index, chunks)) * 16
        here = at + Int64(rank) * slot_bytes + column
        found = poll_words(here)
        if lowest(found) == 0 and failed == 0:
            failed = await_rank(here, Int64(0), sync, step, rank, patience, ranks, True)
            found = poll_words(here)
        post_words(here, [Int32(0)] * 4)
        store_words(out + Int64(rank) * width + column, opened(found))
    return failed
