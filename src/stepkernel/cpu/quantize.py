"""Rows of activations as records of integers, which MXFP4 products read (mxfp4.py says how)."""

from typing import Any

import numpy as np

from stepkernel.cpu.jit import inner
from stepkernel.cpu.mxfp4 import GROUP, HEADER, RECORD_8, RECORD_15
from stepkernel.cpu.simd import (
    Vector,
    abs_f32,
    add_f32,
    add_i32,
    constant,
    convert,
    f32_to_i32,
    i8x8,
    i32_to_i8,
    i32x8,
    largest_f32,
    load_f32,
    max_f32,
    multiply_f32,
    out_of_line,
    round_f32,
    shift,
    shuffle,
    shuffle_to,
    splat_f32,
    splat_i32,
    store_f32,
    store_i32,
    subtract_f32,
    subtract_i32,
    sum_f32,
    sum_i32,
    zero_i32,
)

LIMIT_15, LIMIT_8 = 16256.0, 127.0  # 16256 = 127 * 128
_rounding, _down_7, _up_7 = constant(i32x8, 64), shift(i32x8, "ashr", 7), shift(i32x8, "shl", 7)
_evens_first = shuffle(i32x8, [0, 2, 4, 6, 1, 3, 5, 7])
_i32x2 = Vector("i32", 2)
_as_words = convert(i8x8, _i32x2, "bitcast")
_first_word, _second_word = shuffle_to(i32x8, _i32x2, [0] * 8), shuffle_to(i32x8, _i32x2, [1] * 8)


@inner
def _spread(target: int, values: Any) -> None:
    """Stores 8 integers as bytes, evens then odds, each four of them 8 times."""
    pair = _as_words(i32_to_i8(_evens_first(values)))
    store_i32(target, _first_word(pair))
    store_i32(target + 32, _second_word(pair))


@inner
def quantize(x: int, record: int, inputs: int, bits: int) -> None:
    """Writes the records of one float32 row. A NaN or infinity makes its record's scale NaN, so it is never lost."""
    out_of_line()
    limit = np.float32(LIMIT_15) if bits == 15 else np.float32(LIMIT_8)
    for k in range(0, inputs * 4, 4 * GROUP):
        a, b, c, d = load_f32(x + k), load_f32(x + k + 32), load_f32(x + k + 64), load_f32(x + k + 96)
        top = largest_f32(max_f32(max_f32(abs_f32(a), abs_f32(b)), max_f32(abs_f32(c), abs_f32(d))))
        # x - x is 0 for every finite x and NaN otherwise.
        poison = sum_f32(
            add_f32(
                add_f32(subtract_f32(a, a), subtract_f32(b, b)),
                add_f32(subtract_f32(c, c), subtract_f32(d, d)),
            )
        )
        inverse = np.float32(0.0)
        if top > np.float32(0.0):
            inverse = limit / top
        # A top below the smallest normal / limit would overflow the inverse: such a group is zero for every purpose.
        if not inverse < np.float32(3e38):
            inverse = np.float32(0.0)
        factor = splat_f32(inverse)
        total = zero_i32()
        for word in range(4):
            q = f32_to_i32(round_f32(multiply_f32(load_f32(x + k + 32 * word), factor)))
            total = add_i32(total, q)
            if bits == 15:
                high = _down_7(add_i32(q, _rounding()))
                low = subtract_i32(q, _up_7(high))
                _spread(record + HEADER + 128 * word, high)
                _spread(record + HEADER + 128 * word + 64, low)
            else:
                _spread(record + HEADER + 64 * word, q)
        store_f32(record, splat_f32(top * (np.float32(0.5) / limit) + poison))
        store_i32(record + 32, splat_i32(np.int32(-12) * sum_i32(total)))
        record += RECORD_15 if bits == 15 else RECORD_8
