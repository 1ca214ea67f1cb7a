"""Constants of what ranks send each other."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stepkernel.cuda.dims.common import WARPS, Kind, require

MAX_RANKS = 16


@dataclass(frozen=True)
class Posting:
    """How a stage stores what it computes into the mailboxes of `ranks` ranks. `multicast`: one store reaches all
    ranks, by NVLink; otherwise one store for each.

    Such a stage has the words

    slot     where its rows lie in a slot of a mailbox, bytes
    number   of the exchange in the program
    """

    ranks: int
    multicast: bool = False


POSTING_WORDS = ("slot", "number")


@dataclass(frozen=True)
class PostDims:
    """What lies in memory already goes into the mailboxes of all ranks; with `scatter` each gets its own part."""

    kind: ClassVar[Kind] = "post"
    words: ClassVar[tuple[str, ...]] = (
        "x",
        "x_stride",  # bytes
        "width",  # bytes of a row that go from a rank to another one, a multiple of 16
        *POSTING_WORDS,
    )
    rows: int
    posting: Posting
    scatter: bool = False

    def check(self) -> None:
        ranks = self.posting.ranks
        require(2 <= ranks <= MAX_RANKS, f"exchange: {ranks} ranks, 2 to {MAX_RANKS} are supported")
        require(not (self.posting.multicast and self.scatter), "exchange: what ranks get differs, no multicast")

    def shared_bytes(self) -> int:
        return 16


@dataclass(frozen=True)
class TakeDims:
    """What all ranks have posted of `rows` rows.

    reduce    sums of all ranks' values in rank order, from float32 (`floats`) or BF16, rounded to BF16
    gather    all ranks' parts of a row side by side

    `parts` CTAs take a row of sums, and the one that comes last makes its norm, `norm_width` values; 0: no norm.
    """

    kind: ClassVar[Kind] = "take"
    words: ClassVar[tuple[str, ...]] = (
        "out",
        "out_stride",  # bytes
        "width",  # bytes of a row that come from each rank, a multiple of 16
        "slot",  # where the rows lie in a slot of a mailbox, bytes
        "number",  # of the exchange in the program
        "greets",  # 1: the ranks compare what the step is
        "norm",
        "counters",
    )
    mode: Literal["reduce", "gather"]
    ranks: int
    rows: int
    floats: bool = False
    parts: int = 0
    norm_width: int = 0
    eps: float = 0.0

    def check(self) -> None:
        require(2 <= self.ranks <= MAX_RANKS, f"exchange: {self.ranks} ranks, 2 to {MAX_RANKS} are supported")
        require(self.parts == 0 or self.mode == "reduce", "exchange: sums only can be normalised")
        require(self.norm_width % 8 == 0, f"norm: width {self.norm_width} is no multiple of 8")
        require(self.norm_width <= 8192, f"norm: width {self.norm_width}, up to 8192 are supported")

    def shared_bytes(self) -> int:
        return 4 * WARPS + 16


@dataclass(frozen=True)
class MergeDims:
    """Parts of attention over several ranks' rows: for each head `lora` sums, the largest score, the total, padding."""

    kind: ClassVar[Kind] = "merge"
    words: ClassVar[tuple[str, ...]] = ("x", "out")
    ranks: int
    rows: int
    heads: int
    lora: int

    def check(self) -> None:
        require(self.lora % 8 == 0, f"merge: {self.lora} latent values are no multiple of 8")

    def shared_bytes(self) -> int:
        return 0
