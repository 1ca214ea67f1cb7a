"""Vector functions of the stages: BF16 rounding, exp and what is made of it. A NaN argument gives NaN."""

from typing import Any

import numpy as np

from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import (
    abs_f32,
    add_f32,
    add_i32,
    and_i32,
    constant,
    divide_f32,
    f32_as_i32,
    f32_to_i32,
    f32x8,
    i8_to_i32,
    i16_to_i32,
    i32_as_f32,
    i32_to_f32,
    i32_to_i8,
    i32_to_i16,
    i32x8,
    is_nan,
    load_f32,
    load_i8,
    load_i16,
    max_f32,
    min_f32,
    multiply_add,
    multiply_f32,
    or_i32,
    round_f32,
    select_greater,
    select_i32,
    shift_left_16,
    shift_left_20,
    shift_left_23,
    shift_left_24,
    shift_right_16,
    shift_right_20,
    shift_right_24,
    shift_right_arithmetic_23,
    splat_f32,
    store_f32,
    store_i8,
    store_i16,
    subtract_f32,
    subtract_i32,
    zero_f32,
)

_one, _bias, _quiet = constant(f32x8, 1.0), constant(i32x8, 127), constant(i32x8, 0x7FC00000)
_half, _lowest, _top = constant(i32x8, 0x7FFF), constant(i32x8, 1), constant(i32x8, -65536)
_most, _least = constant(f32x8, 88.0), constant(f32x8, -87.3)
_log2e = constant(f32x8, 1.4426950408889634)
# ln 2 in two parts, so that x - n ln 2 keeps all bits; polynomial of Cephes expf, relative error 1.1e-7.
_ln2_high, _ln2_low = constant(f32x8, -0.693359375), constant(f32x8, 2.12194440e-4)
_p0, _p1, _p2 = (constant(f32x8, c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3))
_p3, _p4, _p5 = (constant(f32x8, c) for c in (4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
# E4M3: 4 exponent bits of bias 7, 3 of mantissa; codes below 8 count steps of 2^-9, 127 is NaN.
_size_bits, _sign_bit, _eight, _most_e4m3 = (constant(i32x8, c) for c in (127, 128, 8, 126))
_e4m3_bias, _e4m3_codes, _half_e4m3 = (constant(i32x8, c) for c in (120 << 23, 120 << 3, 0x7FFFF))
_smallest_e4m3, _e4m3_steps, _e4m3_limit = (constant(f32x8, c) for c in (2.0**-9, 2.0**9, 448.0))
_least_normal = constant(i32x8, 0x3C800000)  # 2^-6
_saturated, _unseen = constant(f32x8, 20.0), constant(f32x8, 40.0)
_root_half, _mantissa, _twenty = constant(i32x8, 0x3F3504F3), constant(i32x8, 0x7FFFFF), constant(f32x8, 20.0)
_l0, _l1, _l2 = (constant(f32x8, c) for c in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1))
_l3, _l4, _l5 = (constant(f32x8, c) for c in (-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1))
_l6, _l7, _l8 = (constant(f32x8, c) for c in (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1))
_log_high, _log_low, _minus_half = (constant(f32x8, c) for c in (0.693359375, -2.12194440e-4, -0.5))


@inner
def round_bf16(x: Any) -> Any:
    """Nearest BF16, ties to even; NaN becomes the quiet NaN."""
    bits = f32_as_i32(x)
    odd = and_i32(shift_right_16(bits), _lowest())
    rounded = and_i32(add_i32(add_i32(bits, _half()), odd), _top())
    return i32_as_f32(select_i32(is_nan(x), _quiet(), rounded))


@inner
def round_if(x: Any, rounds: int) -> Any:
    return round_bf16(x) if rounds != 0 else x


@inner
def load_bf16(address: int) -> Any:
    """8 BF16 values as float32."""
    return i32_as_f32(shift_left_16(i16_to_i32(load_i16(address))))


@inner
def store_bf16(address: int, x: Any) -> None:
    store_i16(address, i32_to_i16(shift_right_16(f32_as_i32(round_bf16(x)))))


@inner
def load_e4m3(address: int) -> Any:
    """8 E4M3 values as float32, exact; built without denormal numbers, which a step flushes."""
    codes = i8_to_i32(load_i8(address))
    size = and_i32(codes, _size_bits())
    normal = add_i32(shift_left_20(size), _e4m3_bias())
    small = f32_as_i32(multiply_f32(i32_to_f32(size), _smallest_e4m3()))
    bits = select_i32(subtract_i32(size, _eight()), small, normal)
    bits = select_i32(subtract_i32(_most_e4m3(), size), _quiet(), bits)
    return i32_as_f32(or_i32(bits, shift_left_24(and_i32(codes, _sign_bit()))))


@inner
def store_e4m3(address: int, x: Any) -> None:
    """8 values rounded to nearest even and saturated at +-448; NaN becomes the NaN code."""
    bits = f32_as_i32(x)
    size = min_f32(abs_f32(x), _e4m3_limit())
    whole = f32_as_i32(size)
    odd = and_i32(shift_right_20(whole), _lowest())
    normal = subtract_i32(shift_right_20(add_i32(add_i32(whole, _half_e4m3()), odd)), _e4m3_codes())
    small = f32_to_i32(round_f32(multiply_f32(size, _e4m3_steps())))
    code = select_i32(subtract_i32(whole, _least_normal()), small, normal)
    code = select_i32(is_nan(x), _size_bits(), code)
    store_i8(address, i32_to_i8(or_i32(code, and_i32(shift_right_24(bits), _sign_bit()))))


# Formats of `load_as` and `store_as`.
BF16, FLOAT32, E4M3 = 0, 1, 2


@inner
def load_as(address: int, index: int, kind: int) -> Any:
    """8 values from element `index` on, stored as `kind`."""
    if kind == FLOAT32:
        return load_f32(address + index * 4)
    if kind == BF16:
        return load_bf16(address + index * 2)
    return load_e4m3(address + index)


@inner
def store_as(address: int, index: int, x: Any, kind: int) -> None:
    if kind == FLOAT32:
        store_f32(address + index * 4, x)
    elif kind == BF16:
        store_bf16(address + index * 2, x)
    else:
        store_e4m3(address + index, x)


@inner
def exp(x: Any) -> Any:
    return _exp_within(min_f32(max_f32(x, _least()), _most()))


@inner
def _exp_within(x: Any) -> Any:
    """exp for -87.3 <= x <= 88 or NaN."""
    n = round_f32(multiply_f32(x, _log2e()))
    r = multiply_add(n, _ln2_low(), multiply_add(n, _ln2_high(), x))
    p = multiply_add(_p0(), r, _p1())
    p = multiply_add(p, r, _p2())
    p = multiply_add(p, r, _p3())
    p = multiply_add(p, r, _p4())
    p = multiply_add(p, r, _p5())
    p = add_f32(multiply_add(multiply_f32(p, r), r, r), _one())
    return multiply_f32(p, i32_as_f32(shift_left_23(add_i32(f32_to_i32(n), _bias()))))


@inner
def negative(x: Any) -> Any:
    return subtract_f32(zero_f32(), x)


@inner
def sigmoid(x: Any) -> Any:
    return divide_f32(_one(), add_f32(_one(), exp(negative(x))))


@inner
def silu(x: Any) -> Any:
    return divide_f32(x, add_f32(_one(), exp(negative(x))))


@inner
def clamp(x: Any, bound: Any) -> Any:
    return min_f32(max_f32(x, negative(bound)), bound)


@inner
def activation(gate: Any, up: Any, beta: Any, linear_beta: Any) -> Any:
    """SiTU for beta > 0 (linear_beta 0: no bound on `up`), else SiLU (spec 2.7).

    tanh x = (e^2x - 1) / (e^2x + 1) and sigmoid x = 1 / (1 + e^-x) share one division. Beyond the bounds tanh is 1 to
    the last bit and sigmoid 1 or below 1e-17; within them no product overflows.
    """
    if beta == np.float32(0.0):
        return multiply_f32(silu(gate), up)
    two = np.float32(2.0)
    left = _exp_within(clamp(multiply_f32(gate, splat_f32(two / beta)), _saturated()))
    top = multiply_f32(subtract_f32(left, _one()), splat_f32(beta))
    bottom = multiply_f32(add_f32(left, _one()), add_f32(_one(), _exp_within(negative(clamp(gate, _unseen())))))
    if linear_beta == np.float32(0.0):
        return multiply_f32(divide_f32(top, bottom), up)
    right = _exp_within(clamp(multiply_f32(up, splat_f32(two / linear_beta)), _saturated()))
    top = multiply_f32(top, multiply_f32(subtract_f32(right, _one()), splat_f32(linear_beta)))
    return divide_f32(top, multiply_f32(bottom, add_f32(right, _one())))


@inner
def log(x: Any) -> Any:
    """Natural logarithm of positive finite x (Cephes logf, error 1e-7)."""
    bits = f32_as_i32(x)
    # x = m * 2^e with m in [sqrt(1/2), sqrt(2))
    shifted = subtract_i32(bits, _root_half())
    e = i32_to_f32(shift_right_arithmetic_23(shifted))
    m = i32_as_f32(add_i32(and_i32(shifted, _mantissa()), _root_half()))
    r = subtract_f32(m, _one())
    z = multiply_f32(r, r)
    p = multiply_add(_l0(), r, _l1())
    p = multiply_add(p, r, _l2())
    p = multiply_add(p, r, _l3())
    p = multiply_add(p, r, _l4())
    p = multiply_add(p, r, _l5())
    p = multiply_add(p, r, _l6())
    p = multiply_add(p, r, _l7())
    p = multiply_add(p, r, _l8())
    tail = multiply_add(e, _log_low(), multiply_f32(multiply_f32(r, z), p))
    tail = multiply_add(z, _minus_half(), tail)
    return add_f32(multiply_add(e, _log_high(), r), tail)


@inner
def softplus(x: Any) -> Any:
    """log(1 + e^x), and x itself from 20 on (spec 2.5.4) and where it is NaN, which `log` would lose."""
    return select_greater(_twenty(), x, log(add_f32(_one(), exp(x))), x)
