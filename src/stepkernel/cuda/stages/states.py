"""Recurrent states of KDA as the cache keeps them: float32 or BF16, one for each token or recovered from records.

Four key columns of a value row at a time. A record of a token holds for each head what its update of the state was
made of: correction, key, decay, 128 float32 each (spec 5.6).
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import (
    load_float,
    load_floats,
    load_shared_floats,
    load_two_words,
    store_floats,
    store_words,
)
from stepkernel.cuda.dims import THREADS, WARPS, KdaDims
from stepkernel.cuda.values import floats, fused, pair
from stepkernel.cuda.walk import words

D = 128  # width of a head
VECTOR = 4 * D  # bytes


def load_state(address: Any, dims: KdaDims) -> list[Any]:
    """Four values of a state."""
    if not dims.bf16_states:
        return load_floats(address)
    return [value for word in load_two_words(address) for value in floats(word)]


def store_state(address: Any, values: list[Any], dims: KdaDims) -> None:
    if dims.bf16_states:
        store_words(address, [pair(values[0], values[1]), pair(values[2], values[3])])
    else:
        store_floats(address, values)


def kept(values: list[Any], dims: KdaDims) -> list[Any]:
    """What the next token starts from: the state as the cache would keep it."""
    if not dims.bf16_states:
        return values
    return [*floats(pair(values[0], values[1])), *floats(pair(values[2], values[3]))]


def updated(decayed: Any, correction: Any, key: Any, dims: KdaDims) -> Any:
    """A decayed value of a state after a token's correction: the same operation here and in `fold`."""
    return fused(correction, key, decayed) if dims.recovers else decayed + correction * key


@cute.jit
def recorded(slot: Int32, head: Int32, record: Int64, dims: cutlass.Constexpr[KdaDims]) -> Int64:
    """Where the first token of a head is recorded; the next ones follow `heads` records apart."""
    records, records_slot = words(record, dims, "records", "records_slot")
    return records + Int64(slot) * records_slot + Int64(head) * (3 * VECTOR)


@cute.jit
def fold(
    s: list[list[Any]], mine: Int64, count: Int32, corrections: Int64, at: Int64, dims: cutlass.Constexpr[KdaDims]
) -> list[list[Any]]:
    """The state after the first `count` recorded tokens, which goes into the cache too. s: this lane's columns of the
    value rows of a warp, 8 apart, which lie at `mine`; at: the first token's record; corrections: of the first row."""
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    for token in cutlass.range(count, unroll=1):
        ahead = Int64(token) * (dims.heads * 3 * VECTOR)
        place = at + ahead
        key = load_floats(place + VECTOR + Int64(lane * 16))
        decay = load_floats(place + 2 * VECTOR + Int64(lane * 16))
        for i in cutlass.range_constexpr(len(s)):
            correction = load_float(corrections + ahead + i * (WARPS * 4))
            changed = []
            for n in cutlass.range_constexpr(4):
                changed.append(updated(s[i][n] * decay[n], correction, key[n], dims))
            changed = kept(changed, dims)
            for n in cutlass.range_constexpr(4):
                s[i][n] = changed[n]
    if count > 0:
        for i in cutlass.range_constexpr(len(s)):
            store_state(mine + i * (WARPS * D * dims.state_bytes), s[i], dims)
    return s


@cute.jit
def record_keys(slot: Int32, head: Int32, keys: Int32, record: Int64, dims: cutlass.Constexpr[KdaDims]) -> None:
    """Keys and decays of all queries into the records, when nobody reads the last step's any more. keys: shared address
    of the keys [queries, 128], which the decays follow."""
    tid, _, _ = cute.arch.thread_idx()
    at = recorded(slot, head, record, dims)
    for index in cutlass.range(tid, dims.queries * 64, THREADS, unroll=1):
        query, which, part = index // 64, index // 32 % 2, index % 32 * 16
        values = load_shared_floats(keys + (which * dims.queries + query) * VECTOR + part)
        target = at + Int64(query) * (dims.heads * 3 * VECTOR) + Int64((1 + which) * VECTOR + part)
        store_floats(target, values)
