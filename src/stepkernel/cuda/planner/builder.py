"""Collects codes, records and scratch of a program."""

from collections.abc import Mapping

from stepkernel.cuda.dims import Dims
from stepkernel.cuda.records import SIZES, Ahead, At, Geometry, Record, Word
from stepkernel.cuda.step_block import HEAD, LINE
from stepkernel.program.program import Program


class Builder:
    """`exchanges`: how many there are so far; `slot_bytes`: what the largest of them needs of a mailbox's slot."""

    def __init__(self, program: Program, geometry: Geometry) -> None:
        self.program, self.geometry = program, geometry
        self.codes: list[Dims] = []
        self.records: list[Record] = []
        self.scratch: dict[str, int] = {}
        self.exchanges = 0
        self.slot_bytes = 0
        self.widths = {b.name: b.width for b in program.buffers}
        self.sizes = {b.name: SIZES[b.dtype] for b in program.buffers}

    def record(
        self, stage: str, dims: Dims, words: Mapping[str, Word], wait: bool = False, ahead: Ahead | None = None
    ) -> None:
        """Raises ValueError for dims that the kernel cannot do."""
        if set(words) != set(dims.words):
            raise ValueError(f"{stage}: words {sorted(words)}, {dims.kind} has {sorted(dims.words)}")
        dims.check()
        if dims not in self.codes:
            self.codes.append(dims)
        self.records.append(Record(stage, self.codes.index(dims), wait, dict(words), ahead))

    def buffer(self, name: str, column: int = 0) -> At:
        return At("buffer", name, column * self.sizes[name])

    def stride(self, name: str) -> int:
        """Bytes from a row of a buffer to the next one."""
        return self.widths[name] * self.sizes[name]

    def need(self, name: str, size: int) -> At:
        """Scratch of at least `size` bytes, shared by all stages that name it."""
        self.scratch[name] = max(self.scratch.get(name, 0), size)
        return At("scratch", name)

    def need_slot(self, size: int) -> None:
        """Room for an exchange of `size` bytes behind a slot's head."""
        self.slot_bytes = max(self.slot_bytes, -(-(HEAD + size) // LINE) * LINE)


def split(steps: int) -> int:
    """Warps that share the columns of a tile: as many as take the same number of steps each, so that nobody reads a
    weight twice."""
    return next(warps for warps in (8, 4, 2, 1) if steps % warps == 0)
