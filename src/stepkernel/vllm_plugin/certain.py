"""Rows of steps that are certain, and wait to become context of the draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.draft_inputs import ContextRows
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch


class CertainRows(NamedTuple):
    """Of request number `request` of a step: its positions `begin` .. `end` - 1 are certain now, from row `row` on."""

    request: int
    first_page: int
    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class SeenStep:
    """What a step of the target left for the draft.

    taps    float32 [rows, taps * hidden], valid until the next step
    states  whose requests verify drafts, and whose have no logits yet
    pages   of the draft's layers
    """

    taps: NDArray[np.float32]
    states: StateBatch
    pages: PageBatch

    def certain(self, sampled: Sequence[Sequence[int]]) -> list[CertainRows]:
        """The last token of a verifying request was certain before; each accepted draft makes one more row certain."""
        first, lengths, starts = self.pages.pages.numpy()[:, 0].tolist(), self.pages.lengths, self.states.starts
        if starts[-1] == len(lengths):
            return [CertainRows(i, first[i], i, length - 1, length) for i, length in enumerate(lengths)]
        found = []
        for i, (row, following) in enumerate(pairwise(starts)):
            size = following - row
            begin = lengths[i] - size
            kept = max(1, len(sampled[i])) if self.states.verifies[i] else size
            found.append(CertainRows(i, first[i], row, begin, begin + kept))
        return found


@dataclass
class Waiting:
    """Rows of the last steps, all of the same requests, kept for one call: one row takes over half of what 32 do."""

    _requests: list[tuple[int, int]] = field(default_factory=list)  # first page and next position of each
    _taps: list[NDArray[np.float32]] = field(default_factory=list)
    _positions: list[int] = field(default_factory=list)
    _slots: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self._positions)

    def continues(self, certain: Sequence[CertainRows]) -> bool:
        """Whether these are the next rows of those that wait, or none wait."""
        return not self.rows or self._requests == [(rows.first_page, rows.begin) for rows in certain]

    def add(self, certain: Sequence[CertainRows], seen: SeenStep) -> None:
        self._requests = [(rows.first_page, rows.end) for rows in certain]
        if not certain:
            return
        slots = seen.pages.slots.numpy()
        if len(certain) == len(seen.taps):
            self._taps.append(seen.taps.copy())
            self._positions += [rows.begin for rows in certain]
            self._slots.append(slots[: len(certain)].copy())
            return
        for rows in certain:
            taken = slice(rows.row, rows.row + rows.end - rows.begin)
            self._taps.append(seen.taps[taken].copy())
            self._positions += range(rows.begin, rows.end)
            self._slots.append(slots[taken].copy())

    def take(self) -> ContextRows:
        """All of them, which do not wait any more; none make an empty context."""
        taps, slots = self._taps or [np.zeros((0, 0), np.float32)], self._slots or [np.zeros(0, np.int64)]
        found = ContextRows(np.concatenate(taps), np.array(self._positions, np.int32), np.concatenate(slots))
        self._requests, self._taps, self._positions, self._slots = [], [], [], []
        return found
