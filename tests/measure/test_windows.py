"""Exactly-N windows against a plain count over the timeline."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepkernel.measure.trace import Request, check_trace
from stepkernel.measure.windows import gaps, occupancy

TIME = st.integers(0, 24).map(float)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Requests with times on a coarse grid, so that many coincide."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        times = sorted(draw(st.lists(TIME, min_size=2, max_size=8)))
        sent, chunks = times[0], tuple(times[1:])
        ended = chunks[-1] + draw(st.integers(0, 2))
        status = draw(st.sampled_from(["ok", "ok", "ok", "error", "cancelled"]))
        if draw(st.integers(0, 9)) == 0:
            found.append(Request(sent, None, None, ended, status="error"))
        else:
            found.append(Request(sent, chunks[0], chunks[-1], ended, 1, len(chunks), chunks, status=status))
    return found


def plainly(found: list[Request], start: float, end: float, running: int) -> bool:
    """Looks at the middle of every grid cell of a gap; an empty gap at the cell before it."""
    cells = np.arange(start, end) + 0.5 if end > start else np.array([start - 0.5])
    for at in cells:
        decoding = sum(r.first_ms is not None and r.first_ms < at < r.last_ms for r in found)
        in_the_way = sum(
            r.sent_ms < at < (r.ended_ms if r.first_ms is None else r.first_ms)
            or (r.status != "ok" and r.last_ms is not None and r.last_ms < at < r.ended_ms)
            for r in found
        )
        if decoding != running or in_the_way:
            return False
    return True


@settings(max_examples=300, deadline=None)
@given(requests(), st.integers(1, 4))
def test_windows_are_exact(found: list[Request], running: int) -> None:
    result = gaps(found, running)
    pairs = [(a, b) for r in found if r.chunk_ms for a, b in zip(r.chunk_ms, r.chunk_ms[1:], strict=False)]
    assert len(pairs) == len(result.ms)
    start = min(r.sent_ms for r in found)
    for (a, b), kept in zip(pairs, result.kept, strict=True):
        if a == b == start:
            continue  # an empty gap before which there is nothing
        assert kept == plainly(found, a, b, running), (a, b)


def test_a_late_request_ends_and_begins_the_window() -> None:
    one = Request(0, 1, 9, 9, chunk_ms=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    two = Request(3.5, 5.5, 7.5, 7.5, chunk_ms=(5.5, 6.5, 7.5))
    alone = gaps([one, two], 1)
    assert alone.ms[alone.kept].tolist() == [1, 1, 1]  # 1-2, 2-3, 8-9; not 3-4, in which the other is sent
    both = gaps([one, two], 2)
    kept = both.kept.tolist()
    assert kept == [False] * 5 + [True] + [False] * 2 + [True, True]
    assert both.most == 2
    assert both.prefilled.tolist()[2:5] == [True, True, True]


def test_what_a_cancelled_request_leaves_behind_counts_for_nobody() -> None:
    one = Request(0, 1, 6, 6, chunk_ms=(1, 2, 3, 4, 5, 6))
    gone = Request(0, 1, 2, 4.5, chunk_ms=(1, 2), status="cancelled")
    assert gaps([one, gone], 1).kept.tolist()[:5] == [False, False, False, False, True]
    assert occupancy([one, gone]).unknown.max() == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(5, 4, 6, 7, chunk_ms=(4, 6)), "time runs backwards"),
        (Request(0, 1, 5, 6, chunk_ms=(1, 3, 2, 5)), "the clock stepped"),
        (Request(0, 1, 3, 2, chunk_ms=(1, 3)), "time runs backwards"),
        (Request(0, 1, None, 2), "no last chunk"),
        (Request(0, 1, 2, 2, chunk_ms=(1, 2), chunk_tokens=(1,)), "2 chunk times and 1 token counts"),
        (Request(0, 1, 2, 2, chunk_ms=(1, 2), chunk_tokens=(1, 0)), "a chunk of no tokens"),
        (Request(0, None, None, 2, chunk_ms=(1,)), "contradict"),
    ],
)
def test_contradicting_times_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_trace((request_,))
