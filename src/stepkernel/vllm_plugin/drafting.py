"""DSpark drafts inside vLLM: each step's certain rows become context in the draft's pages, then a block is drafted for
every request (spec 5.3)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from stepkernel.cpu.arena import Arena
from stepkernel.cpu.block import Activations
from stepkernel.cpu.crew import Crew
from stepkernel.cpu.draft_weights import SHARED, pack_draft
from stepkernel.cpu.drafter import CpuDrafter
from stepkernel.cpu.weights import CpuWeights, float_buffers, pack_stage
from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.draft_builder import CONTEXT_ROWS, DraftPrograms, build_draft
from stepkernel.program.draft_inputs import ContextRows, DraftBlock
from stepkernel.program.inputs import Caches
from stepkernel.runtime.batch import flat_rows
from stepkernel.runtime.draft_length import DraftLength
from stepkernel.runtime.drafting import Draft
from stepkernel.vllm_plugin.arrays import array_of
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch
from stepkernel.vllm_plugin.layers import MlaLayer

logger = init_logger("vllm.stepkernel")
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

    weights, packed: the whole target's; of the packed ones embedding and head are enough (`whole_ends`). drafts: most
    tokens of a block; with `adaptive` fewer, down to none, where that is faster (`lengths`). max_requests: of a
    verification. limit: positions that rows may have. crew: the threads of the target's steps, or of this rank while
    the others wait. The draft's rows lie in pages of vLLM's own pool, at the target's positions: prefix hits find them,
    and preemption frees them.

    Of several tensor-parallel ranks only rank 0 drafts. vLLM's scheduler takes the drafts of that rank and hands them
    to all, so nothing has to agree between them, and every rank holds complete taps.
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
        adaptive: bool,
    ) -> None:
        config = draft.checkpoint.config
        self.limit, self.max_requests = min(limit, config.max_positions), max_requests
        self.lengths = DraftLength(drafts, adaptive)
        sizes = range(1, drafts + 1) if adaptive else [drafts]
        self._programs = {k: build_draft(config, draft.target, max_requests, k, CONTEXT_ROWS) for k in sizes}
        self._packed = pack_draft(self._programs[drafts], draft.checkpoint.weights(weights), packed, self.limit)
        self._shared = packed  # the draft points into it
        self._layers = [layers[i] for i in sorted(layers)]
        self._activations, self._crew = activations, crew
        self._drafters: dict[int, CpuDrafter] = {}
        self._bound: list[Any] = []
        self._seen: SeenStep | None = None
        self._began: tuple[int, float] | None = None
        self._without: set[int] = set()  # first pages of requests of whose context rows are missing

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
        known = self._with_context(seen.pages, computed - kept)
        self._measure(seen.states, sampled)
        count = self.lengths.choose(len(sampled)) if known.all() else 0
        context = _context(seen, starts[:-1][known], kept[known], computed[known])
        live = [r for r, tokens in enumerate(sampled) if tokens and count and computed[r] + count <= self.limit]
        drafter = self._drafter(count or self.lengths.most)
        parts = [live[start : start + self.max_requests] for start in range(0, len(live), self.max_requests)]
        pieces = _pieces(context, CONTEXT_ROWS)
        started = time.perf_counter()
        for piece in pieces[:-1] if parts else pieces:
            drafter.insert(piece)
        if not count and context.rows and seen.states.verifies == [True] * len(sampled):
            self.lengths.took_context(context.rows, time.perf_counter() - started)
        for i, part in enumerate(parts):
            block = _block(seen.pages, part, computed, sampled, count, drafter.caches.page_tokens)
            found = drafter.run(pieces[-1] if i == 0 and pieces else None, block)
            for r, tokens in zip(part, found.tokens.tolist(), strict=True):
                drafts[r] = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        return drafts

    def _with_context(self, pages: PageBatch, begins: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [requests]: whether all rows before these, and these, are in the draft's cache or are going to be.

        A request goes by its first page, so that others that find its pages in the prefix cache go by it too.
        """
        first = pages.pages[:, 0].tolist()
        self._without.difference_update(page for page, begin in zip(first, begins, strict=True) if begin == 0)
        if not self.lengths.keeps_context:
            self._without.update(first)
        return np.array([page not in self._without for page in first])

    def _measure(self, states: StateBatch, sampled: Sequence[Sequence[int]]) -> None:
        """A round lasts from call to call, vLLM's own work included, if all requests verified as many drafts."""
        now, before = time.perf_counter(), self._began
        self._began = (len(sampled), now)
        sizes = {last - first for first, last in pairwise(states.starts)}
        if before is None or before[0] != len(sampled) or len(sizes) != 1 or not all(states.verifies):
            return
        stopped = self.lengths.stopped
        accepted = [len(t) - 1 for t in sampled]
        self.lengths.record(len(sampled), sizes.pop() - 1, now - before[1], accepted)
        if self.lengths.stopped != stopped:
            logger.info("Drafts: %s", self.lengths.reason)

    @property
    def drafters(self) -> Mapping[int, CpuDrafter]:
        """Of blocks of each length, over vLLM's caches."""
        self._drafter(self.lengths.most)
        return self._drafters

    def _drafter(self, drafts: int) -> CpuDrafter:
        bound = [layer.kv_cache for layer in self._layers]
        unchanged = len(bound) == len(self._bound) and all(a is b for a, b in zip(bound, self._bound, strict=True))
        if not unchanged:
            caches = Caches([array_of(tensor) for tensor in bound], [], [])
            # All of them now: in a round they would count as its time.
            self._drafters = {k: self._make(programs, caches) for k, programs in self._programs.items()}
            self._bound = bound
        return self._drafters[drafts]

    def _make(self, programs: DraftPrograms, caches: Caches) -> CpuDrafter:
        return CpuDrafter(programs, self._packed, caches, self._crew, self.limit, self._activations)


def whole_ends(config: ModelConfig, weights: Weights, activation_bits: int) -> CpuWeights:
    """Embedding and head of the whole target, packed for a draft beside a rank that has a part of them."""
    program, arena = build_program(config), Arena()
    exact = float_buffers(program)
    ends = [stage for stage in program.stages if stage.name in SHARED]
    return CpuWeights(arena, {s.name: pack_stage(s, weights, arena, exact) for s in ends}, activation_bits)


def _block(
    pages: PageBatch,
    requests: list[int],
    computed: NDArray[np.int64],
    sampled: Sequence[Sequence[int]],
    drafts: int,
    page_tokens: int,
) -> DraftBlock:
    positions = computed[requests].astype(np.int32)
    columns = -(-int(positions.max() + drafts) // page_tokens)
    table = pages.pages[requests, :columns].numpy()
    count = len(requests)
    return DraftBlock(
        anchors=np.array([sampled[r][-1] for r in requests], np.int32),
        positions=positions,
        page_table=table,
        slot_mapping=flat_rows(table, positions, drafts, page_tokens),
        temperatures=np.zeros(count, np.float32),
        uniforms=np.zeros((count, drafts), np.float32),
    )


def _context(
    seen: SeenStep, starts: NDArray[np.int64], kept: NDArray[np.int64], computed: NDArray[np.int64]
) -> ContextRows:
    """The certain rows of these requests; none make an empty context."""
    if not len(starts):
        return ContextRows(seen.taps[:0], np.zeros(0, np.int32), np.zeros(0, np.int64))
    rows = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, kept, strict=True)])
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(computed, kept, strict=True)])
    slots = seen.pages.slots.numpy()[rows]
    return ContextRows(seen.taps[rows], positions.astype(np.int32), slots)


def _pieces(context: ContextRows, size: int) -> list[ContextRows]:
    cuts = [slice(start, start + size) for start in range(0, context.rows, size)]
    return [ContextRows(context.taps[c], context.positions[c], context.slot_mapping[c]) for c in cuts]
