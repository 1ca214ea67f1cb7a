"""Which weights are fetched to L2 at which barrier, against what the stages read."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stepkernel.cuda.cases import Case, published, small, stages, wide
from stepkernel.cuda.dims import HEADER_BYTES, WARPS, AbsorbDims, LinearDims
from stepkernel.cuda.group_cases import ranks
from stepkernel.cuda.plan import Plan, Record
from stepkernel.cuda.planner.ahead import AT_ONCE
from stepkernel.cuda.records import Ahead
from stepkernel.cuda.step_block import AHEAD

CASES = (*small(), wide(), *published(), *ranks())


def by_descriptor(ahead: Ahead, grid: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(CTA, place behind the weight's start) of every line, as `cuda/ahead.py` computes them."""
    line = np.arange(ahead.lines)
    tile, within = line // ahead.run, line % ahead.run
    place = tile // ahead.across * ahead.block + tile % ahead.across * ahead.width + within * ahead.stride
    return (line // ahead.piece + ahead.first) % grid, place


def by_stage(plan: Plan, record: Record, grid: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same of the rows that the stage reads: each by the CTA of its piece."""
    dims = plan.codes[record.code]
    if isinstance(dims, LinearDims):
        outputs, first = record.words["outputs"], record.words["first"]
        assert isinstance(outputs, int)
        assert isinstance(first, int)
        row = np.arange(outputs)
        head = row // dims.per_head if dims.per_head else 0 * row
        place = head * dims.head_bytes + (row - head * dims.per_head) * dims.inputs * 2
        return (row // (16 * WARPS // dims.split) + first) % grid, place
    assert isinstance(dims, AbsorbDims)
    tiles = dims.lora // 64
    head, tile, n = (index.ravel() for index in np.indices((dims.heads, tiles, dims.nope)))
    place = (head * (dims.nope + dims.value) + n) * dims.lora * 2 + 128 * tile
    return (head * tiles + tile) // (WARPS // dims.split) % grid, place


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cta_fetches_what_it_is_going_to_read(case: Case) -> None:
    plan = case.plan()
    seen = {}
    for record in plan.records:
        dims = plan.codes[record.code]
        if isinstance(dims, (LinearDims, AbsorbDims)):
            key = (record.code, record.words.get("outputs"), record.words.get("first"))
            seen[key] = record
        else:
            assert record.ahead is None
        assert HEADER_BYTES + 8 * len(record.words) <= AHEAD, "words lie where the lines are described"
    for record in seen.values():
        assert record.ahead is not None
        assert record.ahead.weight == record.words["weight"]
        dims = plan.codes[record.code]
        assert record.ahead.width == (dims.inputs * 2 if isinstance(dims, LinearDims) else 128)
        for grid in (case.grid, 1, case.grid + 2):
            fetched, read = by_descriptor(record.ahead, grid), by_stage(plan, record, grid)
            np.testing.assert_array_equal(np.sort(fetched[1]), np.sort(read[1]))
            assert dict(zip(*fetched[::-1], strict=True)) == dict(zip(*read[::-1], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_weight_is_fetched_once_at_a_barrier_before_it(case: Case) -> None:
    """All but those that could only be fetched while experts run, which come too late to be worth it."""
    plan = case.plan()
    times = dict.fromkeys((k for k, record in enumerate(plan.records) if record.ahead), 0)
    for index, record in enumerate(plan.records):
        distance, count = record.fetch
        if count == 0:
            continue
        assert record.wait or index == 0
        targets = plan.records[index + distance : index + distance + count]
        between = plan.records[index : index + distance]
        assert not any(plan.codes[r.code].kind == "experts" or r.ahead for r in between)
        assert not any(r.wait for r in targets[1:])
        sizes = [r.ahead.limit * r.ahead.bytes for r in targets if r.ahead]
        whole = [r.ahead.lines * r.ahead.width for r in targets if r.ahead]
        assert sum(sizes) <= AT_ONCE
        assert sizes == whole or sum(whole) > AT_ONCE
        assert all(r.ahead.bytes % 16 == 0 for r in targets if r.ahead)
        for k in range(index + distance, index + distance + count):
            if plan.records[k].ahead:
                times[k] += 1
    assert set(times.values()) == {1}


def test_large_weights_are_fetched_in_part() -> None:
    """Half the L2 of an H200 is 25 MiB. Kimi-Linear-48B's head has 755 MB in 78 pieces for a CTA, of which two are
    fetched; of a Kimi K3 rank's KDA projections (46 MB) each CTA fetches the first columns."""
    linear, k3 = (next(c for c in published() if c.name == f"{n}_1x1") for n in ("kimi_linear_48b", "kimi_k3_tp16"))
    head = next(r.ahead for r in linear.plan().records if r.stage == "head")
    assert head is not None
    assert (head.limit, head.bytes) == (2 * 132 * head.piece, head.width)
    first = next(r.ahead for r in k3.plan().records if r.stage == "L01.kda.input")
    assert first is not None
    assert first.limit == first.lines
    assert 0.5 * first.width < first.bytes < 0.6 * first.width


def test_kernels_of_single_stages_fetch_their_own_weights() -> None:
    for case in stages():
        plan = case.plan()
        for first, last in plan.ranges:
            own = [r for r in plan.records[first:last] if r.ahead]
            if own:
                assert plan.records[first].fetch == (0, len(own))
                assert all(r.ahead and (r.ahead.limit, r.ahead.bytes) == (r.ahead.lines, r.ahead.width) for r in own)
