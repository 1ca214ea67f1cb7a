"""The state of one KDA head: a token's update, updates from records, and what a cache keeps (spec 2.5.6, 5.6)."""

from typing import Any

from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import (
    broadcast_f32,
    get_f32,
    load_f32,
    multiply_add,
    multiply_f32,
    out_of_line,
    prefetch,
    put_f32,
    splat_f32,
    store_f32,
    sum_f32,
    zero_f32,
)
from stepkernel.cpu.vmath import load_as, round_bf16, round_if, store_as, store_bf16

_AHEAD = 4096


@inner
def recur(
    state: int, target: int, q: int, k: int, v: int, alpha: int, strength: float, o: int, errors: int, dim: int
) -> None:
    """One token: S <- S diag(alpha); e = beta (v - S k); S <- S + e k^T; o = S q, reading and writing S once;
    e goes to `errors`.

    o = (S diag(alpha)) q + e (k . q), so both products come from the decayed row before it is updated.
    """
    out_of_line()
    size = dim * 4
    overlap = zero_f32()
    for c in range(0, size, 32):
        overlap = multiply_add(load_f32(q + c), load_f32(k + c), overlap)
    both = sum_f32(overlap)
    for row in range(dim):
        source, out = state + row * size, target + row * size
        # The hardware starts anew at every head and never gets far ahead in one stream: 14 % of this stage.
        for c in range(0, size, 64):
            prefetch(source + _AHEAD + c)
        along_k, along_q = zero_f32(), zero_f32()
        for c in range(0, size, 32):
            decayed = multiply_f32(load_f32(source + c), load_f32(alpha + c))
            along_k = multiply_add(decayed, load_f32(k + c), along_k)
            along_q = multiply_add(decayed, load_f32(q + c), along_q)
        error = strength * (get_f32(v + row * 4) - sum_f32(along_k))
        put_f32(errors + row * 4, error)
        put_f32(o + row * 4, sum_f32(along_q) + error * both)
        step = splat_f32(error)
        for c in range(0, size, 32):
            decayed = multiply_f32(load_f32(source + c), load_f32(alpha + c))
            store_f32(out + c, multiply_add(step, load_f32(k + c), decayed))


@inner
def record_token(row: int, errors: int, k: int, alpha: int, size: int) -> None:
    """Keeps what `fold` needs of a token: e, k, alpha."""
    for c in range(0, size, 32):
        store_f32(row + c, load_f32(errors + c))
        store_f32(row + size + c, load_f32(k + c))
        store_f32(row + 2 * size + c, load_f32(alpha + c))


@inner
def fold(state: int, copy: int, recorded: int, row_bytes: int, count: Any, dim: int, wide: int) -> None:
    """Does to `state` what the first `count` recorded tokens did, in the same operations, and copies it as float32.

    wide: 1 for a float32 state, 0 for BF16.
    """
    out_of_line()
    size = dim * 4
    for row in range(dim):
        for c in range(0, dim, 8):
            value = load_as(state, row * dim + c, wide)
            for t in range(count):
                at = recorded + t * row_bytes
                decayed = multiply_f32(value, load_f32(at + 2 * size + c * 4))
                updated = multiply_add(broadcast_f32(at + row * 4), load_f32(at + size + c * 4), decayed)
                value = round_if(updated, 1 - wide)
            if count > 0:
                store_as(state, row * dim + c, value, wide)
            store_f32(copy + row * size + c * 4, value)


@inner
def keep(copy: int, state: int, dim: int) -> None:
    """Rounds a float32 copy to BF16, and stores it in `state` unless that is 0."""
    out_of_line()
    for at in range(0, dim * dim, 8):
        value = round_bf16(load_f32(copy + at * 4))
        store_f32(copy + at * 4, value)
        if state != 0:
            store_bf16(state + at * 2, value)
