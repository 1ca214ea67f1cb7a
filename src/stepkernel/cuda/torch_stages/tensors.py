"""Weights and caches as tensors: of the host's arrays, and of memory that lies on a GPU already."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepkernel.cuda.cache_map import CacheMap
from stepkernel.cuda.host_weights import Loader, host_values
from stepkernel.cuda.records import Place
from stepkernel.cuda.torch_stages.binding import CacheTensors
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches

Shape = tuple[int, ...]
Wrap = Callable[[int, Shape, Any], Tensor]  # (address, shape, torch's dtype)


class HostTensors:
    """Weights of the host, copied to a device of torch's."""

    def __init__(self, weights: Weights, device: Any = "cpu") -> None:
        self._weights, self._device = weights, device

    def load(self, place: Place, name: str, shape: Shape) -> Tensor:
        values = host_values(self._weights, place, name, shape[0])
        return tensor_of(values.copy()).to(self._device).view(shape)


class DeviceTensors:
    """Weights where the kernels have them: each lies there in the plain order of its elements."""

    def __init__(self, loader: Loader, experts: int, wrap: Wrap) -> None:
        self._loader, self._experts, self._wrap = loader, experts, wrap

    def load(self, place: Place, name: str, shape: Shape) -> Tensor:
        return self._wrap(self._loader.load(place, name, self._experts), shape, dtype_of(place, name))


def dtype_of(place: str, name: str) -> Any:
    """Torch's dtype of a weight that a record names."""
    if place in ("vector", "score"):
        return torch.float32
    packed = place == "scales" or (place == "experts" and not name.endswith(".weight"))
    return torch.uint8 if packed else torch.bfloat16


def on_gpu(address: int, shape: Shape, dtype: Any) -> Tensor:
    """Memory of the current GPU as a tensor that does not own it."""
    return torch.as_tensor(_Memory(address, prod(shape) * dtype.itemsize), device="cuda").view(dtype).view(shape)


class _Memory:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def mapped_caches(found: CacheMap, wrap: Wrap) -> CacheTensors:
    """Caches of the kernels. Raises ValueError for formats that the torch stages do not know."""
    _check(found.shapes)

    def wrapped(place: str, arrays: Sequence[NDArray[Any]], dtype: Any) -> tuple[Tensor, ...]:
        return tuple(wrap(found.addresses[place, str(i)], array.shape, dtype) for i, array in enumerate(arrays))

    shapes = found.shapes
    return CacheTensors(
        wrapped("latent", shapes.latent, torch.bfloat16),
        wrapped("conv", shapes.conv, torch.bfloat16),
        wrapped("state", shapes.recurrent, torch.float32),
    )


def host_caches(caches: Caches) -> CacheTensors:
    """The host's caches themselves, not copies. Raises ValueError as `mapped_caches` does."""
    _check(caches)
    latent, conv, recurrent = (
        tuple(tensor_of(array) for array in arrays) for arrays in (caches.latent, caches.conv, caches.recurrent)
    )
    return CacheTensors(latent, conv, recurrent)


def tensor_of(values: NDArray[Any]) -> Tensor:
    """An array's own memory; torch takes BF16 from NumPy by its bits alone."""
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _check(caches: Caches) -> None:
    expected = {"latent": ml_dtypes.bfloat16, "conv": ml_dtypes.bfloat16, "recurrent": np.float32}
    for name, dtype in expected.items():
        for array in getattr(caches, name):
            if array.dtype != dtype:
                raise ValueError(f"{name} cache of {array.dtype}: torch step: {np.dtype(dtype)} is supported")
