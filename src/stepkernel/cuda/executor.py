"""Runs a program by the GPU kernel, on a device that is a GPU or the emulator."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.dims import HEADER_BYTES, RECORD_BYTES
from stepkernel.cuda.plan import At, Plan, Word
from stepkernel.cuda.step_block import FAILURE, STEP_WORDS, SYNC_BYTES
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import TAPS
from stepkernel.reference.executor import allocate_buffers

BF16 = np.dtype(ml_dtypes.bfloat16)
INPUTS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "lengths": np.int32,
    "page_table": np.int32,
    "slot_mapping": np.int64,
    "state_slots": np.int32,
    "accepted": np.int32,
}


class StepFailed(RuntimeError):
    """CTAs of a step waited in vain for each other; the device's buffers are lost."""


class Device(Protocol):
    """Memory and launches. Addresses are plain numbers."""

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int: ...

    def write(self, address: int, values: NDArray[Any]) -> None: ...

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]: ...

    def launch(self, arguments: list[int]) -> None:
        """Runs the kernel of the plan and waits for it."""
        ...


@runtime_checkable
class Loader(Protocol):
    """Puts weights on a device."""

    def load(self, place: str, name: str, experts: int) -> int:
        """Address of what a record names (`plan.At`)."""
        ...


class CudaExecutor:
    """A program bound to weights and caches (`program.executor.Executor`).

    Caches and buffers of the caller are copied to the device before each call and back after it: right for comparing
    executors. Raises ValueError for what the kernel cannot do.
    """

    def __init__(self, plan: Plan, weights: Weights | Loader, caches: Caches, device: Device) -> None:
        program = plan.program
        if program.shard.size != 1:
            raise ValueError(
                f"program of rank {program.shard.rank} of {program.shard.size}: the GPU kernel runs 1 rank"
            )
        _check_caches(plan, caches)
        self.program, self.plan, self.caches, self.device = program, plan, caches, device
        self._buffers = allocate_buffers(program)
        self._types = {
            b.name: {"bf16": BF16, "f32": np.dtype("f4"), "i32": np.dtype("i4")}[b.dtype] for b in program.buffers
        }
        self._addresses: dict[tuple[str, str], int] = {}
        for name, buffer in self._buffers.items():
            self._addresses["buffer", name] = device.put(name, np.zeros(buffer.shape, self._types[name]))
        for place, arrays in (("latent", caches.latent), ("conv", caches.conv), ("state", caches.recurrent)):
            for index, array in enumerate(arrays):
                self._addresses[place, str(index)] = device.put(f"{place} {index}", np.ascontiguousarray(array))
        for name, size in plan.scratch.items():
            fill = 0 if name.startswith("counters") else 0xFF
            self._addresses["scratch", name] = device.put(f"scratch of {name}", np.full(size, fill, np.uint8))
        self._pages = max(1, -(-program.config.max_positions // plan.geometry.page_tokens))
        if caches.latent:
            self._pages = min(self._pages, caches.pages)
        self._columns = plan.geometry.window - program.config.linear_attention.conv_width + 2
        self._inputs = {name: device.put(name, np.zeros(self._room(name), kind)) for name, kind in INPUTS.items()}
        self._addresses["slots", "0"] = self._inputs["state_slots"]
        self._step = device.put("step", np.zeros(len(STEP_WORDS), np.int64))
        self._sync = device.put("sync", np.zeros(SYNC_BYTES, np.uint8))
        self._loader = weights if isinstance(weights, Loader) else HostWeights(weights, device)
        self._table = device.put("table", self._encode(), constant=True)
        self._failed = False

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
            self.device.write(self._addresses["buffer", name], buffer.astype(self._types[name]))
        self._each_cache(lambda address, array: self.device.write(address, np.ascontiguousarray(array)))

    def download(self) -> None:
        """Buffers and caches from the device."""
        for name, buffer in self._buffers.items():
            found = self.device.read(self._addresses["buffer", name], buffer.shape, self._types[name])
            buffer[...] = found.astype(buffer.dtype)
        self._each_cache(lambda address, array: np.copyto(array, self.device.read(address, array.shape, array.dtype)))

    def set_inputs(self, inputs: StepInputs) -> None:
        """The step's inputs to the device; requests that the step does not have become padding."""
        program = self.program
        inputs.check(program, self.caches)
        if inputs.page_table.shape[1] > self._pages:
            raise ValueError(f"page_table: {inputs.page_table.shape[1]} pages, prepared for {self._pages}")
        columns = inputs.state_slots.shape[-1]
        if inputs.state_slots.ndim != 2 or columns > max(1, self._columns):
            raise ValueError(f"state_slots {inputs.state_slots.shape}: [requests, up to {self._columns}] is supported")
        missing = program.requests - inputs.requests
        fill = {"slot_mapping": -1, "accepted": 1}
        stride = inputs.page_table.shape[1]
        for name, address in self._inputs.items():
            values = np.asarray(getattr(inputs, name), INPUTS[name])
            lacking = missing * (program.queries if name in ("token_ids", "slot_mapping") else 1)
            rest = np.full((lacking, *values.shape[1:]), fill.get(name, 0), values.dtype)
            self.device.write(address, np.ascontiguousarray(np.concatenate([values, rest])))
        numbers = {"page_stride": stride, "slot_stride": columns}
        block = [numbers.get(name, self._inputs.get(name, 0)) for name in STEP_WORDS]
        self.device.write(self._step, np.array(block, np.int64))

    def launch(self, first: int = 0, last: int | None = None) -> None:
        """Records first .. last - 1 on what lies on the device. Raises StepFailed."""
        if self._failed:
            raise StepFailed("an earlier step failed; make a new executor")
        end = len(self.plan.records) if last is None else last
        self.device.launch([self._table, first, end, self._step, self._sync])
        if self.device.read(self._sync + FAILURE, (1,), np.int32)[0]:
            self._failed = True
            raise StepFailed(f"{self.plan.records[first].stage} and later: the CTAs did not all come to a barrier")

    def counters_are_zero(self) -> bool:
        """Whether the counters by which CTAs find out who comes last are as the next stage needs them."""
        return not any(
            self.device.read(self._addresses["scratch", name], (size,), np.uint8).any()
            for name, size in self.plan.scratch.items()
            if name.startswith("counters")
        )

    def arguments(self) -> list[int]:
        """The kernel's arguments for the whole step on what lies on the device."""
        return [self._table, 0, len(self.plan.records), self._step, self._sync]

    def _run(self, first: int, last: int, inputs: StepInputs) -> None:
        self.set_inputs(inputs)
        self.upload()
        self.launch(first, last)
        self.download()

    def _each_cache(self, call: Callable[[int, NDArray[Any]], None]) -> None:
        for place, arrays in (
            ("latent", self.caches.latent),
            ("conv", self.caches.conv),
            ("state", self.caches.recurrent),
        ):
            for index, array in enumerate(arrays):
                call(self._addresses[place, str(index)], array)

    def _room(self, name: str) -> int:
        """Values that an input may have."""
        per_request = {"page_table": self._pages, "state_slots": max(1, self._columns)}
        if name in ("token_ids", "slot_mapping"):
            return self.program.rows
        return self.program.requests * per_request.get(name, 1)

    def _encode(self) -> NDArray[np.int64]:
        table = np.zeros((len(self.plan.records), RECORD_BYTES // 8), np.int64)
        for line, record in zip(table, self.plan.records, strict=True):
            dims = self.plan.codes[record.code]
            line[:1] = np.array([record.code, int(record.wait)], np.int32).view(np.int64)
            start = HEADER_BYTES // 8
            line[start : start + len(dims.words)] = [self._address(record.words[name]) for name in dims.words]
        return table

    def _address(self, word: Word) -> int:
        if not isinstance(word, At):
            return word
        key = (word.place, word.name)
        if key not in self._addresses:
            self._addresses[key] = self._loader.load(*key, self.program.config.num_experts)
        return self._addresses[key] + word.offset


class HostWeights:
    """Copies weights from the host, as the stages want them."""

    def __init__(self, weights: Weights, device: Device) -> None:
        self._weights, self._device = weights, device

    def load(self, place: str, name: str, experts: int) -> int:
        weights = self._weights
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
                values = np.stack([self._expert(place, name.format(k)) for k in range(experts)])
            case _:
                raise ValueError(f"{place} {name}: nothing of this kind")
        return self._device.put(name if place != "scales" else f"scales of {name}", values, constant=True)

    def _expert(self, place: str, name: str) -> NDArray[Any]:
        if name.endswith(".weight"):
            return np.ascontiguousarray(self._weights.matrix(name))
        found = self._weights.packed(name)
        return np.ascontiguousarray(found.packed if place == "experts" else found.scale)


def _check_caches(plan: Plan, caches: Caches) -> None:
    geometry = plan.geometry
    for index, latent in enumerate(caches.latent):
        if latent.dtype != BF16:
            raise ValueError(f"latent cache {index}: dtype {latent.dtype}, the GPU kernel supports bfloat16")
    for index, conv in enumerate(caches.conv):
        if conv.dtype != BF16 or conv.shape[1] != geometry.window:
            found = f"{conv.dtype} with {conv.shape[1]} rows"
            raise ValueError(f"convolution state {index}: {found}, planned for bfloat16 with {geometry.window}")
    if caches.records:
        raise ValueError("records: the GPU step keeps a state for each token; supported are per-position states")
    for index, state in enumerate(caches.recurrent):
        if state.dtype != np.float32:
            raise ValueError(f"recurrent state {index}: dtype {state.dtype}, supported is float32")
    if caches.latent and caches.page_tokens != geometry.page_tokens:
        raise ValueError(f"pages of {caches.page_tokens} tokens, planned for {geometry.page_tokens}")
