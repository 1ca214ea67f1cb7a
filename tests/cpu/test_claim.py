"""Claimed parts cover all units once, in order, whoever asks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from stepkernel.cpu import claim, records, step
from stepkernel.cpu.arena import address


@njit
def _claim(record: int, count: int, threads: int, grain: int) -> tuple[int, int]:
    return claim.claim(record, count, threads, grain)


@njit
def _reset(table: int, first: int, last: int) -> None:
    claim.reset(table, first, last)


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 64), st.integers(1, 100))
def test_parts(count: int, threads: int, grain: int) -> None:
    table = np.full((3, step.RECORD_WORDS), -1, np.int64)
    _reset(address(table), 1, 2)
    assert (table[[0, 2]] == -1).all()
    assert (table[1, :-1] == -1).all()
    parts = []
    while True:
        first, last = _claim(address(table[1]) + step.RECORD_HEADER, count, threads, grain)
        if first == last:
            break
        parts.append((first, last))
    assert [unit for first, last in parts for unit in range(first, last)] == list(range(count))
    assert all(first % grain == 0 for first, _ in parts)
    sizes = [last - first for first, last in parts]
    assert sizes == sorted(sizes, reverse=True)
    if threads > 1:
        assert max(sizes, default=0) <= max(grain, count / threads)
    assert len(parts) <= 1 if threads == 1 else max(sizes, default=0) >= min(count, grain)
    # Nothing is left, however often one asks.
    first, last = _claim(address(table[1]) + step.RECORD_HEADER, count, threads, grain)
    assert first == last


def test_a_record_leaves_room_for_its_counter() -> None:
    full = records.Record(records.Operation.KDA, range(step.RECORD_WORDS - 2))
    with pytest.raises(ValueError, match=f"KDA: {step.RECORD_WORDS} words, a record holds {step.RECORD_WORDS - 1}"):
        full.words(False)
    assert len(records.Record(records.Operation.KDA, range(step.RECORD_WORDS - 3)).words(True)) == step.RECORD_WORDS - 1
