"""Constants of the mixture of experts."""

from dataclasses import dataclass
from typing import ClassVar

from stepkernel.cuda.dims.common import WARPS, Kind, column_tiles, require
from stepkernel.cuda.dims.exchange import POSTING_WORDS, Posting
from stepkernel.program.program import MAX_ROWS


@dataclass(frozen=True)
class SelectDims:
    """Of several `ranks`, a row's logits are taken first: `width` bytes that each has posted in exchange `number`."""

    kind: ClassVar[Kind] = "select"
    words: ClassVar[tuple[str, ...]] = ("logits", "bias", "ids", "weights", "width", "slot", "number")
    experts: int
    top_k: int
    rows: int
    renormalize: bool
    scaling: float
    ranks: int = 1

    def check(self) -> None:
        require(1 <= self.top_k <= min(32, self.experts), f"select: {self.top_k} of {self.experts}, up to 32 chosen")
        require(self.experts <= 1024, f"select: {self.experts} experts, up to 1024 are supported")

    def shared_bytes(self) -> int:
        return 16


@dataclass(frozen=True)
class ExpertsDims:
    """`up`: two matrices and the activation; otherwise one matrix. The experts of a matrix lie one after the other.

    `chunk`: consecutive columns of a thread; `hardware`: E2M1 by conversion instructions (from sm_100 on).
    """

    kind: ClassVar[Kind] = "experts"
    words: ClassVar[tuple[str, ...]] = ("first", "first_scale", "second", "second_scale", "x", "ids", "out", "x_stride")
    up: bool
    packed: bool
    outputs: int
    inputs: int
    top_k: int
    rows: int
    split: int
    chunk: int
    beta: float = 0.0
    linear_beta: float = 0.0
    hardware: bool = False

    def check(self) -> None:
        require(self.outputs % 16 == 0, f"experts: {self.outputs} outputs are no multiple of 16")
        require(1 <= self.rows <= MAX_ROWS, f"experts: {self.rows} rows, 1 to {MAX_ROWS} are supported")
        require(self.top_k <= 32, f"experts: {self.top_k} chosen, up to 32 are supported")
        require(self.chunk in ((8, 16, 32) if self.packed else (8,)), f"experts: chunks of {self.chunk} columns")
        require(
            self.inputs % (4 * self.chunk) == 0 and self.inputs % 32 == 0,
            f"experts: {self.inputs} inputs in chunks of {self.chunk}",
        )
        require(
            self.inputs // (4 * self.chunk) % self.split == 0,
            f"experts: {self.inputs} inputs in chunks of {self.chunk} for {self.split} warps",
        )

    def shared_bytes(self) -> int:
        matrices = 2 if self.up else 1
        scales = 16 * WARPS // self.split * self.inputs // 32 if self.packed else 0
        return WARPS * 512 * matrices + self.choices_bytes() + matrices * scales

    @property
    def eights(self) -> int:
        """Eights of choices in a pass over an expert's weights."""
        return min(2, column_tiles(self.rows))

    def choices_bytes(self) -> int:
        """Room for those of an expert: at most one of each row."""
        return -(-self.rows * 4 // 16) * 16


@dataclass(frozen=True)
class CombineDims:
    """`posting`: float32 sums that other ranks' are added to; nothing is rounded or normalised yet."""

    kind: ClassVar[Kind] = "combine"
    words: ClassVar[tuple[str, ...]] = ("x", "weights", "norm", "out", *POSTING_WORDS)
    width: int
    top_k: int
    rows: int
    normed: bool
    eps: float
    posting: Posting | None = None

    def check(self) -> None:
        require(self.width % 8 == 0, f"combine: width {self.width} is no multiple of 8")
        require(self.width <= 8192, f"combine: width {self.width}, up to 8192 are supported")
        require(not (self.posting is not None and self.normed), "combine: a part of a sum cannot be normalised")

    def shared_bytes(self) -> int:
        return 4 * WARPS
