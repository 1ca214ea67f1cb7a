"""Turns requests into the arrays of a step."""

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from stepkernel.program.inputs import StepInputs


class Request(Protocol):
    """What a step needs to know of a request; the first `computed` tokens are in its cache and state."""

    tokens: list[int]
    pages: list[int]
    computed: int

    @property
    def slot(self) -> int: ...


def decode_inputs(requests: Items[Request], page_tokens: int) -> StepInputs:
    """The next token of each request, in their order."""
    return _inputs(requests, 1, page_tokens)


def prefill_inputs(request: Request, count: int, page_tokens: int) -> StepInputs:
    """The next `count` prompt tokens of one request."""
    return _inputs([request], count, page_tokens)


def _inputs(requests: Items[Request], queries: int, page_tokens: int) -> StepInputs:
    starts = [s.computed for s in requests]
    lengths = np.array(starts, np.int32) + queries
    width = max(-(-int(n) // page_tokens) for n in lengths)
    table = np.zeros((len(requests), width), np.int32)
    for row, (request, length) in enumerate(zip(requests, lengths.tolist(), strict=True)):
        used = -(-length // page_tokens)
        table[row, :used] = request.pages[:used]
    positions = np.array(starts, np.int64)[:, None] + np.arange(queries)
    pages = np.take_along_axis(table, positions // page_tokens, axis=1).astype(np.int64)
    return StepInputs(
        queries=queries,
        token_ids=np.array(
            [t for s, at in zip(requests, starts, strict=True) for t in s.tokens[at : at + queries]],
            np.int32,
        ),
        lengths=lengths,
        page_table=table,
        slot_mapping=(pages * page_tokens + positions % page_tokens).ravel(),
        state_slots=np.array([[s.slot] for s in requests], np.int32),
        accepted=np.ones(len(requests), np.int32),
    )
