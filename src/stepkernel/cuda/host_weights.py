"""Weights on their way from the host to a device."""

from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.device_protocol import Device
from stepkernel.model.weights import Weights

BF16 = np.dtype(ml_dtypes.bfloat16)


@runtime_checkable
class Loader(Protocol):
    """Puts weights on a device."""

    def load(self, place: str, name: str, experts: int) -> int:
        """Address of what a record names (`plan.At`)."""
        ...


class HostWeights:
    """Copies weights from the host, as the stages want them; each once, for all steps that ask."""

    def __init__(self, weights: Weights, device: Device) -> None:
        self._weights, self._device = weights, device
        self._loaded: dict[tuple[str, str], int] = {}

    def load(self, place: str, name: str, experts: int) -> int:
        if (place, name) not in self._loaded:
            values = host_values(self._weights, place, name, experts)
            label = name if place != "scales" else f"scales of {name}"
            self._loaded[place, name] = self._device.put(label, values, constant=True)
        return self._loaded[place, name]


def host_values(weights: Weights, place: str, name: str, experts: int) -> NDArray[Any]:
    """What a record names, as it lies on a device. Raises ValueError for a norm that BF16 cannot hold."""
    match place:
        case "matrix":
            values = np.ascontiguousarray(weights.matrix(name))
        case "norm":
            values = weights.vector(name).astype(BF16)
            if not np.array_equal(values.astype(np.float32), weights.vector(name), equal_nan=True):
                raise ValueError(f"{name}: values that BF16 cannot hold; the GPU kernel reads norms as BF16")
        case "vector":
            values = weights.vector(name).ravel()
        case "score":
            first, second = name.split("|")
            values = weights.vector(first).ravel() * weights.vector(second).ravel()
        case "experts" | "scales":
            values = np.stack([_expert(weights, place, name.format(k)) for k in range(experts)])
        case _:
            raise ValueError(f"{place} {name}: nothing of this kind")
    return values


def _expert(weights: Weights, place: str, name: str) -> NDArray[Any]:
    if name.endswith(".weight"):
        return np.ascontiguousarray(weights.matrix(name))
    found = weights.packed(name)
    return np.ascontiguousarray(found.packed if place == "experts" else found.scale)
