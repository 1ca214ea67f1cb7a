"""Runs a program on the CPU: a table of records, a team of threads, and no Python inside a step."""

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import step
from stepkernel.cpu.adaptive import TeamSize
from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.block import Activations, StepBlock
from stepkernel.cpu.crew import Crew, Prepared
from stepkernel.cpu.layout import lay_out
from stepkernel.cpu.mailbox import Mailbox
from stepkernel.cpu.stages import exchange
from stepkernel.cpu.table import fill_table, records, thread_scratch
from stepkernel.cpu.weights import CpuWeights, float_buffers
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import TAPS, Program


class CpuExecutor:
    """A program bound to packed weights and an engine's caches.

    threads      team size at most; default: the processors this process may use. Fewer run while that is faster.
    activations  "bf16" rounds where the spec says; "float32" rounds nothing (accuracy checks).
    state_groups slot table of each KDA layer, for engines that keep several; default: one for all.
    mailbox      this rank's end of the exchanges, for a program that is one of several tensor-parallel ranks. All ranks
                 then make the same calls; a rank that does not answer ends them all with GroupError. Give each rank
                 processors of its own, or `threads` so that all ranks together have no more than there are.
    crew         threads shared with other executors, which `close` leaves alone; default: `threads` of its own.

    A step may have fewer queries than the program. `run` is not thread-safe. `close` ends the executor's own threads;
    they also end when the executor is collected or the process exits.
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
        crew: Crew | None = None,
    ) -> None:
        if activations not in ("bf16", "float32"):
            raise ValueError(f"activations {activations!r}: supported are bf16 and float32")
        if program.rows > step.MAX_ROWS:
            raise ValueError(f"program of {program.rows} rows: a step takes up to {step.MAX_ROWS}")
        groups = tuple(state_groups) or (0,) * len(program.config.kda_layers)
        if len(groups) != len(program.config.kda_layers) or min(groups, default=0) < 0:
            raise ValueError(f"state_groups {groups}: expected one for each of {len(program.config.kda_layers)} layers")
        exchange.check(program, mailbox)
        self.program, self.caches = program, caches
        self._groups = max(groups, default=0) + 1
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
        table, self._ranges = fill_table(staged, waits, arena)
        self._block = StepBlock(caches, activations, arena)
        # A step addresses all of this by number.
        self._alive = (arena, weights, mailbox)
        self._mailbox = mailbox
        self._buffers = MappingProxyType(self._layout.buffers)
        self._owns_crew = crew is None
        self.crew = Crew(threads) if crew is None else crew
        self.threads = self.crew.threads
        self.team_size = TeamSize(self.threads)
        self._prepared = Prepared(table, thread_scratch(staged, self.threads, arena))
        self._closed = False

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """Each buffer as [rows, width], blocks as [copies, rows, width]; views of the executor's memory."""
        return self._buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step as one native call. Raises ValueError for inputs that would leave the caches, GroupError if the
        ranks of the program cannot go on."""
        threads = self.team_size.choose((inputs.requests, inputs.queries))
        self.team_size.record(threads, self._run(0, len(self._ranges), inputs, threads))
        rows, taps = inputs.rows, self._buffers.get(TAPS)
        kept = None if taps is None else taps[:rows]
        return StepOutputs(self._buffers["logits"][:rows], self._buffers["tokens"][:rows, 0], kept)

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        """One stage on the values that lie in `buffers`."""
        self._run(index, index + 1, inputs, self.threads)

    def close(self) -> None:
        self._closed = True
        if self._owns_crew:
            self.crew.close()

    def _run(self, first: int, last: int, inputs: StepInputs, threads: int) -> int:
        """Runs stages first..last; returns nanoseconds."""
        if self._closed:
            raise ValueError("the executor is closed")
        if not inputs.rows:
            raise ValueError("token_ids: no rows, expected at least one")
        inputs.check(self.program, self.caches, fewer_queries=True)
        _check_slots(inputs, self._groups)
        block = self._block
        block.fill(inputs)
        block.put(step.STATE_SLOTS, inputs.state_slots)
        block.put(step.ACCEPTED, inputs.accepted)
        block.set(step.STATE_COLUMNS, inputs.state_slots.shape[-1])
        block.set(step.RECOVERS, int(inputs.recovers) + int(inputs.settles))
        block.set(step.FIRST, self._ranges[first][0])
        block.set(step.LAST, self._ranges[last - 1][1])
        mailbox = self._mailbox
        if mailbox is not None:
            mailbox.begin(self._exchanges[first], self._facts(first, last, inputs), self._names)
        taken = self.crew.call(self._prepared, block.address, threads)
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
