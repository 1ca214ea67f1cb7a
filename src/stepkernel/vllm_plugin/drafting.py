"""DSpark drafts inside vLLM: each step's certain rows become context in the draft's pages, then a block is drafted for
every request (spec 5.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu.crew import Crew
from stepkernel.cpu.draft_weights import pack_draft
from stepkernel.cpu.drafter import CpuDrafter
from stepkernel.cpu.executor import Activations
from stepkernel.cpu.weights import CpuWeights
from stepkernel.model.weights import Weights
from stepkernel.program.draft_builder import build_draft
from stepkernel.program.draft_inputs import ContextRows, DraftBlock
from stepkernel.program.inputs import Caches
from stepkernel.program.program import MAX_ROWS
from stepkernel.runtime.batch import flat_rows
from stepkernel.runtime.drafting import Draft
from stepkernel.vllm_plugin.arrays import array_of
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch
from stepkernel.vllm_plugin.layers import MlaLayer

CONTEXT_ROWS = MAX_ROWS  # tapped rows that one call takes in
Drafts = list[list[int]]


@dataclass(frozen=True)
class SeenStep:
    """What a step of the target left for the draft.

    taps    float32 [rows, taps * hidden], valid until the next step
    states  whose requests verify drafts, and whose have no logits yet
    pages   of the draft's layers
    """

    taps: NDArray[np.float32]
    states: StateBatch
    pages: PageBatch


class Drafting:
    """A draft's weights and the drafters over vLLM's caches, which are made again when vLLM binds others.

    packed: the target's weights. drafts: tokens of a block. max_requests: of a verification. limit: positions that rows
    may have. crew: the threads of the target's steps. The draft's rows lie in pages of vLLM's own pool, at the target's
    positions: prefix hits find them, and preemption frees them.
    """

    def __init__(
        self,
        draft: Draft,
        weights: Weights,
        packed: CpuWeights,
        layers: Mapping[int, MlaLayer],
        drafts: int,
        max_requests: int,
        limit: int,
        activations: Activations,
        crew: Crew,
    ) -> None:
        config = draft.checkpoint.config
        self.drafts, self.limit = drafts, min(limit, config.max_positions)
        self.programs = build_draft(config, draft.target, max_requests, drafts, CONTEXT_ROWS)
        self._packed = pack_draft(self.programs, draft.checkpoint.weights(weights), packed, self.limit)
        self._layers = [layers[i] for i in sorted(layers)]
        self._activations, self._crew = activations, crew
        self._drafter: CpuDrafter | None = None
        self._bound: list[Any] = []
        self._seen: SeenStep | None = None

    def see(self, taps: NDArray[np.float32], states: StateBatch) -> None:
        """Keeps what a step has computed until its tokens are known. Call it in the step's forward context."""
        pages = self._layers[0].batch()
        self._seen = None if pages is None else SeenStep(taps, states, pages)

    def propose(self, sampled: Sequence[Sequence[int]]) -> Drafts:
        """Drafts for each request of the last step. `sampled`: its new tokens, none while its prompt is unfinished.

        A request that has no room for a whole block gets no drafts.
        """
        seen, self._seen = self._seen, None
        drafts: Drafts = [[] for _ in sampled]
        if seen is None:
            return drafts
        starts = np.array(seen.states.starts)
        sizes = np.diff(starts)
        # The last token of a verifying request was certain before; each accepted draft makes one more row certain.
        kept = np.array(
            [max(1, len(tokens)) if v else n for tokens, v, n in zip(sampled, seen.states.verifies, sizes, strict=True)]
        )
        computed = np.array(seen.pages.lengths) - sizes + kept
        context = _context(seen, starts[:-1], kept, computed)
        live = [r for r, tokens in enumerate(sampled) if tokens and computed[r] + self.drafts <= self.limit]
        drafter = self._current()
        size = self.programs.requests
        parts = [live[start : start + size] for start in range(0, len(live), size)]
        pieces = _pieces(context, CONTEXT_ROWS)
        for piece in pieces[:-1] if parts else pieces:
            drafter.insert(piece)
        for i, part in enumerate(parts):
            block = self._block(seen.pages, part, computed, sampled, drafter.caches.page_tokens)
            found = drafter.run(pieces[-1] if i == 0 and pieces else None, block)
            for r, tokens in zip(part, found.tokens.tolist(), strict=True):
                drafts[r] = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        return drafts

    def _block(
        self,
        pages: PageBatch,
        requests: list[int],
        computed: NDArray[np.int64],
        sampled: Sequence[Sequence[int]],
        page_tokens: int,
    ) -> DraftBlock:
        positions = computed[requests].astype(np.int32)
        columns = -(-int(positions.max() + self.drafts) // page_tokens)
        table = pages.pages[requests, :columns].numpy()
        count = len(requests)
        return DraftBlock(
            anchors=np.array([sampled[r][-1] for r in requests], np.int32),
            positions=positions,
            page_table=table,
            slot_mapping=flat_rows(table, positions, self.drafts, page_tokens),
            temperatures=np.zeros(count, np.float32),
            uniforms=np.zeros((count, self.drafts), np.float32),
        )

    def _current(self) -> CpuDrafter:
        bound = [layer.kv_cache for layer in self._layers]
        unchanged = len(bound) == len(self._bound) and all(a is b for a, b in zip(bound, self._bound, strict=True))
        if self._drafter is None or not unchanged:
            caches = Caches([array_of(tensor) for tensor in bound], [], [])
            self._drafter = CpuDrafter(self.programs, self._packed, caches, self._crew, self.limit, self._activations)
            self._bound = bound
        return self._drafter


def _context(
    seen: SeenStep, starts: NDArray[np.int64], kept: NDArray[np.int64], computed: NDArray[np.int64]
) -> ContextRows:
    """The certain rows of all requests."""
    rows = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, kept, strict=True)])
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(computed, kept, strict=True)])
    slots = seen.pages.slots.numpy()[rows]
    return ContextRows(seen.taps[rows], positions.astype(np.int32), slots)


def _pieces(context: ContextRows, size: int) -> list[ContextRows]:
    cuts = [slice(start, start + size) for start in range(0, context.rows, size)]
    return [ContextRows(context.taps[c], context.positions[c], context.slot_mapping[c]) for c in cuts]
