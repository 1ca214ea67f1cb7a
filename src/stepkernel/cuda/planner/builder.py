"""Collects codes, records and scratch of a program."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stepkernel.cuda.dims import Dims, posting_of
from stepkernel.cuda.records import SIZES, Ahead, At, Geometry, Record, Word
from stepkernel.cuda.step_block import HEAD, LINE
from stepkernel.program.program import Program


@dataclass(frozen=True)
class Posted:
    """What ranks have posted of a buffer for the next stage, which takes it itself: `width` bytes of a row from each,
    `slot` bytes behind the head of a slot, in exchange `number`."""

    mode: Literal["reduce", "gather"]
    slot: int
    width: int
    number: int


class Builder:
    """`exchanges`: how many there are so far; `slot_bytes`: what the largest of them needs of a mailbox's slot;
    `left`: what was posted of a buffer for the next stage; `claimed`: buffers that the
    stage that is being planned takes itself."""

    def __init__(self, program: Program, geometry: Geometry) -> None:
        self.program, self.geometry = program, geometry
        self.codes: list[Dims] = []
        self.records: list[Record] = []
        self.scratch: dict[str, int] = {}
        self.exchanges = 0
        self._opened = 0
        self.slot_bytes = 0
        self.left: dict[str, Posted] = {}
        self.claimed: set[str] = set()
        self.widths = {b.name: b.width for b in program.buffers}
        self.sizes = {b.name: SIZES[b.dtype] for b in program.buffers}

    def record(
        self, stage: str, dims: Dims, words: Mapping[str, Word], wait: bool = False, ahead: Ahead | None = None
    ) -> None:
        """Raises ValueError for dims that the kernel cannot do."""
        if set(words) != set(dims.words):
            raise ValueError(f"{stage}: words {sorted(words)}, {dims.kind} has {sorted(dims.words)}")
        dims.check()
        opens = 0
        if posting_of(dims) is not None and words["number"] == self._opened:
            self._opened += 1
            opens = self._opened
        if dims not in self.codes:
            self.codes.append(dims)
        self.records.append(Record(stage, self.codes.index(dims), wait, dict(words), ahead, opens=opens))

    def buffer(self, name: str, column: int = 0) -> At:
        return At("buffer", name, column * self.sizes[name])

    def stride(self, name: str) -> int:
        """Bytes from a row of a buffer to the next one."""
        return self.widths[name] * self.sizes[name]

    def need(self, name: str, size: int) -> At:
        """Scratch of at least `size` bytes, shared by all stages that name it."""
        self.scratch[name] = max(self.scratch.get(name, 0), size)
        return At("scratch", name)

    def claim(self, name: str) -> Posted | None:
        """What was posted of a buffer, if the stage that is being planned takes it."""
        if name not in self.left:
            return None
        self.claimed.add(name)
        return self.left.pop(name)

    def shared_by(self, chunks: int) -> int:
        """CTAs that share a row: a warp of each has something to do, and there are enough for all rows."""
        return min(-(-chunks // 32), max(1, self.geometry.grid // self.program.rows))

    def need_slot(self, size: int) -> None:
        """Room for an exchange of `size` bytes behind a slot's head."""
        self.slot_bytes = max(self.slot_bytes, -(-(HEAD + size) // LINE) * LINE)


def split(steps: int) -> int:
    """Warps that share the columns of a tile: as many as take the same number of steps each, so that nobody reads a
    weight twice."""
    return next(warps for warps in (8, 4, 2, 1) if steps % warps == 0)
