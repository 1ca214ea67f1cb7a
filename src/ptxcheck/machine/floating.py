"""Floating-point operations on 32 lanes.

Approximate instructions (ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh) are computed in float64 and rounded once: inside
the ISA's error bounds, but not bit-equal to any GPU.
"""

import math
from typing import Any

import numpy as np

from ptxcheck.machine import codes
from ptxcheck.machine.bits import decode, encode, f32, f32_bits, f64, f64_bits, fma32, fma64
from ptxcheck.machine.jit import Int, apart, inline, inner

LANES = 32
SMALLEST_NORMAL = np.float32(1.1754943508222875e-38)
CANONICAL = np.uint64(0x7FFFFFFF)


@inline
def flush(x: Any) -> Any:
    """Subnormal float32 to zero of the same sign."""
    return np.float32(math.copysign(0.0, x)) if abs(x) < SMALLEST_NORMAL else x


@inline
def bits_of(x: Any) -> Any:
    """float32 bits; every NaN is the canonical one of the ISA."""
    return CANONICAL if x != x else f32_bits(x)


@inner
def directed_fma(a: Any, b: Any, c: Any, rounding: Int) -> Any:
    """a b + c rounded once: 1 towards zero, 2 down, 3 up. The product is exact in float64, the sum's error known."""
    apart()
    # Compiled, `float` of a float32 is one.
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    nearest = np.float32(total)
    if not abs(total) < 1e300:  # infinity or NaN
        return nearest
    difference = (np.float64(nearest) - total) - error  # nearest minus the exact value
    if difference > 0 and (rounding == 2 or (rounding == 1 and nearest > 0)):
        return np.nextafter(nearest, np.float32(-np.inf))
    if difference < 0 and (rounding == 3 or (rounding == 1 and nearest < 0)):
        return np.nextafter(nearest, np.float32(np.inf))
    return nearest


@inner
def smaller(a: Any, b: Any, propagate: Int) -> Any:
    if a != a:
        return a if propagate else b
    if b != b:
        return b if propagate else a
    if a == b:  # -0 is below +0
        return a if math.copysign(1.0, a) < 0 else b
    return a if a < b else b


@inner
def unary(op: Int, x: Any) -> Any:
    """x and the result are float64; errors give infinity or NaN."""
    apart()
    if op == codes.F32_EX2:
        return np.exp2(x)
    if op == codes.F32_LG2:
        return np.log2(x)
    if op == codes.F32_RCP:
        return np.float64(1.0) / x
    if op == codes.F32_RSQRT:
        return np.float64(1.0) / np.sqrt(x)
    if op == codes.F32_SQRT:
        return np.sqrt(x)
    if op == codes.F32_SIN:
        return np.sin(x)
    if op == codes.F32_COS:
        return np.cos(x)
    return np.tanh(x)


@inner
def floating(op: Int, out: Any, r: Any, a: Int, b: Int, c: Int, p0: Int, p1: Int, p2: Int) -> None:
    """Executes `op` on rows a, b, c of `r` uint64 [rows, 32] into `out` uint64 [32]; p2 = 1 flushes subnormals."""
    apart()
    if op == codes.F32_FMA and p0 == 0 and p2 == 0:
        for i in range(LANES):
            out[i] = bits_of(fma32(f32(r[a, i]), f32(r[b, i]), f32(r[c, i])))
    elif op == codes.F32_ADD and p2 == 0:
        for i in range(LANES):
            out[i] = bits_of(f32(r[a, i]) + f32(r[b, i]))
    elif op == codes.F32_SUB and p2 == 0:
        for i in range(LANES):
            out[i] = bits_of(f32(r[a, i]) - f32(r[b, i]))
    elif op == codes.F32_MUL and p2 == 0:
        for i in range(LANES):
            out[i] = bits_of(f32(r[a, i]) * f32(r[b, i]))
    elif op <= codes.F32_SATURATE:
        for i in range(LANES):
            out[i] = single(op, f32(r[a, i]), f32(r[b, i]), f32(r[c, i]), p0, p1, p2)
    elif op <= codes.F64_COMPARE:
        for i in range(LANES):
            out[i] = double(op, f64(r[a, i]), f64(r[b, i]), f64(r[c, i]), p1)
    elif op <= codes.F32X2_FMA:
        high = np.uint64(32)
        for i in range(LANES):
            low_part = packed32(op, f32(r[a, i]), f32(r[b, i]), f32(r[c, i]))
            high_part = packed32(op, f32(r[a, i] >> high), f32(r[b, i] >> high), f32(r[c, i] >> high))
            out[i] = low_part | (high_part << high)
    elif op <= codes.SMALL_COMPARE:
        for i in range(LANES):
            out[i] = small(op, r[a, i], r[b, i], r[c, i], p0, p1)
    else:
        for i in range(LANES):
            x = np.float32(decode(r[a, i] & np.uint64(0xFFFF), p0))
            if op == codes.MIXED_ADD:
                out[i] = bits_of(x + f32(r[b, i]))
            elif op == codes.MIXED_SUB:
                out[i] = bits_of(x - f32(r[b, i]))
            else:
                out[i] = bits_of(fma32(x, np.float32(decode(r[b, i] & np.uint64(0xFFFF), p0)), f32(r[c, i])))


@inner
def single(op: Int, x: Any, y: Any, z: Any, p0: Int, p1: Int, p2: Int) -> Any:
    apart()
    if p2:
        x, y, z = flush(x), flush(y), flush(z)
    if op == codes.F32_COMPARE:
        found = (1 if x < y else 0) | (2 if x == y else 0) | (4 if x > y else 0)
        if x != x or y != y:
            found = 8
        return np.uint64(1) if found & p1 else np.uint64(0)
    if op == codes.F32_ADD:
        result = x + y
    elif op == codes.F32_SUB:
        result = x - y
    elif op == codes.F32_MUL:
        result = x * y
    elif op == codes.F32_FMA:
        result = fma32(x, y, z) if p0 == 0 else directed_fma(x, y, z, p0)
    elif op == codes.F32_DIV:
        result = x / y
    elif op == codes.F32_MIN:
        result = smaller(x, y, p0)
    elif op == codes.F32_MAX:
        result = -smaller(-x, -y, p0)
    elif op == codes.F32_SATURATE:
        result = np.float32(0) if not x > 0 else min(x, np.float32(1))
    else:
        result = np.float32(unary(op, np.float64(x)))
    return bits_of(flush(result) if p2 else result)


@inner
def double(op: Int, x: float, y: float, z: float, p1: Int) -> Any:
    apart()
    if op == codes.F64_COMPARE:
        found = (1 if x < y else 0) | (2 if x == y else 0) | (4 if x > y else 0)
        if x != x or y != y:
            found = 8
        return np.uint64(1) if found & p1 else np.uint64(0)
    if op == codes.F64_ADD:
        return f64_bits(x + y)
    if op == codes.F64_SUB:
        return f64_bits(x - y)
    if op == codes.F64_MUL:
        return f64_bits(x * y)
    if op == codes.F64_FMA:
        return f64_bits(fma64(x, y, z))
    return f64_bits(x / y)


@inner
def packed32(op: Int, x: Any, y: Any, z: Any) -> Any:
    if op == codes.F32X2_ADD:
        return bits_of(x + y)
    if op == codes.F32X2_MUL:
        return bits_of(x * y)
    return bits_of(fma32(x, y, z))


@inner
def small(op: Int, x: Any, y: Any, z: Any, kind: Int, count: Int) -> Any:
    """F16 and BF16, one or two packed values; each result is rounded once."""
    apart()
    low = np.uint64(0xFFFF)
    if op == codes.SMALL_COMPARE:
        s, t = decode(x & low, kind), decode(y & low, kind)
        found = (1 if s < t else 0) | (2 if s == t else 0) | (4 if s > t else 0)
        if s != s or t != t:
            found = 8
        return np.uint64(1) if found & count else np.uint64(0)
    result = np.uint64(0)
    for k in range(count):
        shift = np.uint64(16 * k)
        s, t = decode((x >> shift) & low, kind), decode((y >> shift) & low, kind)
        if op == codes.SMALL_ADD:
            value = s + t
        elif op == codes.SMALL_SUB:
            value = s - t
        elif op == codes.SMALL_MUL:
            value = s * t
        elif op == codes.SMALL_FMA:
            value = s * t + decode((z >> shift) & low, kind)
        elif op == codes.SMALL_MIN:
            value = smaller(s, t, 0)
        else:
            value = -smaller(-s, -t, 0)
        result |= encode(value, kind, False) << shift
    return result
