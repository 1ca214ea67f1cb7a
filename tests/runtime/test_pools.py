"""Pools: number 0 is never handed out, nothing is owned twice, nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkernel.runtime.pages import Pool


@given(st.integers(2, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_any_history(size: int, moves: list[tuple[bool, int]]) -> None:
    pool, owned = Pool(size, "page"), []
    for take, count in moves:
        if take:
            free = pool.free
            got = pool.take(count)
            assert (got is None) == (count > free)
            assert got is None or len(got) == count
            owned += got or []
        else:
            back, owned = owned[:count], owned[count:]
            pool.give(back)
        assert len(set(owned)) == len(owned)
        assert all(0 < i < size for i in owned)
        assert pool.free + len(owned) == pool.capacity == size - 1


def test_refusals() -> None:
    pool = Pool(4, "slot")
    taken = pool.take(2)
    assert taken is not None
    for wrong in ([0], [3], [taken[0], taken[0]], [99]):
        with pytest.raises(ValueError, match="not in use"):
            pool.give(wrong)
    pool.give(taken)
    with pytest.raises(ValueError, match="not in use"):
        pool.give(taken[:1])
    with pytest.raises(ValueError, match="number 0 is reserved"):
        Pool(1, "page")


def test_numbers_come_back_out_of_order() -> None:
    """Whoever assumes consecutive pages or slots is found out."""
    pool = Pool(6, "page")
    pool.take(5)
    pool.give([2, 5, 1])
    assert pool.take(3) == [1, 5, 2]
