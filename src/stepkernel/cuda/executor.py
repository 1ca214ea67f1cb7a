"""Runs a program by the GPU kernel on caches of the host: for comparing executors."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.bound_step import TYPES, BoundStep
from stepkernel.cuda.cache_map import allocate, by_place
from stepkernel.cuda.device_protocol import Device, Peers
from stepkernel.cuda.host_weights import HostWeights, Loader
from stepkernel.cuda.plan import Plan
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import TAPS
from stepkernel.reference.executor import allocate_buffers


class CudaExecutor(BoundStep):
    """A program bound to weights and caches (`program.executor.Executor`).

    Caches and buffers of the caller are copied to the device before each call and back after it: right for comparing
    executors; `decoder.DeviceDecoder` leaves them on the device. A program that is one of several ranks needs `peers`,
    and all ranks must run the same steps.

    Raises ValueError for what the kernel cannot do.
    """

    def __init__(
        self, plan: Plan, weights: Weights | Loader, caches: Caches, device: Device, peers: Peers | None = None
    ) -> None:
        _check_ranks(plan, weights, peers)
        loader = weights if isinstance(weights, Loader) else HostWeights(weights, device)
        super().__init__(plan, loader, allocate(caches, device), device, peers)
        self.caches = caches
        self._buffers = allocate_buffers(plan.program)

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        return self._buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step in one launch. Raises ValueError for inputs that do not fit, StepFailed if the launch gave up."""
        self._run(0, len(self.plan.records), inputs)
        rows, taps = inputs.rows, self._buffers.get(TAPS)
        kept = None if taps is None else taps[:rows]
        return StepOutputs(self._buffers["logits"][:rows], self._buffers["tokens"][:rows, 0], kept)

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        """One stage on what the buffers and caches hold."""
        self._run(*self.plan.ranges[index], inputs)

    def upload(self) -> None:
        """Buffers and caches to the device."""
        for name, buffer in self._buffers.items():
            self.device.write(self.address("buffer", name), buffer.astype(self._type(name)))
        self._each_cache(lambda address, array: self.device.write(address, np.ascontiguousarray(array)))

    def download(self) -> None:
        """Buffers and caches from the device."""
        for name, buffer in self._buffers.items():
            found = self.device.read(self.address("buffer", name), buffer.shape, self._type(name))
            buffer[...] = found.astype(buffer.dtype)
        self._each_cache(lambda address, array: np.copyto(array, self.device.read(address, array.shape, array.dtype)))

    def _run(self, first: int, last: int, inputs: StepInputs) -> None:
        self.set_inputs(inputs)
        self.upload()
        self.launch(first, last)
        self.download()

    def _each_cache(self, call: Callable[[int, NDArray[Any]], None]) -> None:
        for (place, index), array in by_place(self.caches).items():
            call(self.address(place, index), array)

    def _type(self, name: str) -> np.dtype[Any]:
        found: np.dtype[Any] = TYPES[self.program.buffer(name).dtype]
        return found


def _check_ranks(plan: Plan, weights: Weights | Loader, peers: Peers | None) -> None:
    shard = plan.program.shard
    if (1 if peers is None else peers.size) != shard.size or (peers is not None and peers.rank != shard.rank):
        found = "no peers" if peers is None else f"peers of rank {peers.rank} of {peers.size}"
        raise ValueError(f"program of rank {shard.rank} of {shard.size}: {found}, expected those of its own group")
    if not isinstance(weights, Loader) and weights.shard != shard:
        raise ValueError(f"weights of {weights.shard}, program of {shard}: expected the same")
