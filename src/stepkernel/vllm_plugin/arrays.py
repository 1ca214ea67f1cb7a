"""Tensors of vLLM as arrays of the executors."""

from typing import Any

import ml_dtypes
import torch
from numpy.typing import NDArray
from torch import Tensor


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory; NumPy knows BF16 and E4M3 only by their bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.numpy()
