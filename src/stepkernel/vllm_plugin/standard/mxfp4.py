"""MXFP4 experts to float32, exactly: a table of value pairs, then the block's power of two (spec 3.3)."""

import torch
from torch import Tensor

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _pairs() -> Tensor:
    """int64 [256]: the two float32 values of a byte, low nibble first."""
    code = torch.arange(256)
    values = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float32)
    return torch.stack([values[code & 15], values[code >> 4]], 1).contiguous().view(torch.int64).view(-1)


_PAIRS = _pairs()
# A scale byte is the exponent of a float32; 2^-127 (byte 0) is subnormal and exact.
_SCALES = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).to(torch.float32)


def unpack(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """packed uint8 [rows, columns / 2] and scale uint8 [rows, columns / 32] into float32 `out` [rows, columns]."""
    torch.index_select(_PAIRS, 0, packed.reshape(-1).int(), out=out.view(torch.int64).view(-1))
    out.view(len(packed), -1, GROUP).mul_(_SCALES[scale.int()].unsqueeze(-1))
    return out
