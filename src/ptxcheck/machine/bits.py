"""Bits and values: reinterpretation, fused multiply-add, and the small floating-point formats.

Registers are uint64; a value of fewer bits lies in the low ones, the rest is zero.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ptxcheck.machine.jit import COMPILED, Int, apart, inline, inner

# Formats as (exponent bits, mantissa bits, bias); how the top codes are used differs, see `encode`.
E2M1, E4M3, E5M2, F16, BF16 = 0, 1, 2, 3, 4
_EXPONENT = (2, 4, 5, 5, 8)
_MANTISSA = (1, 3, 2, 10, 7)
_BIAS = (1, 7, 15, 15, 127)
_LARGEST = (6.0, 448.0, 57344.0, 65504.0, 3.3895313892515355e38)

_I32, _I64, _F32, _F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


def _primitive(result: types.Type, arguments: tuple[types.Type, ...], emit: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic of fixed types that emits LLVM code."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit(builder, values)

    signature = result(*arguments)
    count = len(arguments)
    if count == 1:

        @intrinsic
        def one(typingctx: Any, a: Any) -> Any:
            return signature, generate

        return one

    @intrinsic
    def three(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, generate

    return three


def _fused(kind: Any) -> Callable[[Any, Any], Any]:
    def emit(builder: Any, values: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, values)

    return emit


if COMPILED:
    f32 = _primitive(
        types.float32, (types.uint64,), lambda b, v: b.bitcast(b.trunc(v[0], _I32), _F32)
    )  # low 32 bits as float32
    f32_bits = _primitive(types.uint64, (types.float32,), lambda b, v: b.zext(b.bitcast(v[0], _I32), _I64))
    f64 = _primitive(types.float64, (types.uint64,), lambda b, v: b.bitcast(v[0], _F64))
    f64_bits = _primitive(types.uint64, (types.float64,), lambda b, v: b.bitcast(v[0], _I64))
    fma32 = _primitive(types.float32, (types.float32,) * 3, _fused(_F32))
    fma64 = _primitive(types.float64, (types.float64,) * 3, _fused(_F64))
else:
    f32 = lambda bits: np.uint32(int(bits) & 0xFFFFFFFF).view(np.float32)  # noqa: E731
    f32_bits = lambda value: np.uint64(np.float32(value).view(np.uint32))  # noqa: E731
    f64 = lambda bits: np.uint64(bits).view(np.float64)  # noqa: E731
    f64_bits = lambda value: np.float64(value).view(np.uint64)  # noqa: E731
    # The product of two float32 is exact in float64, so one rounding to float32 is all but always the right one.
    fma32 = lambda a, b, c: np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))  # noqa: E731
    fma64 = lambda a, b, c: np.float64(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))  # noqa: E731


@inline
def signed(value: Any, bits: Int) -> Any:
    """The low `bits` of a register as a signed integer."""
    shift = np.uint64(64 - bits)
    return np.int64(value << shift) >> np.int64(shift)


@inline
def mask_of(bits: Int) -> Any:
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@inner
def decode(code: Any, kind: Int) -> Any:
    """float64 value of a code of a small format, exact."""
    apart()
    exponent_bits, mantissa_bits, bias = _EXPONENT[kind], _MANTISSA[kind], _BIAS[kind]
    code = np.int64(code)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if (code >> (mantissa_bits + exponent_bits)) & 1 else 1.0
    top = exponent == (1 << exponent_bits) - 1
    if top and kind >= E5M2:  # as IEEE: infinity and NaN
        return sign * np.inf if mantissa == 0 else np.nan
    if top and kind == E4M3 and mantissa == 7:
        return np.nan
    if exponent == 0:
        return sign * np.ldexp(float(mantissa), 1 - bias - mantissa_bits)
    return sign * np.ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits)


@inner
def encode(value: float, kind: Int, saturate: bool) -> Any:
    """Nearest code, ties to even. Beyond the largest value: that value if `saturate`, else infinity.

    NaN becomes the canonical NaN of the format (E2M1 has none: its largest value, as the ISA says for satfinite).
    """
    apart()
    exponent_bits, mantissa_bits, bias = _EXPONENT[kind], _MANTISSA[kind], _BIAS[kind]
    top = np.int64((1 << exponent_bits) - 1)
    if np.isnan(value):
        if kind == E2M1:
            return np.uint64(7)
        return np.uint64((1 << (exponent_bits + mantissa_bits)) - 1)
    sign = np.uint64(0)
    if f64_bits(value) >> np.uint64(63):
        sign = np.uint64(1) << np.uint64(exponent_bits + mantissa_bits)
        value = -value
    largest = _LARGEST[kind]
    exponent = np.int64(1 - bias)
    if value > 0.0 and value != np.inf:
        exponent = max(np.int64((f64_bits(value) >> np.uint64(52)) & np.uint64(0x7FF)) - 1023, np.int64(1 - bias))
    quantum = exponent - mantissa_bits
    steps = np.rint(np.ldexp(value, -quantum)) if value != np.inf else np.inf
    rounded = np.ldexp(steps, quantum)
    if rounded > largest:
        if saturate or kind < E5M2:
            rounded = largest
            exponent = np.int64((f64_bits(largest) >> np.uint64(52)) & np.uint64(0x7FF)) - 1023
            steps = np.ldexp(largest, mantissa_bits - exponent)
        else:
            return sign | np.uint64(top << mantissa_bits)
    whole = np.int64(steps)
    # steps == 2^(mantissa_bits + 1) after rounding up carries into the exponent by itself.
    code = whole + ((exponent + bias - 1) << mantissa_bits)
    return sign | np.uint64(code)


@inner
def bf16_bits(value: Any) -> Any:
    """float32 to BF16, nearest, ties to even; NaN becomes 0x7FFF."""
    bits = f32_bits(value)
    if value != value:
        return np.uint64(0x7FFF)
    return (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
