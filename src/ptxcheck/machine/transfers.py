"""What an access moves: sectors of global memory, passes over the banks of shared memory."""

from typing import Any

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.jit import Int, apart, inner

LANES = 32


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
