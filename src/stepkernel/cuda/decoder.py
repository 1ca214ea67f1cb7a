"""A model that lives on a device: weights, caches and states stay there, steps of several shapes work on them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.bound_step import BoundStep
from stepkernel.cuda.cache_map import CacheMap, allocate
from stepkernel.cuda.device_protocol import Device, Machine
from stepkernel.cuda.host_weights import HostWeights
from stepkernel.cuda.kernel_search import Built, KernelDirectory
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs


def choose(kernels: KernelDirectory, requests: int, page_tokens: int | None = None) -> list[Built]:
    """Steps that together decode up to `requests` requests and take prompts in, all with the same pages.

    One token of each request: the smallest step that holds them all, and what is smaller. Several tokens of a prompt:
    the smallest step for each number of tokens, if there is one; without any, prompts go one token at a time.

    Raises ValueError if the directory has no step that holds all requests.
    """
    built = kernels.built(page_tokens)
    fits = [b for b in built if b.shape.queries == 1 and b.shape.requests >= requests]
    if not fits:
        raise kernels.refusal(requests, page_tokens)
    largest = min(fits, key=lambda b: (b.shape.requests, -b.shape.grid))
    pages = largest.shape.page_tokens
    chosen: dict[tuple[int, int], Built] = {}
    for b in (b for b in built if b.shape.page_tokens == pages):
        shape = b.shape
        if shape.queries == 1 and shape.requests <= largest.shape.requests:
            chosen[shape.requests, 1] = b  # of several, that with the most CTAs, which comes last
        elif shape.queries > 1 and not any(q == shape.queries and r < shape.requests for r, q in chosen):
            chosen[shape.requests, shape.queries] = b
    return list(chosen.values())


class DeviceDecoder:
    """The steps of `steps` over one copy of weights and caches.

    given  shapes of the caches that are allocated on the device, zeroed; or where somebody else's lie

    `close` frees the device's memory.
    """

    def __init__(
        self, machine: Machine, directory: Path, steps: Sequence[Built], weights: Weights, given: Caches | CacheMap
    ):
        self._devices: list[Device] = []
        self._steps: dict[tuple[int, int], BoundStep] = {}
        self._names = {(b.shape.queries, b.shape.requests): b.spec.name for b in steps}
        try:
            for built in steps:
                self._devices.append(machine.load(directory, built.spec))
            first = self._devices[0]
            self.map = given if isinstance(given, CacheMap) else allocate(given, first)
            # How long the windows are is known to the caches alone; no kernel depends on it.
            window = self.map.shapes.conv[0].shape[1]
            loader = HostWeights(weights, first)
            for built, device in zip(steps, self._devices, strict=True):
                plan = replace(built.plan, geometry=replace(built.plan.geometry, window=window))
                step = BoundStep(plan, loader, self.map, device)
                self._steps[built.shape.queries, built.shape.requests] = step
        except BaseException:
            self.close()
            raise
        self._chunks = sorted({queries for queries, _ in self._steps}, reverse=True)

    def run(self, inputs: StepInputs, logits: bool = True) -> StepOutputs:
        """A step of one token of each request, by the smallest kernel that holds them. Without `logits`, none are read.

        Raises ValueError for inputs that do not fit, StepFailed if the launch gave up.
        """
        step = self._launch(inputs)
        rows = inputs.rows
        found = step.read_buffer("logits", rows if logits else 0)
        return StepOutputs(found, step.read_buffer("tokens", rows)[:, 0])

    def prefill(self, inputs: StepInputs) -> None:
        """Tokens of one request, in steps of as many of them as there are kernels for."""
        done, total = 0, inputs.queries
        while done < total:
            count = next(queries for queries in self._chunks if queries <= total - done)
            self._launch(_part(inputs, done, count))
            done += count

    def kernel(self, requests: int, queries: int = 1) -> str:
        """Name of the kernel that does such a step. Raises ValueError if none does."""
        return self._names[queries, self._fitting(requests, queries)]

    @property
    def caches(self) -> Caches:
        """Shapes and dtypes of the caches, without contents."""
        return self.map.shapes

    def last(self, buffer: str, rows: int) -> NDArray[Any]:
        """A buffer of the last step as float32."""
        return self._last.read_buffer(buffer, rows).astype(np.float32)

    def stage(self, name: str, reads: str, values: NDArray[np.float32], writes: str) -> NDArray[Any]:
        """A stage of one token of each request, from `values` in the buffer that it reads."""
        step = self._steps[1, self._fitting(len(values), 1)]
        index = next(i for i, stage in enumerate(step.program.stages) if stage.name == name)
        step.write_buffer(reads, values)
        step.launch(*step.plan.ranges[index])
        return step.read_buffer(writes, len(values))

    def clear_slot(self, slot: int) -> None:
        self.map.clear_slot(self._devices[0], slot)

    def close(self) -> None:
        for device in self._devices:
            device.close()
        self._devices.clear()
        self._steps.clear()

    def _launch(self, inputs: StepInputs) -> BoundStep:
        step = self._steps[inputs.queries, self._fitting(inputs.requests, inputs.queries)]
        step.set_inputs(inputs)
        step.launch()
        self._last = step
        return step

    def _fitting(self, requests: int, queries: int) -> int:
        """Requests of the smallest step that holds so many."""
        held = [r for q, r in self._steps if q == queries and r >= requests]
        if not held:
            found = ", ".join(f"{r}x{q}" for q, r in sorted(self._steps))
            raise ValueError(f"step of {requests} requests x {queries} queries: there are {found}")
        return min(held)


def _part(inputs: StepInputs, first: int, count: int) -> StepInputs:
    """Tokens first .. first + count - 1 of a request's step."""
    rows = slice(first, first + count)
    return replace(
        inputs,
        queries=count,
        token_ids=inputs.token_ids[rows],
        lengths=inputs.lengths - np.int32(inputs.queries - first - count),
        slot_mapping=inputs.slot_mapping[rows],
    )
