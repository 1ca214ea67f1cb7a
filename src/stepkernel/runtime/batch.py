"""Turns requests into the arrays of a step."""

from collections.abc import Sequence as Items
from typing import Protocol

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
    rows of the last step are still to be folded into it (spec 5.6)."""

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
    of the usual size instead of one for every number of accepted drafts (tiny-k3, 7 drafts: 7 % of a step's time).
    """
    if not drafts.shape[1] and not recovers and all(s.accepted == 1 for s in requests):
        return decode_inputs(requests, page_tokens)
    queries = 1 + drafts.shape[1]
    starts = np.array([s.computed for s in requests], np.int32)
    table = page_tables(requests, starts + queries, page_tokens)
    anchors = np.array([[s.tokens[-1]] for s in requests], np.int32)
    return StepInputs(
        queries=queries,
        token_ids=np.concatenate([anchors, drafts], axis=1).astype(np.int32).ravel(),
        lengths=starts + np.int32(queries),
        page_table=table,
        slot_mapping=flat_rows(table, starts, queries, page_tokens),
        state_slots=np.array([s.slots for s in requests], np.int32),
        accepted=np.array([s.accepted for s in requests], np.int32),
        recovers=recovers,
    )


def page_tables(requests: Items[Request], lengths: NDArray[np.int32], page_tokens: int) -> NDArray[np.int32]:
    """The pages of each request's first `lengths` tokens, int32 [requests, most pages]; zeros follow."""
    used = -(-lengths // page_tokens)
    table = np.zeros((len(requests), int(used.max())), np.int32)
    for row, (request, count) in enumerate(zip(requests, used.tolist(), strict=True)):
        table[row, :count] = request.pages[:count]
    return table


def flat_rows(table: NDArray[np.int32], starts: NDArray[np.int32], count: int, page_tokens: int) -> NDArray[np.int64]:
    """Flat cache rows of `count` positions of each request from `starts` on, int64 [requests * count]."""
    positions = starts.astype(np.int64)[:, None] + np.arange(count)
    pages = np.take_along_axis(table, positions // page_tokens, axis=1).astype(np.int64)
    return (pages * page_tokens + positions % page_tokens).ravel()


def _inputs(requests: Items[Request], queries: int, page_tokens: int) -> StepInputs:
    starts = np.array([s.computed for s in requests], np.int32)
    table = page_tables(requests, starts + queries, page_tokens)
    return StepInputs(
        queries=queries,
        token_ids=np.array(
            [t for s, at in zip(requests, starts.tolist(), strict=True) for t in s.tokens[at : at + queries]],
            np.int32,
        ),
        lengths=starts + np.int32(queries),
        page_table=table,
        slot_mapping=flat_rows(table, starts, queries, page_tokens),
        state_slots=np.array([[s.slot] for s in requests], np.int32),
        accepted=np.ones(len(requests), np.int32),
    )
