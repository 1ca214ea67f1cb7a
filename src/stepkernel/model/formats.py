"""Number formats, exact: BF16, E4M3 with a scale, and MXFP4 (E2M1 elements, one E8M0 scale per 32).

All conversions round to nearest, ties to even. MXFP4 as checkpoints store it: element 2i of a row is the low
nibble of byte i, and a scale byte s stands for the factor 2^(s-127).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.model.quantization import GROUP_SIZE

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
E4M3_MAX = 448.0
E2M1_MAX = 6.0
# 6 * 2^(252-127) is the largest MXFP4 value below BF16's infinity; bytes above it overflow, 255 is NaN.
MAX_SCALE_BYTE = 252
_SCALE_BIAS = 127

BFloat16Array = NDArray[Any]
Float32Array = NDArray[np.float32]
ByteArray = NDArray[np.uint8]


def _pair_table() -> NDArray[np.uint64]:
    """[256] uint64: the two float32 values of a packed byte as one 8-byte word, low nibble first."""
    codes = np.arange(16, dtype=np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    packed = np.arange(256)
    pairs: NDArray[np.uint64] = np.stack([values[packed & 15], values[packed >> 4]], axis=1).view(np.uint64)
    return pairs.ravel()


def _scale_table() -> Float32Array:
    """[256] float32: factor of every scale byte; 2^-127 is subnormal and exact, byte 255 is NaN."""
    factors: Float32Array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return factors


_PAIRS = _pair_table()
_SCALES = _scale_table()


def to_bfloat16(values: NDArray[Any]) -> BFloat16Array:
    """The values rounded to BF16 (dtype ml_dtypes.bfloat16); NaN stays NaN, overflow becomes infinity."""
    return values.astype(BFLOAT16)


def bf16_round(values: Float32Array) -> Float32Array:
    """float32 values rounded to the BF16 grid, still float32; NaN stays NaN. Input is not changed."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded &= np.uint32(0xFFFF0000)
    result = rounded.view(np.float32)
    # Rounding the bits of a NaN may carry into its sign or leave an infinity.
    lost = np.isnan(bits.view(np.float32))
    if lost.any():
        result[lost] = np.nan
    return result.reshape(np.shape(values))


def e4m3_encode(values: NDArray[Any], scale: float = 1.0) -> ByteArray:
    """E4M3 codes of values/scale, saturating at +-448; NaN becomes the NaN code 0x7F or 0xFF."""
    scaled = np.asarray(values, dtype=np.float32) / np.float32(scale)
    codes: ByteArray = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def e4m3_decode(codes: ByteArray, scale: float = 1.0) -> Float32Array:
    """float32 values of E4M3 codes times `scale`."""
    values: Float32Array = np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values * np.float32(scale)


def mxfp4_decode(packed: ByteArray, scale: ByteArray) -> Float32Array:
    """float32 [out, in] of packed uint8 [out, in/2] and scale uint8 [out, in/32]; exact in BF16.

    Scale byte 255 gives NaN, 253 and 254 may give infinity. Raises ValueError if the shapes do not match.
    """
    rows, half = packed.shape
    if half * 2 % GROUP_SIZE or scale.shape != (rows, half * 2 // GROUP_SIZE):
        raise ValueError(f"MXFP4 scale of shape {scale.shape} does not fit packed values {packed.shape}")
    # mode="clip" skips the bounds check, which a byte cannot fail.
    values = _PAIRS.take(packed, mode="clip").view(np.float32).reshape(rows, -1, GROUP_SIZE)
    values *= _SCALES[scale][:, :, None]
    return values.reshape(rows, half * 2)


def mxfp4_encode(values: NDArray[Any]) -> tuple[ByteArray, ByteArray]:
    """(packed uint8 [out, in/2], scale uint8 [out, in/32]) nearest to finite values [out, in].

    The scale of a group is the smallest power of two under which no element exceeds 6, so nothing saturates;
    a group of zeros gets scale byte 0. Raises ValueError for NaN, infinity or a width not a multiple of 32.
    """
    rows, width = values.shape
    if width % GROUP_SIZE:
        raise ValueError(f"MXFP4 needs a width that is a multiple of {GROUP_SIZE}, found {width}")
    groups = np.asarray(values, dtype=np.float32).reshape(rows, width // GROUP_SIZE, GROUP_SIZE)
    largest = np.maximum(groups.max(axis=2), -groups.min(axis=2))
    if not np.isfinite(largest).all():
        raise ValueError("MXFP4 holds finite values only, found NaN or infinity")
    # amax = m * 2^e with m in [0.5, 1): amax <= 6 * 2^(e-3) iff m <= 0.75, else one power more.
    mantissa, exponent = np.frexp(largest)
    power = np.where(mantissa <= E2M1_MAX / 8, exponent - 3, exponent - 2)
    scale = np.clip(power + _SCALE_BIAS, 0, MAX_SCALE_BYTE)
    scale = np.where(largest == 0, 0, scale).astype(np.uint8)
    scaled = np.ldexp(groups, _SCALE_BIAS - scale.astype(np.int32)[:, :, None])
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(rows, width)
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4)), scale
