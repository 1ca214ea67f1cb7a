"""Runs a program by the torch stages on the host, for comparing them with other executors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepkernel.cuda.torch_stages.binding import Binding, Experts, Inputs, Values
from stepkernel.cuda.torch_stages.experts import remember_order
from stepkernel.cuda.torch_stages.step import TorchStep
from stepkernel.cuda.torch_stages.tensors import HostTensors, host_caches
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import BLOCKS, Program
from stepkernel.program.stages import ExpertsDown, ExpertsUp
from stepkernel.reference.executor import allocate_buffers

TYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int64}


class TorchExecutor:
    """A program bound to weights and caches of the host (`program.executor.Executor`).

    What rows of padding write into the null page and the null slot is taken back, as others compare these as well.

    Raises ValueError for programs, caches and inputs that the torch stages do not know.
    """

    def __init__(self, program: Program, weights: Weights, caches: Caches, experts: Experts = "grouped") -> None:
        self.program, self.caches = program, caches
        room = max(1, program.config.max_positions)
        self._inputs = Inputs(program.requests, room, "cpu")
        self._step = TorchStep(Binding(program, HostTensors(weights), host_caches(caches), self._inputs, experts))
        self._buffers = allocate_buffers(program)

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        return self._buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        with self._prepared(inputs):
            self._step.run()
        self._fetch(self._step.values)
        return StepOutputs(self._buffers["logits"], self._buffers["tokens"][:, 0])

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        values = dict(self._tensors())
        stage = self.program.stages[index]
        if isinstance(stage, ExpertsUp | ExpertsDown):
            remember_order(values, values[stage.ids], torch.arange(stage.experts))
        with self._prepared(inputs), torch.inference_mode():
            self._step.runs[index](values)
        self._fetch(values)

    @contextmanager
    def _prepared(self, inputs: StepInputs) -> Iterator[None]:
        inputs.check(self.program, self.caches)
        self._inputs.set(inputs, self.caches.page_tokens)
        null = [array[0] for array in (*self.caches.latent, *self.caches.conv, *self.caches.recurrent)]
        kept = [array.copy() for array in null]
        yield
        for array, before in zip(null, kept, strict=True):
            array[...] = before

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for buffer in self.program.buffers:
            values = torch.from_numpy(self._buffers[buffer.name]).to(TYPES[buffer.dtype])
            if buffer.name == BLOCKS:
                yield from ((f"{BLOCKS}{index}", block) for index, block in enumerate(values))
            else:
                yield buffer.name, values

    def _fetch(self, values: Values) -> None:
        for buffer in self.program.buffers:
            target = self._buffers[buffer.name]
            if buffer.name == BLOCKS:
                for index, block in enumerate(target):
                    _store(block, values.get(f"{BLOCKS}{index}"))
            else:
                _store(target, values.get(buffer.name))


def _store(target: NDArray[Any], values: Tensor | None) -> None:
    if values is not None:
        target[...] = values.float().numpy() if target.dtype == np.float32 else values.numpy()
