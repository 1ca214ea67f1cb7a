"""Constants of what ranks send each other."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from stepkernel.cuda.dims.common import Kind, require

MAX_RANKS = 16


@dataclass(frozen=True)
class ExchangeDims:
    """An exchange of `rows` rows between `ranks` ranks.

    reduce    sums of all ranks' values in rank order, from float32 (`floats`) or BF16, rounded to BF16
    gather    all ranks' parts of a row side by side
    scatter   each rank gets its own part of all ranks' rows

    `multicast`: one store reaches all ranks, by NVLink; otherwise one store for each.
    """

    kind: ClassVar[Kind] = "exchange"
    words: ClassVar[tuple[str, ...]] = (
        "x",
        "x_stride",  # bytes
        "out",
        "out_stride",
        "width",  # bytes of a row that go from a rank to another one, a multiple of 16
        "slot",  # where the rows lie in a slot of a mailbox, bytes
        "number",  # of the exchange in the program
        "opens",  # 1: the first record of the exchange
        "greets",  # 1: the ranks compare what the step is
    )
    mode: Literal["reduce", "gather", "scatter"]
    ranks: int
    rows: int
    floats: bool = False
    multicast: bool = False

    def check(self) -> None:
        require(2 <= self.ranks <= MAX_RANKS, f"exchange: {self.ranks} ranks, 2 to {MAX_RANKS} are supported")
        require(not (self.multicast and self.mode == "scatter"), "exchange: what ranks get differs, no multicast")

    def shared_bytes(self) -> int:
        return 16


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
