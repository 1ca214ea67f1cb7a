"""Integer, logic and selection operations on 32 lanes."""

from typing import Any

import numpy as np

from ptxcheck.machine import codes
from ptxcheck.machine.bits import mask_of, signed
from ptxcheck.machine.jit import Int, apart, inline, inner

LANES = 32


@inner
def high_product(a: Any, b: Any) -> Any:
    """Upper 64 bits of the product of two unsigned 64-bit numbers."""
    half = np.uint64(32)
    low = np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (other >> half)


@inner
def population(x: Any) -> Any:
    count = np.uint64(0)
    while x:
        x &= x - np.uint64(1)
        count += np.uint64(1)
    return count


@inner
def leading_zeros(x: Any, bits: Int) -> Any:
    count = np.uint64(bits)
    while x:
        x >>= np.uint64(1)
        count -= np.uint64(1)
    return count


@inner
def permute(a: Any, b: Any, selector: Any) -> Any:
    """prmt.b32, default mode."""
    both = (a & np.uint64(0xFFFFFFFF)) | (b << np.uint64(32))
    result = np.uint64(0)
    for i in range(4):
        choice = (selector >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (choice & np.uint64(7)))) & np.uint64(255)
        if choice & np.uint64(8):
            byte = np.uint64(255) if byte & np.uint64(128) else np.uint64(0)
        result |= byte << np.uint64(8 * i)
    return result


@inline
def compare(less: Any, equal: Any, greater: Any, accepted: Int) -> Any:
    found = (1 if less else 0) | (2 if equal else 0) | (4 if greater else 0)
    return np.uint64(1) if found & accepted else np.uint64(0)


@inner
def integer(op: Int, out: Any, r: Any, a: Int, b: Int, c: Int, p0: Int, p1: Int, p2: Int) -> None:
    """Executes `op` on rows a, b, c of the warp's registers `r` uint64 [rows, 32] into `out` uint64 [32]."""
    apart()
    m = mask_of(p0) if 0 < p0 <= 64 else np.uint64(0)
    n = np.uint64(max(p0, 1))
    if op == codes.MOV:
        for i in range(LANES):
            out[i] = r[a, i] & m
    elif op == codes.ADD:
        for i in range(LANES):
            out[i] = (r[a, i] + r[b, i]) & m
    elif op == codes.SUB:
        for i in range(LANES):
            out[i] = (r[a, i] - r[b, i]) & m
    elif op == codes.MUL:
        for i in range(LANES):
            out[i] = (r[a, i] * r[b, i]) & m
    elif op == codes.MAD:
        for i in range(LANES):
            out[i] = (r[a, i] * r[b, i] + r[c, i]) & m
    elif op == codes.AND:
        for i in range(LANES):
            out[i] = r[a, i] & r[b, i] & m
    elif op == codes.OR:
        for i in range(LANES):
            out[i] = (r[a, i] | r[b, i]) & m
    elif op == codes.XOR:
        for i in range(LANES):
            out[i] = (r[a, i] ^ r[b, i]) & m
    elif op == codes.NOT:
        for i in range(LANES):
            out[i] = ~r[a, i] & m
    elif op == codes.SHL:
        for i in range(LANES):
            s = r[b, i] & np.uint64(0xFFFFFFFF)
            out[i] = (r[a, i] << s) & m if s < n else np.uint64(0)
    elif op == codes.SHR:
        for i in range(LANES):
            s = r[b, i] & np.uint64(0xFFFFFFFF)
            out[i] = (r[a, i] & m) >> s if s < n else np.uint64(0)
    elif op == codes.SHR_SIGNED:
        for i in range(LANES):
            s = min(r[b, i] & np.uint64(0xFFFFFFFF), np.uint64(63))
            out[i] = np.uint64(signed(r[a, i], p0) >> np.int64(s)) & m
    elif op == codes.SELECT:
        for i in range(LANES):
            out[i] = (r[a, i] if r[c, i] else r[b, i]) & m
    elif op == codes.COMPARE:
        for i in range(LANES):
            x, y = r[a, i] & m, r[b, i] & m
            out[i] = compare(x < y, x == y, x > y, p1)
    elif op == codes.COMPARE_SIGNED:
        for i in range(LANES):
            s, t = signed(r[a, i], p0), signed(r[b, i], p0)
            out[i] = compare(s < t, s == t, s > t, p1)
    elif op == codes.MUL_SIGNED:
        m = mask_of(p1)
        for i in range(LANES):
            out[i] = np.uint64(signed(r[a, i], p0) * signed(r[b, i], p0)) & m
    elif op == codes.MAD_SIGNED:
        m = mask_of(p1)
        for i in range(LANES):
            out[i] = (np.uint64(signed(r[a, i], p0) * signed(r[b, i], p0)) + r[c, i]) & m
    elif op == codes.EXTEND:
        m = mask_of(p1)
        for i in range(LANES):
            out[i] = np.uint64(signed(r[a, i], p0)) & m
    elif op == codes.PACK:
        for i in range(LANES):
            out[i] = (r[a, i] & m) | (r[b, i] << n)
    elif op == codes.UNPACK:
        for i in range(LANES):
            out[i] = (r[a, i] >> np.uint64(p1)) & m
    else:
        rare(op, out, r, a, b, c, p0, p1, p2)


@inner
def rare(op: Int, out: Any, r: Any, a: Int, b: Int, c: Int, p0: Int, p1: Int, p2: Int) -> None:
    """The integer operations that are not in inner loops, lane by lane."""
    apart()
    m = mask_of(p0) if 0 < p0 <= 64 else np.uint64(0)
    for i in range(LANES):
        x, y, z = r[a, i] & m, r[b, i] & m, r[c, i]
        s, t = np.int64(0), np.int64(0)
        if 0 < p0 <= 64:
            s, t = signed(x, p0), signed(y, p0)
        result = np.uint64(0)
        if op == codes.MUL_HIGH:
            result = high_product(x, y) if p0 == 64 else (x * y) >> np.uint64(p0)
        elif op == codes.MUL_HIGH_SIGNED:
            if p0 == 64:
                result = high_product(x, y)
                if s < 0:
                    result -= y
                if t < 0:
                    result -= x
            else:
                result = np.uint64((s * t) >> np.int64(p0))
        elif op == codes.DIV:
            result = x // y if y else m
        elif op == codes.REM:
            result = x % y if y else x
        elif op == codes.DIV_SIGNED or op == codes.REM_SIGNED:
            # Towards zero, and of magnitudes, so that the least number divided by -1 wraps.
            top = np.uint64(0) - x if s < 0 else x
            under = np.uint64(0) - y if t < 0 else y
            top &= m
            under &= m
            if op == codes.DIV_SIGNED:
                result = top // under if under else m
                if (s < 0) != (t < 0) and under:
                    result = np.uint64(0) - result
            else:
                result = top % under if under else top
                if s < 0:
                    result = np.uint64(0) - result
        elif op == codes.MIN:
            result = min(x, y)
        elif op == codes.MAX:
            result = max(x, y)
        elif op == codes.MIN_SIGNED:
            result = np.uint64(min(s, t))
        elif op == codes.MAX_SIGNED:
            result = np.uint64(max(s, t))
        elif op == codes.ABS:
            result = np.uint64(0) - x if s < 0 else x
        elif op == codes.NEG:
            result = np.uint64(0) - x
        elif op == codes.PRMT:
            result = permute(x, y, z)
        elif op == codes.LOP3:
            for k in range(8):
                if (p1 >> k) & 1:
                    term = (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
                    result |= term
        elif op == codes.BFE or op == codes.BFE_SIGNED:
            result = extract(r[a, i], r[b, i], z, p0, op == codes.BFE_SIGNED)
        elif op == codes.BFI:
            result = insert(x, y, z, r[p1, i], p0)
        elif op == codes.SHF_LEFT or op == codes.SHF_RIGHT:
            amount = z & np.uint64(31) if p1 else min(z & np.uint64(0xFFFFFFFF), np.uint64(32))
            both = (y << np.uint64(32)) | x
            result = both >> amount if op == codes.SHF_RIGHT else (both << amount) >> np.uint64(32)
        elif op == codes.POPC:
            result = population(x)
        elif op == codes.CLZ:
            result = leading_zeros(x, p0)
        elif op == codes.BREV:
            for k in range(p0):
                result |= ((x >> np.uint64(k)) & np.uint64(1)) << np.uint64(p0 - 1 - k)
        elif op == codes.CLAMP:
            result = clamp(r[a, i], p0, p1)
            out[i] = result
            continue
        out[i] = result & m


@inner
def extract(value: Any, position: Any, length: Any, bits: Int, is_signed: bool) -> Any:
    """bfe: `length` bits from `position`; signed fields are extended by their top bit, or by the value's."""
    apart()
    place = np.int64(position & np.uint64(255))
    count = np.int64(length & np.uint64(255))
    result = np.uint64(0)
    if count == 0:
        return result
    last = min(place + count - 1, np.int64(bits - 1))
    fill = (value >> np.uint64(last)) & np.uint64(1) if is_signed else np.uint64(0)
    for k in range(bits):
        bit = fill
        if k < count and place + k < bits:
            bit = (value >> np.uint64(place + k)) & np.uint64(1)
        result |= bit << np.uint64(k)
    return result


@inner
def insert(source: Any, target: Any, position: Any, length: Any, bits: Int) -> Any:
    """bfi: the low `length` bits of `source` into `target` at `position`."""
    apart()
    place = np.int64(position & np.uint64(255))
    count = np.int64(length & np.uint64(255))
    result = target
    for k in range(count):
        if place + k >= bits or k >= bits:
            break
        one = np.uint64(1) << np.uint64(place + k)
        result = (result & ~one) | (((source >> np.uint64(k)) & np.uint64(1)) << np.uint64(place + k))
    return result


@inner
def clamp(value: Any, source: Int, target: Int) -> Any:
    """cvt.sat between integers; a negative width means signed."""
    apart()
    bits = target if target > 0 else -target
    if source < 0:
        number = signed(value, -source)
        if target < 0:
            limit = np.int64(mask_of(bits) >> np.uint64(1))
            return np.uint64(max(min(number, limit), -limit - 1)) & mask_of(bits)
        if number < 0:
            return np.uint64(0)
        return min(np.uint64(number), mask_of(bits))
    plain = value & mask_of(source)
    return min(plain, mask_of(bits) >> np.uint64(1) if target < 0 else mask_of(bits))
