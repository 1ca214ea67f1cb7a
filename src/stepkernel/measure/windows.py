"""Exactly-N windows: the gaps between chunks that lie wholly in a time in which N requests decode and none prefills.

A request prefills from the moment it is sent to its first chunk, and decodes from its first chunk to its last. One that
failed or was cancelled is in the way until its stream ended. Everything is computed from timestamps alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepkernel.measure.trace import Request

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gaps:
    """Gaps between neighbouring chunks of requests, in the order of requests and times.

    ms        length of each gap
    tokens    tokens of the chunk that ends it; NaN if the server does not tell per chunk
    wave      wave of its request
    request   index of its request
    kept      whether it lies wholly in an exactly-N window
    prefilled whether another request prefills during part of it
    most      largest number of requests that decoded at once
    """

    ms: Floats
    tokens: Floats
    wave: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    kept: npt.NDArray[np.bool_]
    prefilled: npt.NDArray[np.bool_]
    most: int


@dataclass(frozen=True)
class Occupancy:
    """How many requests decode, prefill or are in the way, between neighbouring `times` (one more than counts)."""

    times: Floats
    decoding: npt.NDArray[np.int64]
    prefilling: npt.NDArray[np.int64]
    unknown: npt.NDArray[np.int64]


def occupancy(requests: Sequence[Request]) -> Occupancy:
    """Counts over the timeline of all requests."""
    spans: list[tuple[float, float, int]] = []
    for request in requests:
        if request.first_ms is None or request.last_ms is None:
            spans.append((request.sent_ms, request.ended_ms, 1))
            continue
        spans.append((request.sent_ms, request.first_ms, 1))
        spans.append((request.first_ms, request.last_ms, 0))
        if request.status != "ok":
            # What the server still does for it after its last chunk is not known.
            spans.append((request.last_ms, request.ended_ms, 2))
    times = np.unique(np.array([t for start, end, _ in spans for t in (start, end)] or [0.0]))
    counts = np.zeros((3, len(times)), np.int64)
    for start, end, kind in spans:
        counts[kind, np.searchsorted(times, start)] += 1
        counts[kind, np.searchsorted(times, end)] -= 1
    running = np.cumsum(counts, axis=1)[:, :-1]
    return Occupancy(times, running[0], running[1], running[2])


def gaps(requests: Sequence[Request], running_requests: int) -> Gaps:
    """All gaps of requests whose chunk times are known, with those marked that lie in exactly-N windows."""
    found = occupancy(requests)
    clean = (found.decoding == running_requests) & (found.prefilling == 0) & (found.unknown == 0)
    dirty_before = np.concatenate([[0], np.cumsum(~clean)])
    prefill_before = np.concatenate([[0], np.cumsum(found.prefilling > 0)])
    starts, ends, tokens, waves, indices = [], [], [], [], []
    for index, request in enumerate(requests):
        if request.chunk_ms is None or len(request.chunk_ms) < 2:
            continue
        times = np.array(request.chunk_ms)
        starts.append(times[:-1])
        ends.append(times[1:])
        counts = request.chunk_tokens
        tokens.append(np.full(len(times) - 1, np.nan) if counts is None else np.array(counts[1:], float))
        waves.append(np.full(len(times) - 1, request.wave))
        indices.append(np.full(len(times) - 1, index))
    start, end = (np.concatenate(side) if side else np.zeros(0) for side in (starts, ends))
    # Segments that share more than a point with the gap. A gap of no length (two chunks in one read) belongs to the
    # segment that ends where it lies.
    empty = end == start
    first = np.searchsorted(found.times, start, side="right") - 1
    first = np.where(empty, np.searchsorted(found.times, start, side="left") - 1, first)
    last = np.where(empty, first + 1, np.searchsorted(found.times, end, side="left"))
    first, last = (np.clip(index, 0, len(clean)) for index in (first, last))
    return Gaps(
        ms=end - start,
        tokens=np.concatenate(tokens) if tokens else np.zeros(0),
        wave=np.concatenate(waves) if waves else np.zeros(0, np.int64),
        request=np.concatenate(indices) if indices else np.zeros(0, np.int64),
        kept=dirty_before[last] == dirty_before[first],
        prefilled=prefill_before[last] > prefill_before[first],
        most=int(found.decoding.max(initial=0)),
    )
