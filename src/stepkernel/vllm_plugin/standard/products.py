"""Matrix products of the standard path: one weight, used as a plain tensor or unpacked block by block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SCRATCH = 1 << 21  # values of an unpacked block (4 MB of BF16, 8 MB of float32)
LANES = 8  # outputs of a packed group


class Matrix(Protocol):
    """A weight [outputs, inputs] in the dtype of the activations."""

    @property
    def outputs(self) -> int: ...

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First output and rows of consecutive blocks; a block is valid until the next one is asked for."""
        ...


@dataclass(frozen=True)
class PlainMatrix:
    weight: Tensor

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.weight


@dataclass(frozen=True)
class PackedMatrix:
    """BF16 in the order of the native kernels: int32 [outputs / 8, inputs / 2, 8], two inputs a word (cpu/pack.py)."""

    words: Tensor
    outputs: int
    scratch: "Scratch"

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        inputs = self.words.shape[1] * 2
        step = max(1, SCRATCH // (inputs * LANES))
        for group in range(0, self.words.shape[0], step):
            packed = self.words[group : group + step]
            rows = self.scratch.take(packed.shape[0] * LANES, inputs)
            rows.view(torch.int32).view(-1, LANES, inputs // 2).copy_(packed.transpose(1, 2))
            first = group * LANES
            yield first, self.scratch.converted(rows)[: self.outputs - first]

    def whole(self) -> Tensor:
        """All rows at once, valid until the scratch is used again."""
        inputs = self.words.shape[1] * 2
        rows = self.scratch.take(self.words.shape[0] * LANES, inputs)
        rows.view(torch.int32).view(-1, LANES, inputs // 2).copy_(self.words.transpose(1, 2))
        return self.scratch.converted(rows)[: self.outputs]


class Scratch:
    """Memory that unpacked weights share; float32 activations get a converted copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def take(self, rows: int, columns: int) -> Tensor:
        """BF16 [rows, columns] of any content."""
        if self._memory.numel() < rows * columns:
            self._memory = torch.empty(max(rows * columns, SCRATCH), dtype=torch.bfloat16)
        return self._memory[: rows * columns].view(rows, columns)

    def converted(self, rows: Tensor) -> Tensor:
        return rows if self.dtype == torch.bfloat16 else rows.to(self.dtype)


def product(matrix: Matrix, x: Tensor) -> Tensor:
    """x W^T, summed in float32 and rounded once to the dtype of x."""
    out: Tensor | None = None
    for first, rows in matrix.blocks():
        part = F.linear(x, rows)
        if part.shape[1] == matrix.outputs:
            return part
        if out is None:
            out = x.new_empty(x.shape[0], matrix.outputs)
        out[:, first : first + part.shape[1]] = part
    assert out is not None
    return out


def exact_product(matrix: Matrix, x: Tensor) -> Tensor:
    """x W^T in float32, not rounded (router, head)."""
    x = x.float()
    out = x.new_empty(x.shape[0], matrix.outputs)
    for first, block in matrix.blocks():
        step = max(1, SCRATCH // block.shape[1])
        for start in range(0, block.shape[0], step):
            rows = block[start : start + step].float()
            out[:, first + start : first + start + rows.shape[0]] = x @ rows.T
    return out
