"""What stages name: buffers, matrices, and the ways ranks put their parts together."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["bf16", "mxfp4"]
Exchange = Literal["none", "all_reduce", "all_gather"]
Update = Literal["none", "add", "restart"]

BITS_PER_WEIGHT: dict[Format, float] = {"bf16": 16.0, "mxfp4": 4.25}


@dataclass(frozen=True)
class Buffer:
    """Scratch of a step: `rows x width` values, or `rows` blocks of it when `copies` is larger than one."""

    name: str
    width: int
    dtype: Literal["bf16", "f32", "i32"]
    copies: int = 1


@dataclass(frozen=True)
class Matrix:
    """A weight matrix as this shard sees it: `rows` outputs x `columns` inputs under its checkpoint name (spec 3)."""

    name: str
    rows: int
    columns: int
    format: Format = "bf16"

    @property
    def bytes(self) -> float:
        return self.rows * self.columns * BITS_PER_WEIGHT[self.format] / 8
