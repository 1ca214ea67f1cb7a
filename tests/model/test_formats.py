from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stepkernel.model.formats import (
    MAX_SCALE_BYTE,
    bf16_round,
    e4m3_decode,
    e4m3_encode,
    mxfp4_decode,
    mxfp4_encode,
    to_bfloat16,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_bf16_round_on_every_upper_half() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = (upper[:, None] | lower).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    rounded = bf16_round(values)
    assert rounded.dtype == np.float32
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(np.isnan(rounded), ~numbers)
    np.testing.assert_array_equal(rounded[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_bf16_round_keeps_shape_and_input() -> None:
    values = np.linspace(-3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
    before = values.copy()
    assert bf16_round(values[:, ::2].transpose(2, 0, 1)).shape == (4, 2, 2)
    assert bf16_round(np.float32(1.00001)).shape == ()
    assert bf16_round(np.empty((0, 4), np.float32)).shape == (0, 4)
    np.testing.assert_array_equal(values, before)


@settings(deadline=None)
@given(arrays(np.float32, 16, elements=st.floats(width=32)))
def test_bf16_round_equals_conversion(values: np.ndarray) -> None:
    np.testing.assert_array_equal(bf16_round(values), to_bfloat16(values).astype(np.float32))


def test_e4m3_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = e4m3_decode(codes)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        if code & 0x7F == 0x7F:
            assert np.isnan(values[code])
            continue
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        assert values[code] == (-size if sign else size)
    np.testing.assert_array_equal(e4m3_encode(values), codes)
    np.testing.assert_array_equal(e4m3_encode(e4m3_decode(codes, 0.25), 0.25), codes)


def test_e4m3_saturates_and_rounds_to_even() -> None:
    values = np.array([448, 449, 1e30, np.inf, -500, 17, 19, 2.0**-10, 3 * 2.0**-10], dtype=np.float32)
    expected = [448, 448, 448, 448, -448, 16, 20, 0, 2.0**-8]
    np.testing.assert_array_equal(e4m3_decode(e4m3_encode(values)), expected)
    assert np.isnan(e4m3_decode(e4m3_encode(np.array([np.nan], dtype=np.float32))))[0]


@settings(deadline=None)
@given(st.floats(-447, 447, width=32), st.sampled_from([0.125, 1.0, 3.0]))
def test_e4m3_is_nearest(value: float, scale: float) -> None:
    grid = e4m3_decode(np.arange(256, dtype=np.uint8))
    scaled = np.float32(np.float32(value) / np.float32(scale))
    if abs(scaled) > 448:
        return
    chosen = e4m3_decode(e4m3_encode(np.array([value], dtype=np.float32), scale))[0]
    assert abs(chosen - scaled) == np.nanmin(np.abs(grid - scaled))


def test_mxfp4_every_byte_under_every_scale() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for scale in range(MAX_SCALE_BYTE + 1):
        decoded = mxfp4_decode(packed, np.full((16, 1), scale, dtype=np.uint8))
        factor = 2.0 ** (scale - 127)
        sizes = np.array(E2M1)
        for nibble, values in ((packed & 15, decoded[:, 0::2]), (packed >> 4, decoded[:, 1::2])):
            expected = np.where(nibble & 8, -1.0, 1.0) * sizes[nibble & 7] * factor
            np.testing.assert_array_equal(values, expected)
            np.testing.assert_array_equal(np.signbit(values), (nibble & 8) != 0)
        np.testing.assert_array_equal(bf16_round(decoded), decoded)


def test_mxfp4_nan_scale() -> None:
    decoded = mxfp4_decode(np.full((1, 32), 0x22, np.uint8), np.array([[255, 127]], np.uint8))
    assert np.isnan(decoded[0, :32]).all()
    assert (decoded[0, 32:] == 1.0).all()


@settings(deadline=None)
@given(arrays(np.uint8, (2, 32)), arrays(np.uint8, (2, 2), elements=st.integers(0, MAX_SCALE_BYTE)))
def test_mxfp4_encoding_a_decoded_matrix_loses_nothing(packed: np.ndarray, scale: np.ndarray) -> None:
    decoded = mxfp4_decode(packed, scale)
    np.testing.assert_array_equal(mxfp4_decode(*mxfp4_encode(decoded)), decoded)


@settings(deadline=None)
@given(arrays(np.float32, (1, 64), elements=finite))
def test_mxfp4_is_nearest_for_its_scale(values: np.ndarray) -> None:
    packed, scale = mxfp4_encode(values)
    decoded = mxfp4_decode(packed, scale).astype(np.float64)
    factor = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
    grid = np.array([*E2M1, *(-size for size in E2M1)])
    error = np.abs(values[:, :, None] - grid * factor[:, :, None]).min(axis=2)
    np.testing.assert_array_equal(np.abs(values - decoded), error)


@settings(deadline=None)
@given(arrays(np.float32, (1, 32), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_mxfp4_scale_is_the_smallest_without_saturation(values: np.ndarray) -> None:
    _, scale = mxfp4_encode(values)
    largest = float(np.abs(values).max())
    exponent = int(scale[0, 0]) - 127
    assert largest <= 6.0 * 2.0**exponent
    if scale[0, 0] > 0:
        assert largest > 6.0 * 2.0 ** (exponent - 1)


def test_mxfp4_refusals() -> None:
    with pytest.raises(ValueError, match="multiple of 32, found 33"):
        mxfp4_encode(np.zeros((1, 33)))
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="finite values only"):
            mxfp4_encode(np.array([[bad, *[0.0] * 31]], dtype=np.float32))
    with pytest.raises(ValueError, match="does not fit"):
        mxfp4_decode(np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8))
