"""Launches of the GPU step kernel over vLLM's caches. Not run on a GPU yet."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepkernel.cuda.cache_map import CacheMap
from stepkernel.cuda.decoder import DeviceDecoder, choose
from stepkernel.cuda.device_protocol import Machine
from stepkernel.cuda.kernel_search import KernelDirectory
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import Program
from stepkernel.vllm_plugin.executors import StepExecutor
from stepkernel.vllm_plugin.layers import KdaLayer, MlaLayer

TYPES = {torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float32: np.dtype(np.float32)}


class GpuExecutors:
    """`executors.Executors` by the kernels of a directory, on weights that are copied to the GPU when caches are bound.

    finished  waits for what others have started on the GPU: kernels here run on its default stream

    `make` raises ValueError if there is no kernel for pages of vLLM's size, or the caches lie as none can use them.
    """

    def __init__(self, machine: Machine, kernels: Path, weights: Weights, finished: Callable[[], object]) -> None:
        self._machine, self._kernels, self._weights, self._finished = machine, kernels, weights, finished

    def prepare(self, program: Program) -> None:
        """Nothing: a rank is alone."""

    def make(
        self, program: Program, kda: Sequence[KdaLayer], mla: Sequence[MlaLayer], groups: Sequence[int]
    ) -> StepExecutor:
        caches = cache_map([x.kv_cache for x in mla], [x.kv_cache for x in kda], groups)
        directory = KernelDirectory(self._kernels, self._machine, program.config, program.shard)
        steps = choose(directory, program.requests, caches.shapes.page_tokens)
        decoder = DeviceDecoder(self._machine, self._kernels, steps, self._weights, caches)
        return GpuExecutor(program, decoder, self._finished)

    def close(self) -> None:
        """What `make` made is closed by its owner."""


class GpuExecutor:
    """`executors.StepExecutor` of one token of each request."""

    def __init__(self, program: Program, decoder: DeviceDecoder, finished: Callable[[], object]) -> None:
        self.program, self.caches = program, decoder.caches
        self._decoder, self._finished = decoder, finished
        self._buffers = {
            name: np.zeros((program.rows, program.buffer(name).width), np.float32) for name in ("hidden", "logits")
        }

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        return self._buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        self._finished()
        outputs = self._decoder.run(inputs)
        self._buffers["hidden"][: inputs.rows] = self._decoder.last("hidden", inputs.rows)
        return outputs

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        self._finished()
        name = self.program.stages[index].name
        rows = inputs.rows
        self._buffers["logits"][:rows] = self._decoder.stage(name, "hidden", self._buffers["hidden"][:rows], "logits")

    def close(self) -> None:
        self._decoder.close()


def cache_map(latent: Sequence[Tensor], states: Sequence[Sequence[Tensor]], groups: Sequence[int]) -> CacheMap:
    """Where tensors lie. Slots may be any multiple of 16 bytes apart: vLLM keeps a slot's window and state together.

    Raises ValueError for tensors with gaps inside of a slot, between pages, or at odd addresses.
    """
    tensors = {("latent", str(i)): cache for i, cache in enumerate(latent)}
    tensors |= {("conv", str(i)): window for i, (window, _) in enumerate(states)}
    tensors |= {("state", str(i)): state for i, (_, state) in enumerate(states)}
    slots = {key: t.stride(0) * t.element_size() for key, t in tensors.items() if key[0] != "latent"}
    for (place, index), tensor in tensors.items():
        whole = tensor.is_contiguous() if place == "latent" else tensor[:1].is_contiguous()
        apart = slots.get((place, index), 16)
        if not whole or tensor.data_ptr() % 16 or apart % 16:
            raise ValueError(
                f"{place} cache {index}: shape {tuple(tensor.shape)}, strides {tensor.stride()}; the GPU kernel needs "
                "pages and slots without gaps inside, at multiples of 16 bytes"
            )
    shapes = Caches(
        [_outline(cache) for cache in latent],
        [_outline(window) for window, _ in states],
        [_outline(state) for _, state in states],
    )
    return CacheMap(shapes, {key: t.data_ptr() for key, t in tensors.items()}, slots, tuple(groups))


def _outline(tensor: Tensor) -> NDArray[Any]:
    kind = TYPES.get(tensor.dtype, np.dtype(np.uint8))  # another type is refused where the kernels are looked for
    return np.broadcast_to(np.zeros((), kind), tuple(tensor.shape))
