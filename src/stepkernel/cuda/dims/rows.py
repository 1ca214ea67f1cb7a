"""Constants of the stages that work on whole rows."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stepkernel.cuda.dims.common import WARPS, Kind, require
from stepkernel.cuda.dims.exchange import POSTING_WORDS, Posting


@dataclass(frozen=True)
class EmbedDims:
    """`posting`: the table holds the tokens from `start` on, `count` of them; the others' rows become zeros."""

    kind: ClassVar[Kind] = "embed"
    words: ClassVar[tuple[str, ...]] = ("table", "out", "start", "count", *POSTING_WORDS)
    width: int
    rows: int
    posting: Posting | None = None

    def check(self) -> None:
        require(self.width % 8 == 0, f"embed: width {self.width} is no multiple of 8")

    def shared_bytes(self) -> int:
        return 0


Taken = Literal["", "reduce", "gather"]


@dataclass(frozen=True)
class MixNormDims:
    """`sources`: the most saved blocks that a stage mixes. Of several `ranks`, `parts` CTAs take what ranks have posted
    of a row's deltas in exchange `number`, and the last one goes on; 0: nothing is taken. How the deltas are taken:
    float32 sums, BF16 parts side by side, or not at all, as they lie in memory."""

    kind: ClassVar[Kind] = "mix_norm"
    words: ClassVar[tuple[str, ...]] = (
        "prefix",
        "delta",  # 0: nothing is added
        "second",  # 0: one delta
        "blocks",
        "save",  # address of the block, or 0
        "score",  # 0: a plain residual
        "norm",
        "out",
        "sources",
        "restart",  # 1: the delta becomes the prefix
        "round",  # 1: the mix is rounded first
        "tap",  # address, or 0
        "tap_stride",  # bytes
        "tap_mixed",  # 1: the mix instead of the prefix
        "slot",  # of the delta
        "second_slot",
        "number",
        "counters",
    )
    width: int
    rows: int
    sources: int
    eps: float
    ranks: int = 1
    parts: int = 0
    delta_taken: Taken = ""
    second_taken: Taken = ""

    def check(self) -> None:
        require(self.width % 8 == 0, f"mix_norm: width {self.width} is no multiple of 8")
        require(self.width <= 8192, f"mix_norm: width {self.width}, up to 8192 are supported")

    def shared_bytes(self) -> int:
        return 4 * (WARPS + 2 * (self.sources + 1))


@dataclass(frozen=True)
class ActivateDims:
    """`beta` 0: SiLU; `linear_beta` 0: the up branch as it is."""

    kind: ClassVar[Kind] = "activate"
    words: ClassVar[tuple[str, ...]] = ("x", "out")
    width: int
    rows: int
    beta: float
    linear_beta: float

    def check(self) -> None:
        require(self.width % 8 == 0, f"activate: width {self.width} is no multiple of 8")

    def shared_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class ArgmaxDims:
    """`parts` CTAs share a row."""

    kind: ClassVar[Kind] = "argmax"
    words: ClassVar[tuple[str, ...]] = ("logits", "out", "partial", "counters")
    vocab: int
    rows: int
    parts: int

    def check(self) -> None:
        require(self.vocab % (4 * self.parts) == 0, f"argmax: {self.vocab} logits in {self.parts} parts of fours")
        require(1 <= self.parts <= 32, f"argmax: {self.parts} parts, 1 to 32 are supported")

    def shared_bytes(self) -> int:
        return 8 * WARPS + 16
