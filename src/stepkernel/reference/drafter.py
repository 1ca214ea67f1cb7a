"""Draft rounds in NumPy: the meaning of the draft's programs, and the drafter of the standard path."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.weights import Weights
from stepkernel.program.draft_builder import DraftPrograms
from stepkernel.program.draft_inputs import ContextRows, DraftBlock, DraftOutputs, read_outputs
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.program import TAPS, Program
from stepkernel.program.stages import Stage
from stepkernel.reference.executor import (
    DEFAULT_CACHE_BYTES,
    Rounding,
    allocate_buffers,
    rounded_buffers,
    run_stage,
)
from stepkernel.reference.step import DraftRows, Step
from stepkernel.reference.weights import FloatWeights

Observer = Callable[[Stage, Step], None]


class ReferenceDrafter:
    """A draft's programs bound to its weights and caches (`program.draft_inputs.Drafter`); see ReferenceExecutor."""

    def __init__(
        self,
        programs: DraftPrograms,
        weights: Weights,
        caches: Caches,
        rounding: Rounding = "bf16",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.programs = programs
        self.caches = caches
        self._weights = FloatWeights(weights, cache_bytes)
        self._context = allocate_buffers(programs.context)
        self._block = allocate_buffers(programs.block)
        self._rounding: Rounding = rounding

    def run(self, context: ContextRows | None, block: DraftBlock, observe: Observer | None = None) -> DraftOutputs:
        """Takes in context and drafts one block for every request; `observe` is called after each stage of the block.

        Raises ValueError for inputs that do not fit the programs or the caches.
        """
        block.check(self.programs, self.caches)
        if context is not None:
            self.insert(context)
        inputs, drafts = block.step_inputs(self.programs), self.programs.drafts
        rows = DraftRows(block.row_positions(drafts), block.temperatures, block.uniforms)
        self._run(self.programs.block, self._block, inputs, rows, observe)
        return read_outputs(self._block, block.requests, drafts)

    def insert(self, context: ContextRows) -> None:
        """Takes in context only."""
        context.check(self.programs, self.caches)
        count = context.rows
        if not count:
            return
        inputs = StepInputs(
            queries=1,
            token_ids=np.zeros(count, np.int32),
            lengths=np.zeros(count, np.int32),
            page_table=np.zeros((count, 1), np.int32),
            slot_mapping=context.slot_mapping,
            state_slots=np.zeros((count, 1), np.int32),
            accepted=np.ones(count, np.int32),
        )
        self._context[TAPS][:count] = context.taps
        rows = DraftRows(context.positions, np.zeros(count, np.float32), np.zeros((count, 0), np.float32))
        self._run(self.programs.context, self._context, inputs, rows, None)

    def close(self) -> None:
        """There is nothing to end."""

    def _run(
        self,
        program: Program,
        buffers: Mapping[str, NDArray[Any]],
        inputs: StepInputs,
        rows: DraftRows,
        observe: Observer | None,
    ) -> None:
        views = {name: buffer[: inputs.rows] for name, buffer in buffers.items()}
        rounded = rounded_buffers(program, self._rounding)
        step = Step(program.config, self._weights, self.caches, inputs, views, rounded, rows)
        with np.errstate(all="ignore"):
            for stage in program.stages:
                run_stage(stage, step)
                if observe is not None:
                    observe(stage, step)
