"""A plan bound to addresses on a device: takes a step's inputs, launches, and says if
the results can be trusted."""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.cache_map import CacheMap
from stepkernel.cuda.device_protocol import Device, Peers
from stepkernel.cuda.dims import HEADER_BYTES, RECORD_BYTES, posting_of
from stepkernel.cuda.host_weights import BF16, Loader
from stepkernel.cuda.plan import At, Plan, Record, Word
from stepkernel.cuda.step_block import (
    AHEAD,
    AHEAD_WORDS,
    BARRIER,
    FAILURE,
    MISMATCH,
    SILENT,
    STEP_WORDS,
    SYNC_BYTES,
    mailbox_bytes,
)
from stepkernel.program.inputs import StepInputs

INPUTS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "lengths": np.int32,
    "page_table": np.int32,
    "slot_mapping": np.int64,
    "state_slots": np.int32,
    "accepted": np.int32,
}
TYPES = {"bf16": BF16, "f32": np.dtype("f4"), "i32": np.dtype("i4")}


class StepFailed(RuntimeError):
    """CTAs or ranks of a step waited in vain for each other; the device's buffers are lost."""


class BoundStep:
    """Buffers, scratch and the table of one plan, over caches and weights that other steps may share.

    A program that is one of several ranks needs `peers`, and all ranks must run the same steps. A table of state slots
    may have one plane for each group of layers that `caches` names.

    Raises ValueError for what the kernel cannot do.
    """

    def __init__(
        self, plan: Plan, weights: Loader, caches: CacheMap, device: Device, peers: Peers | None = None
    ) -> None:
        program, config = plan.program, plan.program.config
        caches.check(plan.geometry, config.linear_attention.conv_width)
        self.program, self.plan, self.device, self.map = program, plan, device, caches
        self._weights = weights
        self._addresses: dict[tuple[str, str], int] = dict(caches.addresses)
        for buffer in program.buffers:
            # A step reads nothing of a buffer that it has not written; if it did, it would find NaN.
            size = buffer.copies * program.rows * buffer.width * TYPES[buffer.dtype].itemsize
            self._addresses["buffer", buffer.name] = device.put(buffer.name, np.full(size, 0xFF, np.uint8))
        for name, size in plan.scratch.items():
            fill = 0 if name.startswith("counters") else 0xFF
            self._addresses["scratch", name] = device.put(f"scratch of {name}", np.full(size, fill, np.uint8))
        self._pages = max(1, -(-config.max_positions // plan.geometry.page_tokens))
        if caches.shapes.latent:
            self._pages = min(self._pages, caches.shapes.pages)
        self._columns = max(1, plan.geometry.window - config.linear_attention.conv_width + 2)
        self._inputs = {name: device.put(name, np.zeros(self._room(name), kind)) for name, kind in INPUTS.items()}
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
        self._table = device.put("table", self._encode(), constant=True)
        self._failed = False

    def address(self, place: str, name: str) -> int:
        """Of a buffer, a cache or scratch."""
        return self._addresses[place, name]

    def set_inputs(self, inputs: StepInputs) -> None:
        """The step's inputs to the device; requests that the step does not have become padding."""
        program = self.program
        inputs.check(program, self.map.shapes)
        if inputs.settles:
            raise ValueError("step that settles states recovered from records: these kernels record every step")
        if inputs.recovers != self.plan.geometry.recovers:
            ways = ["a state for each token", "states recovered from records"]
            found, planned = ways[inputs.recovers], ways[not inputs.recovers]
            raise ValueError(f"step with {found}, the kernel was planned for {planned}")
        if inputs.page_table.shape[1] > self._pages:
            raise ValueError(f"page_table: {inputs.page_table.shape[1]} pages, prepared for {self._pages}")
        slots = inputs.state_slots
        planes, columns = (1 if slots.ndim == 2 else slots.shape[0]), slots.shape[-1]
        if planes != self.map.planes or columns > self._columns:
            expected = f"[requests, up to {self._columns}]"
            if self.map.planes > 1:
                expected = f"[{self.map.planes}, requests, up to {self._columns}]"
            raise ValueError(f"state_slots {slots.shape}: {expected} is supported")
        missing = program.requests - inputs.requests
        for name, address in self._inputs.items():
            values = np.asarray(getattr(inputs, name), INPUTS[name])
            if name == "state_slots":
                for plane, table in enumerate(values.reshape(planes, inputs.requests, columns)):
                    self._write(address + plane * self._plane_bytes, table, missing, 0)
            else:
                lacking = missing * (program.queries if name in ("token_ids", "slot_mapping") else 1)
                self._write(address, values, lacking, {"slot_mapping": -1, "accepted": 1}.get(name, 0))
        strides = {"page_stride": inputs.page_table.shape[1], "slot_stride": columns}
        self._words = {**self._inputs, **self._group, **strides, "facts": _facts(self.plan, inputs)}
        query, latent = self.map.shapes.query_scale, self.map.shapes.latent_scale
        factors = {"query_factor": 1 / query, "latent_factor": 1 / latent, "score_factor": query * latent}
        for name, value in {**factors, "latent_scale": latent}.items():
            self._words[name] = int(np.float32(value).view(np.int32))

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
        records, codes = self.plan.records[first:end], self.plan.codes
        exchanges = sorted({_number(r.words["number"]) for r in records if posting_of(codes[r.code])})
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

    def read_buffer(self, name: str, rows: int) -> NDArray[Any]:
        """The first `rows` rows of a buffer, in its own type."""
        buffer = self.program.buffer(name)
        return self.device.read(self._addresses["buffer", name], (rows, buffer.width), TYPES[buffer.dtype])

    def write_buffer(self, name: str, values: NDArray[Any]) -> None:
        """The first rows of a buffer."""
        kind = TYPES[self.program.buffer(name).dtype]
        self.device.write(self._addresses["buffer", name], values.astype(kind))

    def counters_are_zero(self) -> bool:
        """Whether the counters by which CTAs find out who comes last are as the next stage needs them."""
        return not any(
            self.device.read(self._addresses["scratch", name], (size,), np.uint8).any()
            for name, size in self.plan.scratch.items()
            if name.startswith("counters")
        )

    def _write(self, address: int, values: NDArray[np.generic], lacking: int, fill: int) -> None:
        rest = np.full((lacking, *values.shape[1:]), fill, values.dtype)
        self.device.write(address, np.ascontiguousarray(np.concatenate([values, rest])))

    @property
    def _plane_bytes(self) -> int:
        """From one table of state slots to the next."""
        return self.program.requests * self._columns * 4

    def _room(self, name: str) -> int:
        """Values that an input may have."""
        per_request = {"page_table": self._pages, "state_slots": self._columns * self.map.planes}
        if name in ("token_ids", "slot_mapping"):
            return self.program.rows
        return self.program.requests * per_request.get(name, 1)

    def _encode(self) -> NDArray[np.int64]:
        table = np.zeros((len(self.plan.records), RECORD_BYTES // 8), np.int64)
        for line, record in zip(table, self.plan.records, strict=True):
            header = [record.code, int(record.wait) + 2 * record.opens, *record.fetch]
            line[: HEADER_BYTES // 8] = np.array(header, np.int32).view(np.int64)
            start, words = HEADER_BYTES // 8, self._values(record)
            line[start : start + len(words)] = words
            if record.ahead is not None:
                line[AHEAD // 8 :] = [self._address(getattr(record.ahead, name)) for name in AHEAD_WORDS]
        return table

    def _values(self, record: Record) -> list[int]:
        """A record's words; what lies between two slots of a cache is for the caches to say."""
        names = self.plan.codes[record.code].words
        known = {name: self._address(record.words[name]) for name in names if name != "slots"}
        for place in ("conv", "state", "records"):
            at = record.words.get(place)
            if isinstance(at, At) and at.place == place:
                known[f"{place}_slot"] = self.map.slot_bytes[at.place, at.name]
                known["slots"] = self._inputs["state_slots"] + self.map.groups[int(at.name)] * self._plane_bytes
        return [known[name] for name in names]

    def _address(self, word: Word) -> int:
        if not isinstance(word, At):
            return word
        key = (word.place, word.name)
        if key not in self._addresses:
            self._addresses[key] = self._weights.load(*key, self.program.config.num_experts)
        return self._addresses[key] + word.offset


def _number(word: Word) -> int:
    assert isinstance(word, int)
    return word


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
