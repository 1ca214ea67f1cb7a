"""Runs a program by the GPU kernel, on a device that is a GPU or the emulator."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.device_protocol import Device, Peers
from stepkernel.cuda.dims import HEADER_BYTES, RECORD_BYTES
from stepkernel.cuda.host_weights import BF16, HostWeights, Loader
from stepkernel.cuda.plan import At, Plan, Word
from stepkernel.cuda.step_block import (
    BARRIER,
    FAILURE,
    MISMATCH,
    SILENT,
    STEP_WORDS,
    SYNC_BYTES,
    mailbox_bytes,
)
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import TAPS
from stepkernel.reference.executor import allocate_buffers

INPUTS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "lengths": np.int32,
    "page_table": np.int32,
    "slot_mapping": np.int64,
    "state_slots": np.int32,
    "accepted": np.int32,
}


class StepFailed(RuntimeError):
    """CTAs or ranks of a step waited in vain for each other; the device's buffers are lost."""


class CudaExecutor:
    """A program bound to weights and caches (`program.executor.Executor`).

    Caches and buffers of the caller are copied to the device before each call and back after it: right for comparing
    executors. A program that is one of several ranks needs `peers`, and all ranks must run the same steps.

    Raises ValueError for what the kernel cannot do.
    """

    def __init__(
        self, plan: Plan, weights: Weights | Loader, caches: Caches, device: Device, peers: Peers | None = None
    ) -> None:
        program = plan.program
        _check_ranks(plan, weights, peers)
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
        self._words: dict[str, int] = {}
        self._group: dict[str, int] = {}
        self._exchanges = 0
        if peers is None:
            self.sync = device.put("sync", np.zeros(SYNC_BYTES, np.uint8))
        else:
            boxes = peers.mailboxes(mailbox_bytes(peers.size, plan.slot_bytes), plan.geometry.multicast)
            self.sync = boxes.addresses[peers.rank]
            table = device.put("peers", np.array(boxes.addresses, np.int64), constant=True)
            self._group = {
                "rank": peers.rank,
                "peers": table,
                "multicast": boxes.multicast,
                "slot_bytes": plan.slot_bytes,
            }
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
        facts = _facts(self.plan, inputs)
        self._words = {**self._inputs, **self._group, "page_stride": stride, "slot_stride": columns, "facts": facts}

    def launch(self, first: int = 0, last: int | None = None) -> None:
        """Records first .. last - 1 on what lies on the device. Raises StepFailed."""
        self.device.launch(self.start(first, last))
        self.finish(first)

    def start(self, first: int = 0, last: int | None = None) -> list[int]:
        """Prepares a launch of records first .. last - 1 with the inputs that were set, and returns its arguments. Of
        several ranks each launch needs a call of its own, because it counts the exchanges. Raises StepFailed."""
        if self._failed:
            raise StepFailed("an earlier step failed; make a new executor")
        end = len(self.plan.records) if last is None else last
        numbers = [_number(record.words.get("number")) for record in self.plan.records[first:end]]
        exchanges = sorted({number for number in numbers if number is not None})
        words = dict(self._words)
        if exchanges:
            words["exchange"] = self._exchanges - exchanges[0]
            self._exchanges += len(exchanges)
        self.device.write(self._step, np.array([words.get(name, 0) for name in STEP_WORDS], np.int64))
        return [self._table, first, end, self._step, self.sync]

    def finish(self, first: int = 0) -> None:
        """After a launch: raises StepFailed if its results cannot be trusted."""
        failure = int(self.device.read(self.sync + FAILURE, (1,), np.int32)[0])
        if failure:
            self._failed = True
            raise StepFailed(f"{self.plan.records[first].stage} and later: {_reason(failure)}")

    def counters_are_zero(self) -> bool:
        """Whether the counters by which CTAs find out who comes last are as the next stage needs them."""
        return not any(
            self.device.read(self._addresses["scratch", name], (size,), np.uint8).any()
            for name, size in self.plan.scratch.items()
            if name.startswith("counters")
        )

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


def _number(word: Word | None) -> int | None:
    return word if isinstance(word, int) else None


def _facts(plan: Plan, inputs: StepInputs) -> int:
    """31 bits that stand for the step: the same on all ranks, or their numbers must not be summed."""
    found = zlib.crc32(repr((plan.program.config, plan.program.requests, plan.program.queries)).encode())
    for array in (inputs.token_ids, inputs.lengths):
        found = zlib.crc32(array.astype(np.int64).tobytes(), found)
    return (found & 0x7FFFFFFF) | 1


def _reason(failure: int) -> str:
    kind, about, by = failure & 255, failure >> 8 & 255, failure >> 16 & 255
    reasons = {
        BARRIER: "the CTAs did not all come to a barrier",
        SILENT: f"rank {about} did not answer rank {by}; all ranks stop",
        MISMATCH: f"rank {about} runs another step than rank {by}: other tokens or lengths; all ranks stop",
    }
    return reasons.get(kind, f"failure {failure:#x}")


def _check_ranks(plan: Plan, weights: Weights | Loader, peers: Peers | None) -> None:
    shard = plan.program.shard
    if (1 if peers is None else peers.size) != shard.size or (peers is not None and peers.rank != shard.rank):
        found = "no peers" if peers is None else f"peers of rank {peers.rank} of {peers.size}"
        raise ValueError(f"program of rank {shard.rank} of {shard.size}: {found}, expected those of its own group")
    if not isinstance(weights, Loader) and weights.shard != shard:
        raise ValueError(f"weights of {weights.shard}, program of {shard}: expected the same")


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
