"""A stand-in for a GPU: memory at addresses of its own, and launches by the reference instead of the kernel.

It takes a launch as the kernel does: from the step block it reads where the inputs lie, from the table where the caches
and the logits are, so what an executor puts there must be right. What the kernel itself computes is tested elsewhere.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.cache_map import E4M3
from stepkernel.cuda.dims import HEADER_BYTES, RECORD_BYTES, AttendDims, KdaDims
from stepkernel.cuda.host_weights import BF16
from stepkernel.cuda.spec import KernelSpec
from stepkernel.cuda.step_block import STEP_WORDS
from stepkernel.model.shard import Shard
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.stages import Linear
from stepkernel.reference.executor import ReferenceExecutor

NAN = 0xFF  # in every byte: NaN in all formats of caches


@dataclass
class HostMachine:
    """`device_protocol.Machine`; all that is allocated as zeros starts as NaN, since nobody may count on it: states are
    cleared when a request is admitted."""

    weights: Weights
    arch: str = "sm_90a"
    name: str = "a stand-in"
    fits: int = 132
    blocks: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)
    _top: int = 1 << 20

    def load(self, directory: Path, spec: KernelSpec) -> "HostDevice":
        return HostDevice(self, spec)

    def copy_gbps(self) -> float:
        return 4000.0

    def allocate(self, content: NDArray[np.uint8]) -> int:
        address, self._top = self._top, self._top + -(-len(content) // 256 + 1) * 256 + 256
        self.blocks[address] = content
        return address

    def view(self, address: int, size: int | None = None) -> NDArray[np.uint8]:
        """Up to the end of the allocation if no size is given."""
        start = max(a for a in self.blocks if a <= address)
        block = self.blocks[start][address - start :]
        assert size is None or size <= len(block), f"{size} bytes at {address:#x}, {len(block)} are there"
        return block if size is None else block[:size]


class HostDevice:
    """`device_protocol.Device` for whole steps, and for the head."""

    def __init__(self, machine: HostMachine, spec: KernelSpec) -> None:
        self.machine, self.spec = machine, spec
        attend = next(dims for dims in spec.codes if isinstance(dims, AttendDims))
        kda = next(dims for dims in spec.codes if isinstance(dims, KdaDims))
        self._page_tokens = attend.page_tokens
        self._latents = E4M3 if attend.fp8 else BF16
        self._states = BF16 if kda.bf16_states else np.dtype(np.float32)
        self._program = build_program(machine.weights.config, Shard(), attend.requests, attend.queries)
        self._mine: list[int] = []

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int:
        self._mine.append(self.machine.allocate(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy()))
        return self._mine[-1]

    def zeros(self, name: str, size: int) -> int:
        return self.put(name, np.full(size, NAN, np.uint8))

    def clear(self, address: int, size: int) -> None:
        self.machine.view(address, size)[:] = 0

    def write(self, address: int, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.machine.view(address, len(data))[:] = data

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.machine.view(address, size).copy().view(dtype).reshape(shape)

    def close(self) -> None:
        for address in self._mine:
            del self.machine.blocks[address]
        self._mine.clear()

    def launch(self, arguments: list[int]) -> None:
        table, first, last, step, _ = arguments
        if last - first == 1:
            self._head(self._record(table + first * RECORD_BYTES))
            return
        self.machine.launched.append(self.spec.name)
        records = [self._record(table + i * RECORD_BYTES) for i in range(last)]
        words = dict(zip(STEP_WORDS, self._int64(step, len(STEP_WORDS)), strict=True))
        caches = self._caches(records)
        slots = sorted({int(r["slots"]) for _, r in records if "slots" in r})
        reference = ReferenceExecutor(self._program, self.machine.weights, caches)
        outputs = reference.run(self._inputs(words, slots[0]))
        (kind, head), (_, argmax) = records[-2:]
        assert kind == "linear"
        self.write(head["x"], reference.buffers["hidden"].astype(BF16))
        self.write(argmax["logits"], outputs.logits)
        self.write(argmax["out"], outputs.tokens)

    def _head(self, record: tuple[str, dict[str, int]]) -> None:
        """The one stage that is run alone: logits of the rows that lie in its buffer."""
        kind, words = record
        (part,) = next(
            stage for stage in self._program.stages if isinstance(stage, Linear) and stage.name == "head"
        ).parts
        assert (kind, words["outputs"]) == ("linear", part.matrix.rows)
        hidden = self.read(words["x"], (self._program.rows, part.matrix.columns), BF16).astype(np.float32)
        self.write(words["out"], hidden @ self.machine.weights.matrix(part.matrix.name).astype(np.float32).T)

    def _record(self, address: int) -> tuple[str, dict[str, int]]:
        code = int(self.read(address, (1,), np.int32)[0])
        dims = self.spec.codes[code]
        return dims.kind, dict(zip(dims.words, self._int64(address + HEADER_BYTES, len(dims.words)), strict=True))

    def _int64(self, address: int, count: int) -> list[int]:
        return [int(x) for x in self.read(address, (count,), np.int64)]

    def _caches(self, records: list[tuple[str, dict[str, int]]]) -> Caches:
        config = self._program.config
        heads, dim = config.linear_attention.num_heads, config.linear_attention.head_dim
        window = (config.linear_attention.conv_width - 1, 3 * heads * dim)
        latent, conv, state = [], [], []
        for kind, words in records:
            if kind == "latent":
                rows = self.machine.view(words["cache"]).view(self._latents)
                latent.append(rows.reshape(-1, self._page_tokens, config.latent_row))
            elif kind == "kda":
                conv.append(self._slots(words["conv"], words["conv_slot"], window, BF16))
                state.append(self._slots(words["state"], words["state_slot"], (heads, dim, dim), self._states))
        return Caches(latent, conv, state)

    def _slots(self, address: int, slot_bytes: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The first bytes of each slot, to be written as well."""
        block = self.machine.view(address)
        size = int(np.prod(shape)) * dtype.itemsize
        count = 1 + (len(block) - size) // slot_bytes
        slots = np.lib.stride_tricks.as_strided(block, (count, size), (slot_bytes, 1))
        return slots.view(dtype).reshape(count, *shape)

    def _inputs(self, words: dict[str, int], slots: int) -> StepInputs:
        program = self._program
        requests, rows = program.requests, program.rows
        return StepInputs(
            program.queries,
            self.read(words["token_ids"], (rows,), np.int32),
            self.read(words["lengths"], (requests,), np.int32),
            self.read(words["page_table"], (requests, words["page_stride"]), np.int32),
            self.read(words["slot_mapping"], (rows,), np.int64),
            self.read(slots, (requests, words["slot_stride"]), np.int32),
            self.read(words["accepted"], (requests,), np.int32),
        )
