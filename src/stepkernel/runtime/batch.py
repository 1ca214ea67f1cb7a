"""Turns requests into the arrays of a step."""

from collections.abc import Sequence as Items
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.inputs import StepInputs


class Request(Protocol):
    """What a step needs to know of a request; the first `computed` tokens are in its cache and state."""

    tokens: list[int]
    pages: list[int]
    computed: int

    @property
    def slot(self) -> int: ...


class SpeculatingRequest(Request, Protocol):
    """`slots` holds one state slot for each query of the longest step; the state after the last step lies in the slot
    of its last accepted row, number `accepted` (spec 5.5). Where states are recovered there is one slot, and `accepted`
    rows of the last step are still to be folded into it (spec 5.6): none behind a step without drafts."""

    slots: list[int]
    accepted: int


def decode_inputs(requests: Items[Request], page_tokens: int) -> StepInputs:
    """The next token of each request, in their order."""
    return _inputs(requests, 1, page_tokens)


def prefill_inputs(request: Request, count: int, page_tokens: int) -> StepInputs:
    """The next `count` prompt tokens of one request."""
    return _inputs([request], count, page_tokens)


def verify_inputs(
    requests: Items[SpeculatingRequest], drafts: NDArray[np.int32], page_tokens: int, recovers: bool = False
) -> StepInputs:
    """The last token of each request and its drafts, int32 [requests, drafts]; no drafts make a plain step.

    Where the states of all lie in their first slots already, a plain step gets these alone: kernels then write a window
    of the usual size instead of one for every number of accepted drafts (tiny-k3, 7 drafts: 7 % of a step's time), and
    fold and record nothing.
    """
    plain, settled = not drafts.shape[1], 0 if recovers else 1
    if plain and all(s.accepted == settled for s in requests):
        return decode_inputs(requests, page_tokens)
    table, starts = drafts.tolist(), [s.computed for s in requests]
    return StepInputs(
        queries=1 + drafts.shape[1],
        token_ids=np.array([t for s, row in zip(requests, table, strict=True) for t in (s.tokens[-1], *row)], np.int32),
        state_slots=np.array([s.slots for s in requests], np.int32),
        accepted=np.array([s.accepted for s in requests], np.int32),
        recovers=recovers,
        settles=recovers and plain,
        **places(requests, starts, 1 + drafts.shape[1], page_tokens),
    )


class Places(TypedDict):
    """Where rows of a step lie (StepInputs)."""

    lengths: NDArray[np.int32]
    page_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


def places(requests: Items[Request], starts: Items[int], count: int, page_tokens: int) -> Places:
    """Those of `count` positions of each request from `starts` on; zeros follow the pages of the shorter ones.

    In Python's numbers, which are faster for the few rows of a step.
    """
    ends = [start + count for start in starts]
    used = [-(-end // page_tokens) for end in ends]
    table = np.zeros((len(requests), max(used)), np.int32)
    for row, (request, pages) in enumerate(zip(requests, used, strict=True)):
        table[row, :pages] = request.pages[:pages]
    rows = [
        request.pages[at // page_tokens] * page_tokens + at % page_tokens
        for request, start, end in zip(requests, starts, ends, strict=True)
        for at in range(start, end)
    ]
    return Places(lengths=np.array(ends, np.int32), page_table=table, slot_mapping=np.array(rows, np.int64))


def flat_rows(table: NDArray[np.int32], starts: NDArray[np.int32], count: int, page_tokens: int) -> NDArray[np.int64]:
    """Flat cache rows of `count` positions of each request from `starts` on, int64 [requests * count]; `table` as in
    StepInputs."""
    page, row = np.divmod(starts.astype(np.int64)[:, None] + np.arange(count), page_tokens)
    return (table[np.arange(len(table))[:, None], page].astype(np.int64) * page_tokens + row).ravel()


def _inputs(requests: Items[Request], queries: int, page_tokens: int) -> StepInputs:
    starts = [s.computed for s in requests]
    ids = [t for s, at in zip(requests, starts, strict=True) for t in s.tokens[at : at + queries]]
    return StepInputs(
        queries=queries,
        token_ids=np.array(ids, np.int32),
        state_slots=np.array([[s.slot] for s in requests], np.int32),
        accepted=np.ones(len(requests), np.int32),
        **places(requests, starts, queries, page_tokens),
    )
