"""Constants of the products with weights that all rows share."""

from dataclasses import dataclass
from typing import ClassVar

from stepkernel.cuda.dims.common import WARPS, Kind, require
from stepkernel.cuda.dims.exchange import POSTING_WORDS, Posting
from stepkernel.program.program import MAX_ROWS


@dataclass(frozen=True)
class LinearDims:
    """`per_head` outputs have inputs and a block of the weight of their own (0: all share them); heads are
    `head_bytes` apart in the weight. `posting`: the outputs go to the mailboxes of all ranks."""

    kind: ClassVar[Kind] = "linear"
    words: ClassVar[tuple[str, ...]] = (
        "weight",
        "x",
        "out",
        "gate",
        "outputs",
        "x_stride",
        "out_stride",
        "first",
        *POSTING_WORDS,
    )
    inputs: int
    rows: int
    split: int
    to_bf16: bool
    scale: float = 1.0
    per_head: int = 0
    head_bytes: int = 0
    gated: bool = False
    posting: Posting | None = None

    def check(self) -> None:
        require(self.inputs % 32 == 0, f"linear: {self.inputs} inputs are no multiple of 32")
        require(1 <= self.rows <= MAX_ROWS, f"linear: {self.rows} rows, 1 to {MAX_ROWS} are supported")
        require(self.split in (1, 2, 4, 8), f"linear: {self.split} warps per tile, 1, 2, 4 or 8 are supported")
        require(self.inputs // 32 % self.split == 0, f"linear: {self.inputs} inputs for {self.split} warps of 32")
        require(self.per_head % 16 == 0, f"linear: {self.per_head} outputs per head are no multiple of 16")

    def shared_bytes(self) -> int:
        return WARPS * 512


@dataclass(frozen=True)
class AbsorbDims:
    kind: ClassVar[Kind] = "absorb"
    words: ClassVar[tuple[str, ...]] = ("weight", "x", "out")
    heads: int
    nope: int
    rope: int
    value: int
    lora: int
    rows: int
    split: int

    def check(self) -> None:
        require(self.lora % 64 == 0, f"absorb: {self.lora} latent values are no multiple of 64")
        require(self.nope % (16 * self.split) == 0, f"absorb: {self.nope} inputs for {self.split} warps of 16")
        require(self.rope % 2 == 0, f"absorb: {self.rope} further values are odd")
        require(1 <= self.rows <= MAX_ROWS, f"absorb: {self.rows} rows, 1 to {MAX_ROWS} are supported")

    def shared_bytes(self) -> int:
        return WARPS * 2048
