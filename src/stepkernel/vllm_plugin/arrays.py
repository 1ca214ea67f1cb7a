"""Tensors of vLLM as arrays of the executors."""

from typing import Any

import ml_dtypes
import torch
from numpy.typing import NDArray
from torch import Tensor


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory; NumPy knows BF16 only by its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
