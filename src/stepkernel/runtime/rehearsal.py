"""Times what a round with drafts takes beyond a plain one before anybody waits for a token, so that no trial is needed
to learn it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.draft_inputs import ContextRows, DraftBlock, Drafter
from stepkernel.program.inputs import StepInputs, StepOutputs
from stepkernel.runtime.batch import flat_rows

SAMPLES = 2  # of which the shorter counts: other programs only make rounds longer. One more comes first, to warm up
Verify = Callable[[StepInputs], StepOutputs]
Extra = dict[int, dict[int, float]]


@dataclass(frozen=True)
class Room:
    """Pages and state slots that no request owns now. Where there are fewer than a load needs, requests share them:
    only the time is of interest, and whoever gets them later overwrites what they hold.

    columns: state slots of a request. recovers: verifications record their tokens (StepInputs.recovers).
    """

    pages: range
    slots: range
    page_tokens: int
    columns: int
    recovers: bool = False

    def inputs(self, requests: int, queries: int, start: int, vocab: int) -> StepInputs:
        """A step of random tokens, so that rows choose different experts, behind `start` others."""
        table = self.table(requests, start + queries)
        starts = np.full(requests, start, np.int32)
        verifies = queries > 1  # as `batch.verify_inputs` has it
        return StepInputs(
            queries=queries,
            token_ids=np.random.default_rng(queries).integers(vocab, size=requests * queries, dtype=np.int32),
            lengths=starts + np.int32(queries),
            page_table=table,
            slot_mapping=flat_rows(table, starts, queries, self.page_tokens),
            state_slots=_shared(self.slots, requests, self.columns if verifies else 1),
            accepted=np.ones(requests, np.int32),
            recovers=self.recovers and verifies,
        )

    def table(self, requests: int, tokens: int) -> NDArray[np.int32]:
        return _shared(self.pages, requests, -(-tokens // self.page_tokens))


def extra_seconds(
    verify: Verify, drafters: Mapping[int, Drafter], drafts: int, requests: int, room: Room, vocab: int
) -> Extra:
    """{requests: {drafts: seconds}}: rounds of one draft and of `drafts`, less plain ones, of 1, 2, 4 .. `requests`.

    drafters: of blocks of so many tokens; on ranks that do not draft there are none, but they take part in each step.
    """
    loads = sorted({1 << i for i in range(requests.bit_length())} | {requests})
    return {load: {k: _extra(verify, drafters.get(k), k, load, room, vocab) for k in {1, drafts}} for load in loads}


def _extra(verify: Verify, drafter: Drafter | None, drafts: int, requests: int, room: Room, vocab: int) -> float:
    plain, drafted = [], []
    step, verification = room.inputs(requests, 1, 0, vocab), room.inputs(requests, 1 + drafts, 1, vocab)
    for _ in range(1 + SAMPLES):
        started = time.perf_counter()
        outputs = verify(step)
        plain.append(time.perf_counter() - started)
        started = time.perf_counter()
        if drafter is not None:
            assert outputs.taps is not None  # the step was built with taps
            _draft(drafter, outputs.taps[:requests], room)
        verify(verification)
        drafted.append(time.perf_counter() - started)
    return max(0.0, min(drafted[1:]) - min(plain[1:]))


def _draft(drafter: Drafter, taps: NDArray[np.float32], room: Room) -> None:
    """A block behind one token of each request, whose rows become context first."""
    requests, drafts = len(taps), drafter.programs.drafts
    ones = np.ones(requests, np.int32)
    table = room.table(requests, 1 + drafts)
    context = ContextRows(taps, ones - 1, flat_rows(table, ones - 1, 1, room.page_tokens))
    block = DraftBlock(
        anchors=np.zeros(requests, np.int32),
        positions=ones,
        page_table=table,
        slot_mapping=flat_rows(table, ones, drafts, room.page_tokens),
        temperatures=np.zeros(requests, np.float32),
        uniforms=np.zeros((requests, drafts), np.float32),
    )
    drafter.run(context, block)


def _shared(numbers: range, requests: int, columns: int) -> NDArray[np.int32]:
    """int32 [requests, columns], in turn."""
    return np.resize(np.array(numbers, np.int32), (requests, columns))
