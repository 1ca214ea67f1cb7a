"""Draft rounds on the CPU: context and block of one round as one native call, on the threads of the target's step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import step
from stepkernel.cpu.adaptive import TeamSize
from stepkernel.cpu.arena import Arena
from stepkernel.cpu.block import Activations, StepBlock
from stepkernel.cpu.crew import Crew, Prepared
from stepkernel.cpu.layout import lay_out
from stepkernel.cpu.stages import exchange
from stepkernel.cpu.table import fill_table, records, thread_scratch
from stepkernel.cpu.weights import CpuWeights, float_buffers
from stepkernel.program.draft_builder import DraftPrograms
from stepkernel.program.draft_inputs import ContextRows, DraftBlock, DraftOutputs, read_outputs
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.program import TAPS, Program


class CpuDrafter:
    """A draft's programs bound to packed weights and caches (`program.draft_inputs.Drafter`).

    crew: the threads of the target's executor, which stay its own. weights: from `pack_draft`, for at least the
    positions that will be used (`positions`). Not thread-safe.
    """

    def __init__(
        self,
        programs: DraftPrograms,
        weights: CpuWeights,
        caches: Caches,
        crew: Crew,
        positions: int,
        activations: Activations = "bf16",
    ) -> None:
        self.programs, self.caches, self.crew = programs, caches, crew
        self._positions = positions
        arena = Arena(block_bytes=4 << 20)
        self._alive = (arena, weights)
        self._context, self._block = (
            _Part(program, caches, arena, activations) for program in (programs.context, programs.block)
        )
        parts = (self._context, self._block)
        staged = [found for part in parts for found in records(part.program, weights, part.layout, caches, ())]
        waits = [wait for part in parts for wait in exchange.waits(part.program.stages, float_buffers(part.program))]
        table, ranges = fill_table(staged, waits, arena)
        self._prepared = Prepared(table, thread_scratch(staged, crew.threads, arena))
        at = 0
        for part in parts:
            last = at + len(part.program.stages)
            part.block.set(step.FIRST, ranges[at][0])
            part.block.set(step.LAST, ranges[last - 1][1])
            at = last
        self.team_size = TeamSize(crew.threads)

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """The block program's buffers; views of the drafter's memory."""
        return MappingProxyType(self._block.layout.buffers)

    def run(self, context: ContextRows | None, block: DraftBlock) -> DraftOutputs:
        """Takes in context and drafts one block for every request, in one call.

        Raises ValueError for inputs that do not fit the programs or the caches.
        """
        block.check(self.programs, self.caches)
        self._check(block.positions, self.programs.drafts)
        part = self._block
        part.fill(block.step_inputs(self.programs), block.row_positions(self.programs.drafts))
        part.block.put(step.TEMPERATURES, block.temperatures)
        part.block.put(step.UNIFORMS, block.uniforms)
        first = part
        if context is not None and context.rows:
            first = self._fill(context, part.block.address)
        threads = self.team_size.choose((block.requests, first is part))
        self.team_size.record(threads, self._call(first, threads))
        return read_outputs(self.buffers, block.requests, self.programs.drafts)

    def insert(self, context: ContextRows) -> None:
        """Takes in context only."""
        if context.rows:
            self._call(self._fill(context, 0), self.crew.threads)

    def close(self) -> None:
        """The threads belong to the target's executor."""

    def _fill(self, context: ContextRows, following: int) -> "_Part":
        """The context part; `following` is the block that the call goes on with, or 0."""
        context.check(self.programs, self.caches)
        self._check(context.positions, 1)
        part, count = self._context, context.rows
        part.layout.buffers[TAPS][:count] = context.taps
        zeros = np.zeros(count, np.int32)
        part.fill(
            StepInputs(1, zeros, zeros, zeros[:, None], context.slot_mapping, zeros[:, None], zeros + 1),
            context.positions,
        )
        part.block.set(step.NEXT, following)
        return part

    def _check(self, positions: NDArray[np.int32], rows: int) -> None:
        if positions.size and positions.max() + rows > self._positions:
            raise ValueError(f"positions: up to {positions.max() + rows - 1}, prepared for {self._positions}")

    def _call(self, part: "_Part", threads: int) -> int:
        return self.crew.call(self._prepared, part.block.address, threads)


class _Part:
    """One program of the round: its buffers and its block of step facts."""

    def __init__(self, program: Program, caches: Caches, arena: Arena, activations: Activations) -> None:
        if program.rows > step.MAX_ROWS:
            raise ValueError(f"program of {program.rows} rows: a step takes up to {step.MAX_ROWS}")
        self.program = program
        self.layout = lay_out(program, arena)
        self.block = StepBlock(caches, activations, arena)

    def fill(self, inputs: StepInputs, positions: NDArray[np.int32]) -> None:
        self.block.fill(inputs)
        self.block.put(step.POSITIONS, positions)
