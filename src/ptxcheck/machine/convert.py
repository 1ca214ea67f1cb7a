"""Conversions on 32 lanes."""

from typing import Any

import numpy as np

from ptxcheck.machine import codes
from ptxcheck.machine.bits import (
    BF16,
    E2M1,
    F16,
    bf16_bits,
    decode,
    encode,
    f32,
    f32_bits,
    f64,
    f64_bits,
    mask_of,
    signed,
)
from ptxcheck.machine.floating import bits_of
from ptxcheck.machine.jit import Int, apart, inner

LANES = 32


@inner
def rounded(x: float, mode: Int) -> float:
    if mode == 0:
        return np.rint(x)
    if mode == 1:
        return np.trunc(x)
    return np.floor(x) if mode == 2 else np.ceil(x)


@inner
def to_integer(x: float, bits: Int, is_signed: Int, mode: Int) -> Any:
    """Rounded, then clamped to the range of the target; NaN gives 0."""
    apart()
    if x != x:
        return np.uint64(0)
    x = rounded(x, mode)
    if is_signed:
        limit = np.ldexp(1.0, bits - 1)
        if x >= limit:
            return mask_of(bits) >> np.uint64(1)
        if x <= -limit:
            return np.uint64(1) << np.uint64(bits - 1)
        return np.uint64(np.int64(x)) & mask_of(bits)
    if x <= 0:
        return np.uint64(0)
    if x >= np.ldexp(1.0, bits):
        return mask_of(bits)
    if x >= 9223372036854775808.0:
        return np.uint64(np.int64(x - 9223372036854775808.0)) | (np.uint64(1) << np.uint64(63))
    return np.uint64(np.int64(x))


@inner
def narrow(x: Any, kind: Int, saturate: Int) -> Any:
    if kind == BF16 and not saturate:
        return bf16_bits(x)
    return encode(np.float64(x), kind, saturate != 0)


@inner
def convert(op: Int, out: Any, r: Any, a: Int, b: Int, p0: Int, p1: Int, p2: Int) -> None:
    """Executes conversion `op` on rows a, b of `r` uint64 [rows, 32] into `out` uint64 [32]."""
    apart()
    half = np.uint64(16)
    low = np.uint64(0xFFFF)
    if op == codes.TO_F32 and p0 == BF16:
        for i in range(LANES):
            out[i] = bits_of(f32((r[a, i] & low) << half))
    elif op == codes.TO_F32:
        for i in range(LANES):
            out[i] = bits_of(np.float32(decode(r[a, i] & low, p0)))
    elif op == codes.FROM_F32:
        for i in range(LANES):
            out[i] = narrow(f32(r[a, i]), p0, p1)
    elif op == codes.PAIR_FROM_F32:
        shift = half if p0 >= F16 else np.uint64(4 if p0 == E2M1 else 8)
        for i in range(LANES):
            out[i] = (narrow(f32(r[a, i]), p0, p1) << shift) | narrow(f32(r[b, i]), p0, p1)
    elif op == codes.PAIR_TO_F16:
        shift = np.uint64(4 if p0 == E2M1 else 8)
        one = np.uint64(15 if p0 == E2M1 else 255)
        for i in range(LANES):
            first = encode(decode(r[a, i] & one, p0), F16, False)
            second = encode(decode((r[a, i] >> shift) & one, p0), F16, False)
            out[i] = first | (second << half)
    elif op == codes.F32_FROM_INT:
        for i in range(LANES):
            if p1:
                out[i] = f32_bits(np.float32(signed(r[a, i], p0)))
            else:
                out[i] = f32_bits(np.float32(r[a, i] & mask_of(p0)))
    elif op == codes.F64_FROM_INT:
        for i in range(LANES):
            if p1:
                out[i] = f64_bits(np.float64(signed(r[a, i], p0)))
            else:
                out[i] = f64_bits(np.float64(r[a, i] & mask_of(p0)))
    elif op == codes.INT_FROM_F32:
        for i in range(LANES):
            out[i] = to_integer(np.float64(f32(r[a, i])), p0, p1, p2)
    elif op == codes.INT_FROM_F64:
        for i in range(LANES):
            out[i] = to_integer(f64(r[a, i]), p0, p1, p2)
    elif op == codes.F32_ROUND:
        for i in range(LANES):
            out[i] = bits_of(np.float32(rounded(np.float64(f32(r[a, i])), p2)))
    elif op == codes.F64_FROM_F32:
        for i in range(LANES):
            out[i] = f64_bits(np.float64(f32(r[a, i])))
    elif op == codes.F32_FROM_F64:
        for i in range(LANES):
            out[i] = bits_of(np.float32(f64(r[a, i])))
    elif op == codes.BF16_TRUNCATE:
        for i in range(LANES):
            x = f32(r[a, i])
            out[i] = np.uint64(0x7FFF) if x != x else f32_bits(x) >> half
