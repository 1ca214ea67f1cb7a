"""What an engine hands to a draft round, and what the round hands back (spec 5.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.draft_builder import CONFIDENCE, DRAFTS, LOGITS, DraftPrograms
from stepkernel.program.inputs import Caches, StepInputs


@dataclass(frozen=True)
class ContextRows:
    """Target rows that are certain: they become context of the draft.

    taps          float32 [rows, taps * target hidden]  what the target's step put into its buffer TAPS
    positions     int32 [rows]                          position of each row's token in its request
    slot_mapping  int64 [rows]                          flat row of the draft's cache; negative = do not write
    """

    taps: NDArray[np.float32]
    positions: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.positions)

    def check(self, programs: DraftPrograms, caches: Caches) -> None:
        """Refuses rows that would leave the caches or the program. Raises ValueError naming the field."""
        width = programs.config.taps_width
        if self.taps.shape != (self.rows, width) or len(self.slot_mapping) != self.rows:
            raise ValueError(
                f"taps {self.taps.shape} / slot_mapping {self.slot_mapping.shape}: expected {self.rows} rows of {width}"
            )
        if self.rows > programs.context.rows:
            raise ValueError(f"context of {self.rows} rows, program is prepared for {programs.context.rows}")
        if self.rows and self.slot_mapping.max() >= caches.pages * caches.page_tokens:
            raise ValueError(
                f"slot_mapping: row {self.slot_mapping.max()}, cache has {caches.pages * caches.page_tokens}"
            )
        _check_positions(programs, self.positions, 1)


@dataclass(frozen=True)
class DraftBlock:
    """One block of drafts for every request; row = request * drafts + position in the block.

    anchors       int32 [requests]          last sampled token, which the target has not processed
    positions     int32 [requests]          its position = context tokens in the draft's cache; negative = padding
    page_table    int32 [requests, pages]
    slot_mapping  int64 [requests * drafts] flat cache rows of positions .. positions + drafts - 1
    temperatures  float32 [requests]        0 chooses the arg max
    uniforms      float32 [requests, drafts] in [0, 1), for the choices at other temperatures
    """

    anchors: NDArray[np.int32]
    positions: NDArray[np.int32]
    page_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    uniforms: NDArray[np.float32]

    @property
    def requests(self) -> int:
        return len(self.anchors)

    def step_inputs(self, programs: DraftPrograms) -> StepInputs:
        """The rows of the block: anchor, then mask tokens; every row sees all of the block (spec 5.3.2)."""
        drafts = programs.drafts
        ids = np.full((self.requests, drafts), programs.config.mask_token_id, np.int32)
        ids[:, 0] = self.anchors
        live = self.positions >= 0
        return StepInputs(
            queries=drafts,
            token_ids=ids.ravel(),
            lengths=np.where(live, self.positions + drafts, 0).astype(np.int32),
            page_table=self.page_table,
            slot_mapping=np.where(np.repeat(live, drafts), self.slot_mapping, -1),
            state_slots=np.zeros((self.requests, 1), np.int32),
            accepted=np.ones(self.requests, np.int32),
        )

    def row_positions(self, drafts: int) -> NDArray[np.int32]:
        """int32 [requests * drafts]; 0 for padding."""
        return (np.maximum(self.positions, 0)[:, None] + np.arange(drafts, dtype=np.int32)).astype(np.int32).ravel()

    def check(self, programs: DraftPrograms, caches: Caches) -> None:
        """Refuses blocks that would leave the caches or the program. Raises ValueError naming the field."""
        requests, drafts = self.requests, programs.drafts
        shapes = (self.positions.shape, self.temperatures.shape, self.uniforms.shape)
        if shapes != ((requests,), (requests,), (requests, drafts)):
            raise ValueError(
                f"positions, temperatures, uniforms {shapes}: expected {requests} requests, {drafts} drafts each"
            )
        if not (np.isfinite(self.temperatures).all() and (self.temperatures >= 0).all()):
            raise ValueError(f"temperatures {self.temperatures.tolist()}: must be 0 or positive numbers")
        _check_positions(programs, self.positions, drafts)
        self.step_inputs(programs).check(programs.block, caches)


@dataclass(frozen=True)
class DraftOutputs:
    """A round's results; logits and confidence are views of the drafter's buffers, valid until its next round.

    tokens      int32 [requests, drafts]           -1 from a row with a NaN on
    logits      float32 [requests, drafts, vocab]  with the Markov bias: the draft's distribution before temperature
    confidence  float32 [requests, drafts]         None without the head
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    confidence: NDArray[np.float32] | None


def read_outputs(buffers: Mapping[str, NDArray[Any]], requests: int, drafts: int) -> DraftOutputs:
    """What a block left in its buffers."""
    rows = requests * drafts
    tokens = buffers[DRAFTS][:rows, 0].reshape(requests, drafts).copy()
    # What follows a lost draft was biased by a token that is none.
    tokens[np.logical_or.accumulate(tokens < 0, axis=1)] = -1
    confidence = buffers[CONFIDENCE][:rows, 0].reshape(requests, drafts) if CONFIDENCE in buffers else None
    logits = buffers[LOGITS]
    # The rows of a buffer may lie apart in memory, so reshape would copy them.
    shape, (row, value) = (requests, drafts, logits.shape[1]), logits.strides
    views = np.lib.stride_tricks.as_strided(logits, shape, (row * drafts, row, value), writeable=False)
    return DraftOutputs(tokens, views, confidence)


class Drafter(Protocol):
    """Runs draft rounds over one set of draft caches."""

    programs: DraftPrograms
    caches: Caches

    def run(self, context: ContextRows | None, block: DraftBlock) -> DraftOutputs:
        """Takes in context and drafts one block for every request."""
        ...

    def insert(self, context: ContextRows) -> None:
        """Takes in context only."""
        ...

    def close(self) -> None: ...


def _check_positions(programs: DraftPrograms, positions: NDArray[np.int32], rows: int) -> None:
    most = programs.config.max_positions
    if positions.size and positions.max() + rows > most:
        raise ValueError(f"positions: up to {positions.max() + rows - 1}, the draft has {most}")
