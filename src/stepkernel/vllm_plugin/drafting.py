"""DSpark drafts inside vLLM: each step's certain rows become context in the draft's pages, then a block is drafted for
every request (spec 5.3)."""

import time
from collections.abc import Mapping, Sequence
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
from stepkernel.vllm_plugin.certain import CertainRows, SeenStep, Waiting
from stepkernel.vllm_plugin.layers import MlaLayer

logger = init_logger("vllm.stepkernel")
Drafts = list[list[int]]


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
        self._waiting = Waiting()
        self._rest = self._resting = 0  # plain rounds until the next look at whether to draft; their requests, and
        self._rested: list[float] = []  # seconds of those that were not taken into account yet

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
        known = self._with_context(seen, seen.certain(sampled))
        count = self._choose(seen, sampled, len(known) == len(sampled))
        plain = not count and all(seen.states.verifies)
        started = time.perf_counter()
        if not self._waiting.continues(known):
            self.take_in()
        self._waiting.add(known, seen)
        rows = self._waiting.rows
        if plain:
            if rows >= CONTEXT_ROWS:
                self.take_in()
                self.lengths.took_context(rows, time.perf_counter() - started)
            return drafts
        computed = {rows.request: rows.end for rows in known}
        live = [r for r, tokens in enumerate(sampled) if tokens and count and computed[r] + count <= self.limit]
        parts = [live[start : start + self.max_requests] for start in range(0, len(live), self.max_requests)]
        pieces = _pieces(self._waiting.take(), CONTEXT_ROWS)
        drafter = self._drafter(count or self.lengths.most)
        for piece in pieces[:-1] if parts else pieces:
            drafter.insert(piece)
        for i, part in enumerate(parts):
            positions = np.array([computed[r] for r in part], np.int32)
            block = _block(seen.pages, part, positions, sampled, count, drafter.caches.page_tokens)
            found = drafter.run(pieces[-1] if i == 0 and pieces else None, block)
            for r, tokens in zip(part, found.tokens.tolist(), strict=True):
                drafts[r] = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        return drafts

    def take_in(self) -> None:
        """Takes in all rows that wait. Due before a step of other requests writes anything: pages of those that have
        ended may have become another's, for states as well."""
        for piece in _pieces(self._waiting.take(), CONTEXT_ROWS):
            self._drafter(self.lengths.most).insert(piece)

    def _with_context(self, seen: SeenStep, certain: list[CertainRows]) -> list[CertainRows]:
        """Those of requests all of whose rows before these are in the draft's cache or waiting.

        A request goes by its first page, so that others that find its pages in the prefix cache go by it too.
        """
        self._without.difference_update(rows.first_page for rows in certain if not rows.begin)
        if not self.lengths.keeps_context:
            self._without.update(rows.first_page for rows in certain)
        return [rows for rows in certain if rows.first_page not in self._without] if self._without else certain

    def _choose(self, seen: SeenStep, sampled: Sequence[Sequence[int]], with_context: bool) -> int:
        """Drafts of the next round. The last one is taken into account; plain ones together, when it is time to look
        whether to draft.

        A round lasts from call to call, vLLM's own work included, if all requests verified as many drafts.
        """
        now, before, requests = time.perf_counter(), self._began, len(sampled)
        self._began = (requests, now)
        sizes = {last - first for first, last in pairwise(seen.states.starts)}
        alike = len(sizes) == 1 and all(seen.states.verifies)
        seconds = now - before[1] if before is not None and before[0] == requests and alike else None
        if seconds is not None and self._rest and requests == self._resting and sizes == {1}:
            self._rest -= 1
            self._rested.append(seconds)
            return 0
        if self._rested:
            self.lengths.record_plain(self._resting, self._rested)
            self._rested = []
        stopped = self.lengths.stopped
        if seconds is not None:
            self.lengths.record(requests, sizes.pop() - 1, seconds, [len(tokens) - 1 for tokens in sampled])
        count = self.lengths.choose(requests) if with_context else 0
        if self.lengths.stopped != stopped:
            logger.info("Drafts: %s", self.lengths.reason)
        self._resting = requests
        if count or not self.lengths.adaptive:
            self._rest = 0
        else:  # the round at whose end it is time to look is taken into account before
            self._rest = max(0, (self.lengths.rest(requests) if with_context else CONTEXT_ROWS) - 1)
        return count

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
    positions: NDArray[np.int32],
    sampled: Sequence[Sequence[int]],
    drafts: int,
    page_tokens: int,
) -> DraftBlock:
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


def _pieces(context: ContextRows, size: int) -> list[ContextRows]:
    cuts = [slice(start, start + size) for start in range(0, context.rows, size)]
    return [ContextRows(context.taps[c], context.positions[c], context.slot_mapping[c]) for c in cuts]
