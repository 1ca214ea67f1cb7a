"""Runs two executors stage by stage from identical values and compares everything that each stage writes.

Before every stage both hold the same buffers, caches and states; what a step must not read holds NaN:
buffers nobody has written, rows of padding, cache rows beyond a request's length, states of others. So a
difference belongs to its stage alone, and a NaN in a result shows a read of what is not there.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.executor import Executor
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.program import BLOCKS, CACHE, CONV, RECURRENT, Program, writes
from stepkernel.program.stages import KdaCore, Stage
from stepkernel.runtime.caches import copy_caches

RECORDS = "records"  # of tokens, from which recurrent states are recovered (spec 5.6)
# Of the root mean square of a row: a float32 sum of n random terms is off by about sqrt(n) 2^-24 of it; a BF16 step of
# a typical value is 2^-8.
MOVED = 2.0**-14


@dataclass(frozen=True)
class StageDiff:
    """How one thing that a stage wrote differs.

    max_abs      largest difference in the live rows; infinite if either holds a NaN there
    relative_l2  largest over rows of |b - a| / |a|; for ids the fraction of rows that differ
    stray        values that the second executor changed outside of what the stage may write
    moved        most values of a row that differ by more than float32 sums in another order do (`MOVED`)
    width        values of a row
    bf16         whether the first executor's values are BF16: some of these move, to the other side of a rounding
    """

    index: int
    stage: str
    area: str
    max_abs: float
    relative_l2: float
    stray: int
    moved: int = 0
    width: int = 0
    bf16: bool = False

    @property
    def equal(self) -> bool:
        return self.max_abs == 0 and self.stray == 0

    def exceeds(self, limit: float) -> bool:
        """Whether the relative difference is above `limit`, or something is wrong at any limit."""
        return self.relative_l2 > limit or not np.isfinite(self.max_abs) or self.stray > 0


def diff(
    program: Program,
    inputs: StepInputs,
    a: Executor,
    b: Executor,
    only: Container[int] | None = None,
    change: Callable[[int], None] | None = None,
) -> list[StageDiff]:
    """Compares executor `b` with `a` over one step, or over the stages with the numbers in `only`.

    Both need caches of their own; those of `a` hold the context, those of `b` are overwritten, and both are
    filled with NaN outside of it. Rows are those of `inputs`; the buffers of both must have the program's
    names. `change` is called before each stage that is compared; it may put other values into the buffers of both.
    """
    live = _live_rows(inputs)
    poison_caches(a.caches, inputs)
    copy_caches(a.caches, b.caches)
    for executor in (a, b):
        for buffer in executor.buffers.values():
            buffer[...] = _poison(buffer)
    found = []
    for index, stage in enumerate(program.stages):
        if only is not None and index not in only:
            _follow(a, b, index, inputs, live)
            continue
        if change is not None:
            change(index)
        areas = sorted(_areas(stage, inputs))
        before = {area: _whole(a, area).copy() for area in areas}
        a.run_stage(index, inputs)
        b.run_stage(index, inputs)
        for area in areas:
            values = (_whole(a, area), _whole(b, area), before[area])
            found.append(_compare(index, stage.name, area, *values, _written(area, inputs, live, a.caches)))
            if _is_state(area):
                np.copyto(values[1], values[0])
            else:
                values[1][: inputs.rows] = values[0][: inputs.rows]
                for buffer in values[:2]:
                    _poison_rows(buffer, live)
    return found


def _follow(a: Executor, b: Executor, index: int, inputs: StepInputs, live: NDArray[np.bool_]) -> None:
    """Runs a stage that is not compared, and gives `b` what it wrote."""
    a.run_stage(index, inputs)
    for area in _areas(a.program.stages[index], inputs):
        source, target = _whole(a, area), _whole(b, area)
        if _is_state(area):
            np.copyto(target, source)
        else:
            target[: inputs.rows] = source[: inputs.rows]
            for buffer in (source, target):
                _poison_rows(buffer, live)


def first_difference(found: list[StageDiff], limit: float) -> StageDiff | None:
    return next((d for d in found if d.exceeds(limit)), None)


def poison_caches(caches: Caches, inputs: StepInputs) -> None:
    """Fills every cache row and state that the step may not read with NaN."""
    kept = np.zeros(caches.pages * caches.page_tokens, bool)
    for request, length in enumerate(inputs.lengths.tolist()):
        positions = np.arange(max(0, length - inputs.queries))
        page = inputs.page_table[request].astype(np.int64)[positions // max(1, caches.page_tokens)]
        kept[page * caches.page_tokens + positions % max(1, caches.page_tokens)] = True
    for latent in caches.latent:
        latent.reshape(len(kept), -1)[~kept] = np.nan
    columns = inputs.state_slots.shape[1]
    source = inputs.state_slots[np.arange(inputs.requests), np.minimum(inputs.accepted, columns) - 1]
    for arrays, slots in ((caches.recurrent, source), (caches.conv, inputs.state_slots[:, 0])):
        unused = np.ones(caches.slots, bool)
        unused[slots[slots > 0]] = False
        for array in arrays:
            array[unused] = np.nan
    accepted = np.zeros((caches.slots, caches.record_rows), bool)
    for slot, count in zip(inputs.state_slots[:, 0].tolist(), inputs.accepted.tolist(), strict=True):
        accepted[slot, :count] = inputs.recovers and slot > 0
    for records in caches.records:
        records[~accepted] = np.nan


def _areas(stage: Stage, inputs: StepInputs) -> frozenset[str]:
    """What a stage writes; the records of its tokens belong to the states that are recovered from them."""
    recorded = {f"{RECORDS}{stage.index}"} if isinstance(stage, KdaCore) and inputs.recovers else set()
    return writes(stage) | recorded


def _poison(buffer: NDArray[Any]) -> NDArray[Any] | float:
    # Rows of padding may be computed and thrown away, so their experts must exist and differ.
    return np.arange(buffer.shape[-1]) if buffer.dtype.kind == "i" else np.nan


def _live_rows(inputs: StepInputs) -> NDArray[np.bool_]:
    return np.repeat(inputs.lengths > 0, inputs.queries)


def _is_state(area: str) -> bool:
    return area.startswith((CACHE, CONV, RECURRENT, RECORDS))


def _whole(executor: Executor, area: str) -> NDArray[Any]:
    """The array of an area: buffer or saved block [rows, width], cache rows [row, width], states [slot,
    ...], records [slot x row x head x 3, d]."""
    caches = executor.caches
    if area.startswith(RECORDS):
        records = caches.records[int(area.removeprefix(RECORDS))]
        return records.reshape(-1, records.shape[-1])
    for prefix, arrays in ((CACHE, caches.latent), (CONV, caches.conv), (RECURRENT, caches.recurrent)):
        if area.startswith(prefix):
            array: NDArray[Any] = arrays[int(area.removeprefix(prefix))]
            return array.reshape(-1, array.shape[-1]) if prefix == CACHE else array
    if area.startswith(BLOCKS):
        block: NDArray[Any] = executor.buffers[BLOCKS][int(area.removeprefix(BLOCKS))]
        return block
    return executor.buffers[area]


def _written(area: str, inputs: StepInputs, live: NDArray[np.bool_], caches: Caches) -> NDArray[np.intp]:
    """Indices along the first axis that a stage must write."""
    if area.startswith(RECORDS):
        slots = inputs.state_slots[:, 0].astype(np.intp)
        tokens = slots[slots > 0, None] * caches.record_rows + np.arange(inputs.queries)
        each = caches.records[0].shape[2] * 3
        places: NDArray[np.intp] = (tokens.reshape(-1, 1) * each + np.arange(each)).ravel()
        return places
    if area.startswith(CACHE):
        return np.array([row for row in inputs.slot_mapping if row >= 0], np.intp)
    if area.startswith(RECURRENT):
        return np.array([slot for slot in inputs.state_slots.ravel() if slot > 0], np.intp)
    if area.startswith(CONV):
        return np.array([slot for slot in inputs.state_slots[:, 0] if slot > 0], np.intp)
    return np.flatnonzero(live)


def _poison_rows(buffer: NDArray[Any], live: NDArray[np.bool_]) -> None:
    dead = np.ones(len(buffer), bool)
    dead[: len(live)] = ~live
    buffer[dead] = _poison(buffer)


def _compare(
    index: int,
    stage: str,
    area: str,
    a: NDArray[Any],
    b: NDArray[Any],
    before: NDArray[Any],
    written: NDArray[np.intp],
) -> StageDiff:
    stray = 0
    if _is_state(area):
        outside = np.ones(len(b), bool)
        outside[written] = False
        stray = int(np.count_nonzero(_bits(b[outside]) != _bits(before[outside])))
    left, right = (x[written].reshape(len(written), -1) for x in (a, b))
    if a.dtype.kind == "i":
        wrong = (left != right).any(axis=1)
        far = float(np.abs(left - right).max(initial=0))
        return StageDiff(index, stage, area, far, float(wrong.mean()), stray, int(wrong.any()), left.shape[1])
    bf16 = not (np.ascontiguousarray(left, np.float32).view(np.uint32) & 0xFFFF).any()
    rows = list(_row_differences(left.astype(np.float64), right.astype(np.float64)))
    largest, relative = (max((row[k] for row in rows), default=0.0) for k in range(2))
    moved = max((row[2] for row in rows), default=0)
    return StageDiff(index, stage, area, largest, relative, stray, moved, left.shape[1], bf16)


def _row_differences(left: NDArray[np.float64], right: NDArray[np.float64]) -> Iterator[tuple[float, float, int]]:
    """Of each row: largest difference, relative L2 difference, values that moved."""
    for a, b in zip(left, right, strict=True):
        if np.isnan(a).any() or np.isnan(b).any():
            yield float("inf"), float("inf"), len(a)
        else:
            apart = np.abs(b - a)
            norm = float(np.linalg.norm(a))
            distance = float(np.linalg.norm(apart))
            moved = int(np.count_nonzero(apart > MOVED * norm / np.sqrt(len(a))))
            yield float(apart.max(initial=0.0)), distance / norm if norm else distance, moved


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(np.uint8)
