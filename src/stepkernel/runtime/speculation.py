"""Rounds of drafting and verification over the sequences of a session (spec 5.3, 5.4)."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.builder import Taps
from stepkernel.program.draft_builder import CONTEXT_ROWS
from stepkernel.program.draft_inputs import ContextRows, DraftBlock, Drafter, DraftOutputs
from stepkernel.program.inputs import StepOutputs
from stepkernel.program.program import MAX_ROWS
from stepkernel.runtime.acceptance import DRAFT, METHODS, Method, accept, synthetic_rates
from stepkernel.runtime.batch import places, verify_inputs
from stepkernel.runtime.draft_length import DraftLength
from stepkernel.runtime.engine import RECURRENT_STATES, RecurrentStates
from stepkernel.runtime.rehearsal import Room, Verify, extra_seconds
from stepkernel.runtime.rounds import AcceptanceCounts, Round
from stepkernel.runtime.sampling import RequestError, uniform
from stepkernel.runtime.sequence import Sequence

KEPT_ROUNDS = 10_000
KEPT_PLAIN = CONTEXT_ROWS  # plain rounds whose rows are handed out together, one call for each request
_NO_DRAFTS = np.zeros((MAX_ROWS, 0), np.int32)
MakeDrafter = Callable[[int], Drafter]


@dataclass(frozen=True)
class SpeculationOptions:
    """num_speculative_tokens: most drafts of a round. method: "standard" (exact rejection), "block" (joint, exact too)
    or "synthetic" (accepts by rate, for timing only). adaptive: fewer drafts, down to none, where that is faster.
    recurrent_states: a KDA state for each token of a step, or one "recovering" from records."""

    num_speculative_tokens: int
    method: Method = "standard"
    synthetic_acceptance_length: float | None = None
    adaptive: bool = True
    recurrent_states: RecurrentStates = "per-position"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError(f"acceptance method {self.method!r}: supported: {', '.join(METHODS)}")
        if self.recurrent_states not in RECURRENT_STATES:
            raise RequestError(f"recurrent_states {self.recurrent_states!r}: supported: {', '.join(RECURRENT_STATES)}")
        if (self.method == "synthetic") != (self.synthetic_acceptance_length is not None):
            raise RequestError("synthetic_acceptance_length goes with the method synthetic, and only with it")
        if self.synthetic_acceptance_length is not None:
            synthetic_rates(self.synthetic_acceptance_length, self.num_speculative_tokens)

    @property
    def is_synthetic(self) -> bool:
        return self.method == "synthetic"


@dataclass
class Speculator:
    """Drafts, verifies and judges; what it keeps of a sequence lies in that sequence.

    make_drafter: a drafter of blocks of so many tokens; all of them share one set of caches, whose pages are those of
    the target's cache.
    """

    options: SpeculationOptions
    taps: Taps
    make_drafter: MakeDrafter
    page_tokens: int
    lengths: DraftLength = field(init=False)
    counts: AcceptanceCounts = field(init=False)
    synthetic: tuple[float, ...] = ()
    log: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))
    _drafters: dict[int, Drafter] = field(init=False)
    _plain_taps: list[NDArray[np.float32]] = field(default_factory=list)
    _plain_sequences: list[Sequence] = field(default_factory=list)
    _rest: int = 0
    _rested: list[float] = field(default_factory=list)
    _rests_with_context: bool = False
    _inserted: tuple[int, float] = (0, 0.0)  # rows of context that this round took in, and seconds

    def __post_init__(self) -> None:
        most = self.options.num_speculative_tokens
        self.lengths = DraftLength(most, self.options.adaptive)
        self.counts = AcceptanceCounts([0] * most, [0] * most)
        if self.options.synthetic_acceptance_length is not None:
            self.synthetic = synthetic_rates(self.options.synthetic_acceptance_length, most)
        # Made now: in a round they would count as its time.
        sizes = range(1, most + 1) if self.options.adaptive else [most]
        self._drafters = {drafts: self.make_drafter(drafts) for drafts in sizes}

    def rehearse(self, verify: Verify, requests: int, room: Room) -> None:
        """Learns what rounds of up to so many requests take, from some that belong to nobody."""
        if self.options.adaptive:
            vocab = self._widest.programs.config.vocab_size
            most = self.options.num_speculative_tokens
            self.lengths.extra = extra_seconds(verify, self._drafters, most, requests, room, vocab)

    def take_in(self, sequence: Sequence, taps: NDArray[np.float32], to_end: bool = False) -> None:
        """The last rows of the target that are certain, which it will not overwrite; all before them were taken in.

        A sequence that was given no context once stays without. to_end: nothing waits for more rows.
        """
        if not self.lengths.keeps_context:
            sequence.forget_draft()
        if not sequence.has_context:
            return
        sequence.pending.append(taps)
        waiting = sequence.computed - sequence.in_draft
        if to_end or waiting >= CONTEXT_ROWS:
            started = time.perf_counter()
            self._insert([sequence])
            rows, seconds = self._inserted
            self._inserted = rows + waiting, seconds + time.perf_counter() - started

    def round(self, sequences: list[Sequence], verify: Verify) -> list[tuple[list[int], int]]:
        """One round: for each sequence the accepted drafts and the token behind them (NOT_A_NUMBER for a NaN).

        The sequences' tokens are left to the caller; what lies in caches and states is advanced by all of them.
        """
        started = time.perf_counter()
        self._rest = 0
        self._inserted = (0, 0.0)
        self.settle()
        if self._plain_taps and sequences != self._plain_sequences:
            self._take_in_plain(sequences)
        if not self.lengths.keeps_context:
            for sequence in sequences:
                sequence.forget_draft()
        with_context = all(s.has_context for s in sequences)
        drafts = self.lengths.choose(len(sequences)) if with_context else 0
        found = self._draft(sequences, drafts) if drafts else None
        drafted = time.perf_counter()
        tokens = _NO_DRAFTS[: len(sequences)] if found is None else np.maximum(found.tokens, 0)
        outputs = verify(verify_inputs(sequences, tokens, self.page_tokens, self._recovers))
        verified = time.perf_counter()
        if found is None and all(s.sampling.is_greedy for s in sequences):
            judged: list[tuple[list[int], int]] = [([], token) for token in outputs.tokens.tolist()]
        else:
            judged = [self._judge(s, i, found, outputs) for i, s in enumerate(sequences)]
        accepted = tuple([len(kept) for kept, _ in judged])
        self._advance(sequences, accepted, drafts, outputs)
        taken = time.perf_counter() - started
        self.log.append(Round(drafts, taken, drafted - started, verified - drafted, accepted))
        self.lengths.record(len(sequences), drafts, taken, accepted)
        if not drafts:
            rows, seconds = self._inserted
            if rows:
                self.lengths.took_context(rows, seconds)
            self.lengths.took_beside(taken - (verified - drafted) - seconds)
        alike = all(s.sampling.is_greedy and s.has_context == with_context for s in sequences)
        if not drafts and alike:
            self._plain_sequences, self._rests_with_context = sequences, with_context
            self._rest = self.lengths.rest(len(sequences)) if with_context else KEPT_PLAIN
        return judged

    def rests(self, sequences: list[Sequence]) -> bool:
        """Whether the next round is a plain one like the last, of which `rested` needs to know and nothing else."""
        return self._rest > 0 and self.lengths.held is None and sequences == self._plain_sequences

    def rested(self, outputs: StepOutputs, seconds: float) -> None:
        """Takes in a plain round that was made without it."""
        self._rest -= 1
        self._rested.append(seconds)
        if self._rests_with_context and outputs.taps is not None:
            self._plain_taps.append(outputs.taps.copy())

    def settle(self) -> None:
        """Brings `lengths` and `log` up to date for all rounds at rest together, which is faster than each alone."""
        rounds, requests = self._rested, len(self._plain_sequences)
        if not rounds:
            return
        accepted = (0,) * requests
        self.log.extend([Round(0, seconds, 0.0, seconds, accepted) for seconds in rounds])
        self.lengths.record_plain(requests, rounds)
        self._rested = []

    def close(self) -> None:
        for drafter in self._drafters.values():
            drafter.close()

    @property
    def _recovers(self) -> bool:
        return self.options.recurrent_states == "recovering"

    @property
    def _widest(self) -> Drafter:
        return self._drafters[self.options.num_speculative_tokens]

    def _draft(self, sequences: Items[Sequence], drafts: int) -> DraftOutputs:
        self._take_in_plain(sequences)
        drafter = self._drafters[drafts]
        waiting = sum(s.computed - s.in_draft for s in sequences)
        if waiting > drafter.programs.context.rows:
            self._insert(sequences)
        context = self._context(sequences)
        starts = [s.computed for s in sequences]
        at = places(sequences, starts, drafts, self.page_tokens)
        temperatures = np.array([s.sampling.temperature for s in sequences], np.float32)
        numbers = np.zeros((len(sequences), drafts), np.float32)
        for i, s in enumerate(sequences):
            if not s.sampling.is_greedy:
                # Rounded down: a number that became 1 would choose beyond the last token.
                drawn = [uniform(s.sampling.seed, len(s.tokens) + j, DRAFT) for j in range(drafts)]
                numbers[i] = np.minimum(np.array(drawn, np.float32), np.float32(1 - 2**-24))
        block = DraftBlock(
            anchors=np.array([s.tokens[-1] for s in sequences], np.int32),
            positions=np.array(starts, np.int32),
            page_table=at["page_table"],
            slot_mapping=at["slot_mapping"],
            temperatures=temperatures,
            uniforms=numbers,
        )
        return drafter.run(context, block)

    def _insert(self, sequences: Items[Sequence]) -> None:
        """Takes in all that waits, in pieces a program takes."""
        context = self._context(sequences)
        if context is None:
            return
        size = self._widest.programs.context.rows
        for start in range(0, context.rows, size):
            part = slice(start, start + size)
            rows = ContextRows(context.taps[part], context.positions[part], context.slot_mapping[part])
            self._widest.insert(rows)

    def _context(self, sequences: Items[Sequence]) -> ContextRows | None:
        """What waits of all sequences, which count it as taken in."""
        taps, positions, slots = [], [], []
        for s in sequences:
            places = np.arange(s.in_draft, s.computed, dtype=np.int32)
            taps += s.pending
            positions.append(places)
            slots.append(np.array(s.pages, np.int64)[places // self.page_tokens] * self.page_tokens)
            s.in_draft = s.computed
            s.pending.clear()
        if not taps:
            return None
        at = np.concatenate(positions)
        return ContextRows(np.concatenate(taps), at, np.concatenate(slots) + at % self.page_tokens)

    def _judge(
        self, sequence: Sequence, index: int, found: DraftOutputs | None, outputs: StepOutputs
    ) -> tuple[list[int], int]:
        drafts = [] if found is None else found.tokens[index].tolist()
        rows = slice(index * (len(drafts) + 1), (index + 1) * (len(drafts) + 1))
        result = accept(
            self.options.method,
            outputs.tokens[rows].tolist(),
            outputs.logits[rows],
            drafts,
            np.zeros((0, 0), np.float32) if found is None else found.logits[index],
            sequence.sampling,
            len(sequence.tokens),
            self.synthetic[: len(drafts)],
        )
        return drafts[: result.count], result.token

    def _advance(self, sequences: list[Sequence], accepted: Items[int], drafts: int, outputs: StepOutputs) -> None:
        """Counts rows that are certain now, and keeps their taps."""
        for sequence, count in zip(sequences, accepted, strict=True):
            sequence.computed += count + 1
            settles = not drafts and self._recovers
            sequence.accepted = 0 if settles else count + 1
            if drafts:
                self.counts.add(drafts, count)
        if not any(s.has_context for s in sequences):
            return
        assert outputs.taps is not None  # the step was built with taps
        taps = outputs.taps.copy()  # the next step overwrites them
        if not drafts:
            self._plain_taps.append(taps)
            self._plain_sequences = sequences
            if len(self._plain_taps) >= KEPT_PLAIN:
                self._take_in_plain(sequences)
            return
        for i, (sequence, count) in enumerate(zip(sequences, accepted, strict=True)):
            first = i * (drafts + 1)
            self.take_in(sequence, taps[first : first + count + 1])

    def _take_in_plain(self, alive: Items[Sequence]) -> None:
        """Takes in the rows of the last plain rounds, which were all of the same sequences; the pages of one that has
        ended since may be another's."""
        if not self._plain_taps:
            return
        taps = np.stack(self._plain_taps, axis=1)
        before, living = self._plain_sequences, {id(s) for s in alive}
        self._plain_taps, self._plain_sequences = [], []
        for sequence, rows in zip(before, taps, strict=True):
            if id(sequence) in living:
                self.take_in(sequence, rows)
