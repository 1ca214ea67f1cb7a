"""Fast search for NaN and infinity in stored weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.formats import MAX_SCALE_BYTE

# Elements per block: the temporary of a block stays in the second-level cache.
_BLOCK = 1 << 15
_EXPONENTS = {
    np.dtype(np.uint16): (np.uint16, 0x7F80),  # BF16 bits
    np.dtype(np.float32): (np.uint32, 0x7F800000),
}


def first_bad_row(values: NDArray[Any]) -> int | None:
    """Row (axis 0) of the first non-finite value, None if all are finite.

    Takes BF16 bits (uint16) or float32, any strides. uint8 is taken for MXFP4 scale bytes: 255 is NaN,
    253 and 254 reach beyond BF16.
    """
    flat = values.reshape(values.shape[0], -1) if values.ndim != 2 else values
    if flat.size == 0:
        return None
    step = max(1, _BLOCK // flat.shape[1])
    for start in range(0, flat.shape[0], step):
        bad = _bad(flat[start : start + step])
        if bad.any():
            return start + int(np.flatnonzero(bad.any(axis=1))[0])
    return None


def _bad(block: NDArray[Any]) -> NDArray[np.bool_]:
    if block.dtype == np.uint8:
        return np.asarray(block > MAX_SCALE_BYTE)
    bits, exponent = _EXPONENTS[block.dtype]
    return np.asarray((block.view(bits) & bits(exponent)) == exponent)
