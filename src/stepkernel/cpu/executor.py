"""Runs a program on the CPU: a table of records, a team of threads, and no Python inside a step."""

import os
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import interpreter, step, team
from stepkernel.cpu.adaptive import TeamSize
from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.layout import lay_out
from stepkernel.cpu.mailbox import Mailbox
from stepkernel.cpu.stages import exchange
from stepkernel.cpu.table import records
from stepkernel.cpu.weights import CpuWeights, float_buffers
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import Program

Activations = Literal["bf16", "float32"]
MAX_THREADS = 64


@dataclass(frozen=True)
class _Memory:
    """Everything a step addresses by number; kept alive by the executor and by each of its worker threads."""

    arena: Arena
    weights: CpuWeights
    caches: Caches
    table: NDArray[np.int64]
    block: NDArray[np.int64]
    control: NDArray[np.int32]
    scratch: NDArray[np.uint8]
    mailbox: Mailbox | None


class CpuExecutor:
    """A program bound to packed weights and an engine's caches.

    threads      team size at most; default: the processors this process may use. Fewer run while that is faster.
    activations  "bf16" rounds where the spec says; "float32" rounds nothing (accuracy checks).
    state_groups slot table of each KDA layer, for engines that keep several; default: one for all.
    mailbox      this rank's end of the exchanges, for a program that is one of several tensor-parallel ranks. All ranks
                 then make the same calls; a rank that does not answer ends them all with GroupError. Give each rank
                 processors of its own, or `threads` so that all ranks together have no more than there are.

    `run` is not thread-safe. `close` ends the team; it also ends when the executor is collected or the process exits.
    """

    def __init__(
        self,
        program: Program,
        weights: CpuWeights,
        caches: Caches,
        threads: int | None = None,
        activations: Activations = "bf16",
        state_groups: Sequence[int] = (),
        mailbox: Mailbox | None = None,
    ) -> None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        count = available if threads is None else threads
        if not 1 <= count <= MAX_THREADS:
            raise ValueError(f"threads {count}: supported are 1 to {MAX_THREADS}")
        if activations not in ("bf16", "float32"):
            raise ValueError(f"activations {activations!r}: supported are bf16 and float32")
        if program.rows > step.MAX_ROWS:
            raise ValueError(f"program of {program.rows} rows: a step takes up to {step.MAX_ROWS}")
        groups = tuple(state_groups) or (0,) * len(program.config.kda_layers)
        if len(groups) != len(program.config.kda_layers) or min(groups, default=0) < 0:
            raise ValueError(f"state_groups {groups}: expected one for each of {len(program.config.kda_layers)} layers")
        exchange.check(program, mailbox)
        self.program, self.caches, self.threads = program, caches, count
        self._groups = max(groups, default=0) + 1
        self.team_size = TeamSize(count)
        arena = Arena(block_bytes=4 << 20)
        self._layout = lay_out(program, arena)
        block_of_mailbox = 0 if mailbox is None else address(mailbox.block)
        staged = records(program, weights, self._layout, caches, groups, block_of_mailbox)
        exact = float_buffers(program)
        waits = exchange.waits(program.stages, exact)
        exchanges = [bool(exchange.pieces(stage, exact)) for stage in program.stages]
        self._exchanges = np.concatenate(([0], np.cumsum(exchanges))).tolist()
        self._names = [stage.name for stage in program.stages]
        self._digest = zlib.crc32(repr((program.config, program.requests, program.queries, activations)).encode())
        table = arena.array((sum(len(found) for found in staged), step.RECORD_WORDS), np.int64)
        self._ranges: list[tuple[int, int]] = []
        index = 0
        for found, wait in zip(staged, waits, strict=True):
            self._ranges.append((index, index + len(found)))
            for position, record in enumerate(found):
                words = record.words(wait and position == 0)
                table[index, : len(words)] = words
                index += 1
        private = max(record.scratch for found in staged for record in found)
        scratch = arena.array((count, -(-private // 128) * 128 + 128), np.uint8)
        control = arena.array((team.CONTROL_BYTES // 4,), np.int32)
        self._memory = _Memory(
            arena, weights, caches, table, arena.array((step.STEP_WORDS,), np.int64), control, scratch, mailbox
        )
        block = self._memory.block
        block[step.ROUNDS // 8] = int(activations == "bf16")
        block[step.PAGE_TOKENS // 8] = caches.page_tokens
        self._calls = (address(table), address(block), address(control))
        self._scratch = address(scratch)
        self._buffers = MappingProxyType(self._layout.buffers)
        interpreter.enter.prepare()
        workers = [
            threading.Thread(target=_work, args=(self._memory, thread), daemon=True, name=f"stepkernel-{thread}")
            for thread in range(1, count)
        ]
        for worker in workers:
            worker.start()
        self._stop = weakref.finalize(self, _stop, self._memory, workers)

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Each buffer as [rows, width], blocks as [copies, rows, width]; views of the executor's memory."""
        return self._buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step as one native call. Raises ValueError for inputs that would leave the caches, GroupError if the
        ranks of the program cannot go on."""
        threads = self.team_size.choose()
        taken = self._run(0, len(self._ranges), inputs, threads)
        self.team_size.record(threads, taken)
        return StepOutputs(self._buffers["logits"][: inputs.rows], self._buffers["tokens"][: inputs.rows, 0])

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        """One stage on the values that lie in `buffers`."""
        self._run(index, index + 1, inputs, self.threads)

    def close(self) -> None:
        self._stop()

    def _run(self, first: int, last: int, inputs: StepInputs, threads: int) -> int:
        """Runs stages first..last; returns nanoseconds."""
        if not self._stop.alive:
            raise ValueError("the executor is closed")
        if not inputs.rows:
            raise ValueError("token_ids: no rows, expected at least one")
        inputs.check(self.program, self.caches)
        _check_slots(inputs, self._groups)
        arrays = (
            np.ascontiguousarray(inputs.token_ids, np.int32),
            np.ascontiguousarray(inputs.lengths, np.int32),
            np.ascontiguousarray(inputs.page_table, np.int32),
            np.ascontiguousarray(inputs.slot_mapping, np.int64),
            np.ascontiguousarray(inputs.state_slots, np.int32),
            np.ascontiguousarray(inputs.accepted, np.int32),
        )
        tokens, lengths, pages, mapping, slots, accepted = (address(array) for array in arrays)
        block = self._memory.block
        block[: step.ROUNDS // 8] = (
            inputs.rows,
            inputs.requests,
            inputs.queries,
            tokens,
            lengths,
            pages,
            arrays[2].shape[1],
            mapping,
            slots,
            arrays[4].shape[-1],
            accepted,
        )
        block[step.FIRST // 8], block[step.LAST // 8] = self._ranges[first][0], self._ranges[last - 1][1]
        mailbox = self._memory.mailbox
        if mailbox is not None:
            mailbox.begin(self._exchanges[first], self._facts(first, last, inputs), self._names)
        start = time.perf_counter_ns()
        interpreter.enter(*self._calls, threads, 0, self._scratch)
        taken = time.perf_counter_ns() - start
        if mailbox is not None:
            mailbox.end(self._exchanges[last] - self._exchanges[first])
        return taken

    def _facts(self, first: int, last: int, inputs: StepInputs) -> int:
        """A positive number of 31 bits that stands for the step: the same on all ranks, or they compute nonsense."""
        found = zlib.crc32(f"{first} {last} {inputs.queries}".encode(), self._digest)
        for array in (inputs.token_ids, inputs.lengths):
            found = zlib.crc32(array.astype(np.int64).tobytes(), found)
        return (found & 0x7FFFFFFF) | 1


def _check_slots(inputs: StepInputs, groups: int) -> None:
    """The kernels trust the number of tables, and write every state of a request or none."""
    tables = inputs.state_slots.reshape(-1, *inputs.state_slots.shape[-2:])
    if len(tables) != groups:
        raise ValueError(f"state_slots {inputs.state_slots.shape}: expected tables for {groups} groups of layers")
    if tables.shape[2] > 1:
        live = tables > 0
        for group, request in np.argwhere(live.any(axis=2) != live.all(axis=2))[:1].tolist():
            row = tables[group, request].tolist()
            raise ValueError(f"state_slots[{request}] = {row}: all must be positive, or none (padding)")


def _work(memory: _Memory, thread: int) -> None:
    calls = (address(memory.table), address(memory.block), address(memory.control))
    interpreter.enter(*calls, 0, thread, address(memory.scratch[thread]))


def _stop(memory: _Memory, workers: list[threading.Thread]) -> None:
    memory.control[team.QUIT // 4] = 1
    interpreter.enter(address(memory.table), address(memory.block), address(memory.control), 0, 0, 0)
    for worker in workers:
        worker.join()
