"""MXFP4 to BF16, exactly: torch has no product with such weights, so the chosen experts' are decoded first."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.model.quantization import GROUP_SIZE

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoder(device: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """(packed uint8 [..., in / 2], scales uint8 [..., in / 32]) -> BF16 [..., in]: a table of pairs, low nibble first,
    then the group's power of two (spec 3.3)."""
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.bfloat16, device=device)
    code = torch.arange(256, device=device)
    pairs = torch.stack([values[code & 15], values[code >> 4]], 1)
    factors = torch.exp2(code.double() - 127).bfloat16().unsqueeze(1)

    def decode(packed: Tensor, scales: Tensor) -> Tensor:
        groups = F.embedding(packed.int(), pairs).view(*scales.shape, GROUP_SIZE)
        return (groups * F.embedding(scales.int(), factors)).flatten(-2)

    return decode
