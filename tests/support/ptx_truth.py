"""What register-to-register instructions do, from the ISA's text, in NumPy and ml_dtypes: float64 and Python integers
rather than the machine's own helpers."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
SMALL = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
COMPARE |= {"lo": COMPARE["lt"], "ls": COMPARE["le"], "hi": COMPARE["gt"], "hs": COMPARE["ge"]}
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def as_floats(words: Words, kind: str) -> NDArray[np.float64]:
    """float64 values of the low bits."""
    if kind == "f64":
        return words.view(np.float64).copy()
    if kind == "f32":
        return words.astype(np.uint32).view(np.float32).astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        return words.astype(np.uint8).view(SMALL[kind]).astype(np.float64)
    return words.astype(np.uint16).view(SMALL[kind]).astype(np.float64)


def as_words(values: Any, kind: str) -> Words:
    """Bits of float64 values rounded to nearest."""
    values = np.asarray(values, np.float64)
    if kind == "f64":
        return values.view(np.uint64)
    if kind == "f32":
        return values.astype(np.float32).view(np.uint32).astype(np.uint64)
    narrow = values.astype(SMALL[kind])
    return narrow.view(np.uint8 if narrow.itemsize == 1 else np.uint16).astype(np.uint64)


def integers(function: Callable[..., int], bits: int, *arguments: Words) -> Words:
    rows = zip(*(a.tolist() for a in arguments), strict=True)
    return np.array([function(*row) & ((1 << bits) - 1) for row in rows], np.uint64)


def quotient(a: int, b: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def integer_truth(head: str, parts: list[str], kind: str, a: list[Words]) -> Words:
    bits = int(kind[1:])
    number: Callable[[int], int] = (lambda x: signed(x, bits)) if kind[0] == "s" else (lambda x: x & ((1 << bits) - 1))
    n = number
    wide = 2 * bits if "wide" in parts else bits
    table: dict[str, Callable[..., int]] = {
        "add": lambda x, y: n(x) + n(y),
        "sub": lambda x, y: n(x) - n(y),
        "mul": lambda x, y: (n(x) * n(y)) >> (bits if "hi" in parts else 0),
        "mad": lambda x, y, z: n(x) * n(y) + z,
        "div": lambda x, y: quotient(n(x), n(y)),
        "rem": lambda x, y: n(x) - quotient(n(x), n(y)) * n(y),
        "min": lambda x, y: min(n(x), n(y)),
        "max": lambda x, y: max(n(x), n(y)),
        "abs": lambda x: abs(n(x)),
        "neg": lambda x: -n(x),
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "not": lambda x: ~x,
        "mov": lambda x: x,
        "selp": lambda x, y, p: x if p & 1 else y,
        "shl": lambda x, s: x << min(s & 0xFFFFFFFF, 64),
        "shr": lambda x, s: n(x) >> min(s & 0xFFFFFFFF, bits if kind[0] != "s" else bits - 1),
        "popc": lambda x: n(x).bit_count(),
        "clz": lambda x: bits - n(x).bit_length(),
        "brev": lambda x: int(f"{n(x):0{bits}b}"[::-1], 2),
        "prmt": permute,
        "bfe": lambda x, p, length: field(x, p & 255, length & 255, bits, kind[0] == "s"),
        "shf": lambda low, high, s: funnel(low, high, s, parts),
    }
    return integers(table[head], 32 if head in ("popc", "clz") else wide, *a)


def permute(a: int, b: int, selector: int) -> int:
    data = (a & 0xFFFFFFFF).to_bytes(4, "little") + (b & 0xFFFFFFFF).to_bytes(4, "little")
    out = []
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = data[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def field(x: int, position: int, length: int, bits: int, is_signed: bool) -> int:
    """The pseudocode of bfe: bits beyond the field are the sign bit of the field, or of the value where it ends."""
    sign = 0
    if is_signed and length:
        sign = x >> min(position + length - 1, bits - 1) & 1
    result = 0
    for i in range(bits):
        bit = x >> (position + i) & 1 if i < length and position + i < bits else sign
        result |= bit << i
    return result


def funnel(low: int, high: int, amount: int, parts: list[str]) -> int:
    amount = amount & 31 if "wrap" in parts else min(amount & 0xFFFFFFFF, 32)
    both = (high & 0xFFFFFFFF) << 32 | (low & 0xFFFFFFFF)
    return both << amount >> 32 if "l" in parts else both >> amount


def float_truth(head: str, parts: list[str], kind: str, a: list[Words]) -> Words:
    """Exact in float64 (or longdouble) and rounded once; approximate instructions are compared with a tolerance."""
    x = [as_floats(w, kind) for w in a]
    if "ftz" in parts:
        x = [np.where(np.abs(v) < 2.0**-126, np.copysign(0.0, v), v) for v in x]
    table: dict[str, Callable[..., Any]] = {
        "add": lambda p, q: p + q,
        "sub": lambda p, q: p - q,
        "mul": lambda p, q: p * q,
        "div": lambda p, q: p / q,
        "fma": lambda p, q, r: fma_truth(p, q, r, kind, parts),
        "neg": lambda p: -p,
        "abs": np.abs,
        "ex2": np.exp2,
        "lg2": np.log2,
        "rcp": lambda p: 1 / p,
        "rsqrt": lambda p: 1 / np.sqrt(p),
        "sqrt": np.sqrt,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "min": lambda p, q: extreme(p, q, np.minimum if "NaN" in parts else np.fmin, True),
        "max": lambda p, q: extreme(p, q, np.maximum if "NaN" in parts else np.fmax, False),
    }
    result = table[head](*x)
    single = np.asarray(result, np.float64)
    words = as_words(single, kind)
    if "ftz" in parts:
        small = np.abs(as_floats(words, kind)) < 2.0**-126
        words = np.where(small, words & np.uint64(1 << 31), words)
    return words


def extreme(a: Any, b: Any, function: Callable[..., Any], least: bool) -> Any:
    """min and max, for which +0 is above -0."""
    signs = [np.signbit(a), np.signbit(b)]
    negative = signs[0] | signs[1] if least else signs[0] & signs[1]
    zero = np.where(negative, -0.0, 0.0)
    return np.where((a == 0) & (b == 0), zero, function(a, b))


def fma_truth(
    a: NDArray[np.float64], b: NDArray[np.float64], c: NDArray[np.float64], kind: str, parts: list[str]
) -> NDArray[np.float64]:
    if kind == "f32":
        mode = next(p for p in parts if p in ("rn", "rz", "rm", "rp"))
        rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        return np.array([fused(*row, mode) for row in rows], np.float32).astype(np.float64)
    return (np.asarray(a, np.longdouble) * b + c).astype(np.float64)


def fused(a: float, b: float, c: float, mode: str) -> np.float32:
    """a b + c as a float32, from exact rational numbers."""
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return np.float32(a * b + c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return np.float32(a * b + c)  # the sign of zero
    largest = Fraction(float(np.finfo(np.float32).max))
    near = np.float32(float(max(min(exact, largest), -largest)))
    around = [np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf)]
    values = [v for v in (near, *around) if np.isfinite(v)]
    below = max((v for v in values if Fraction(float(v)) <= exact), default=np.float32(-np.inf))
    above = min((v for v in values if Fraction(float(v)) >= exact), default=np.float32(np.inf))
    if mode == "rn":
        if abs(exact) > largest + Fraction(2) ** 103:  # half a unit beyond the largest
            return np.float32(np.copysign(np.inf, float(exact)))
        gaps = [(abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1, v) for v in values]
        return min(gaps, key=lambda gap: gap[:2])[2]
    if mode == "rz":
        return below if exact > 0 else above
    return below if mode == "rm" else above


def compare_truth(name: str, kind: str, a: Words, b: Words, ftz: bool) -> Words:
    if kind[0] in "bus" and kind not in SMALL:
        bits = int(kind[1:])
        mask = (1 << bits) - 1
        view: Callable[[int], int] = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v & mask)
        return integers(lambda p, q: int(COMPARE[name](view(p), view(q))), 1, a, b)
    x, y = as_floats(a, kind), as_floats(b, kind)
    if ftz:
        x, y = (np.where(np.abs(v) < 2.0**-126, 0.0, v) for v in (x, y))
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        result = unordered if name == "nan" else ~unordered
    elif name in COMPARE:
        result = COMPARE[name](x, y) & ~unordered
    else:
        result = COMPARE[name[:-1]](x, y) | unordered
    return result.astype(np.uint64)


def convert_truth(opcode: str, a: list[Words]) -> Words:
    parts = opcode.split(".")
    to, source = parts[-2], parts[-1]
    if opcode == "cvt.sat.f32.f32":
        x = as_floats(a[0], "f32")
        return as_words(np.clip(np.where(np.isnan(x), 0, x), 0, 1), "f32")
    if opcode == "cvt.rz.bf16.f32":
        return np.where(np.isnan(as_floats(a[0], "f32")), 0x7FFF, a[0] >> np.uint64(16)).astype(np.uint64)
    if to == "e2m1x2":
        codes = [encode_e2m1(as_floats(w, "f32")) for w in a]
        return codes[0] << np.uint64(4) | codes[1]
    if to in ("e4m3x2", "e5m2x2"):
        largest = 448.0 if to == "e4m3x2" else 57344.0
        codes = [as_words(np.clip(as_floats(w, "f32"), -largest, largest), to[:-2]) for w in a]
        codes = [np.where(np.isnan(as_floats(w, "f32")), 0x7F, c) for w, c in zip(a, codes, strict=True)]
        return (codes[0] << np.uint64(8) | codes[1]).astype(np.uint64)
    if source == "e2m1x2":
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        low, high = (
            values[(a[0] & np.uint64(15)).astype(int)],
            values[(a[0] >> np.uint64(4) & np.uint64(15)).astype(int)],
        )
        return as_words(low, "f16") | as_words(high, "f16") << np.uint64(16)
    if to == "f16x2" and source != "f32":
        low, high = (as_floats(a[0] >> np.uint64(s) & np.uint64(255), source[:-2]) for s in (0, 8))
        return as_words(low, "f16") | as_words(high, "f16") << np.uint64(16)
    if to in ("f16x2", "bf16x2"):
        high, low = (as_words(as_floats(w, "f32"), to[:-2]) for w in a)
        return high << np.uint64(16) | low
    if to[0] in "us":
        rounded = ROUND[parts[1]](as_floats(a[0], source))
        bits = int(to[1:])
        low_limit, high_limit = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
        clamped = [0 if np.isnan(v) else int(max(min(v, 2.0**70), -(2.0**70))) for v in rounded]
        return np.array([max(min(v, high_limit), low_limit) & ((1 << bits) - 1) for v in clamped], np.uint64)
    if re.fullmatch(r"[us]\d+", source):
        bits = int(source[1:])
        numbers = [signed(v, bits) if source[0] == "s" else v & ((1 << bits) - 1) for v in a[0].tolist()]
        if to == "f32":  # NumPy rounds integers once
            kind = np.int64 if source[0] == "s" else np.uint64
            return np.array(numbers, kind).astype(np.float32).view(np.uint32).astype(np.uint64)
        return as_words(np.array([float(v) for v in numbers]), "f64")
    values = as_floats(a[0], source)
    if parts[1] in ROUND:
        values = ROUND[parts[1]](values)
    return as_words(values, to)


def encode_e2m1(values: NDArray[np.float64]) -> Words:
    clipped = np.clip(np.where(np.isnan(values), 6.0, values), -6, 6).astype(np.float32)
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).astype(np.uint64) & np.uint64(15)


def truth(opcode: str, a: list[Words]) -> Words:
    """Bits of the result for operand bits `a`."""
    parts = opcode.split(".")
    head, kind = parts[0], parts[-1]
    if head == "setp":
        return compare_truth(parts[1], kind, a[0], a[1], "ftz" in parts)
    if head == "cvt":
        return convert_truth(opcode, a)
    if kind == "pred":
        return integer_truth(head, parts, "b1", a)
    if head in ("mov", "selp"):
        return integer_truth(head, parts, "b" + kind[1:], a)
    if kind in ("f32x2", "f16x2", "bf16x2"):
        half = np.uint64(32 if kind == "f32x2" else 16)
        mask = np.uint64((1 << int(half)) - 1)
        low = float_truth(head, parts, kind[:-2], [w & mask for w in a])
        high = float_truth(head, parts, kind[:-2], [w >> half & mask for w in a])
        return low | high << half
    if len(parts) > 2 and parts[-2] == "f32" and kind in SMALL:
        x = [as_floats(w, k) for w, k in zip(a, (kind, kind if len(a) == 3 else "f32", "f32"), strict=False)]
        exact = {"add": lambda p, q: p + q, "sub": lambda p, q: p - q, "fma": lambda p, q, r: p * q + r}[head](*x)
        return as_words(exact, "f32")
    if kind[0] == "f" or kind == "bf16":
        return float_truth(head, parts, kind, a)
    return integer_truth(head, parts, kind, a)
