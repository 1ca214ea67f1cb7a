"""What a decode or serve record says about its own counting: lengths that were seen, and how tokens were counted."""

from collections.abc import Iterable, Sequence
from typing import Literal

from stepkernel.measure.trace import Block, Request

TokenCounts = Literal["per chunk", "per request", "none"]


def measured(blocks: Sequence[Block]) -> list[Request]:
    return [r for block in blocks if block.load == "measured" for r in block.requests if r.status == "ok"]


def token_counts(requests: Iterable[Request]) -> TokenCounts:
    """The least that all requests have."""
    found = list(requests)
    if any(r.output_tokens is None for r in found):
        return "none"
    return "per request" if any(r.chunk_ms is not None and r.chunk_tokens is None for r in found) else "per chunk"


def common(counts: Iterable[int | None]) -> int | None:
    """The one value that all share; None if they differ or one is unknown."""
    found = set(counts)
    return found.pop() if len(found) == 1 else None
