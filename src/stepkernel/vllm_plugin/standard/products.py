"""Matrix products of the standard path: one weight, used as a plain tensor or unpacked block by block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.vllm_plugin.standard import fused, mxfp4

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
    """`fused`: products of few rows by kernels of Inductor."""

    weight: Tensor
    fused: bool = False

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.weight


@dataclass(frozen=True)
class Mxfp4Matrix:
    """uint8 [outputs, inputs / 2] and scales [outputs, inputs / 32], unpacked to float32 by blocks of outputs."""

    packed: Tensor
    scale: Tensor
    scratch: "Scratch"

    @property
    def outputs(self) -> int:
        return int(self.packed.shape[0])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        inputs = self.packed.shape[1] * 2
        step = max(1, BLOCK // inputs)
        for first in range(0, self.outputs, step):
            packed = self.packed[first : first + step]
            out = self.scratch.take(len(packed), inputs, torch.float32)
            yield first, mxfp4.unpack(packed, self.scale[first : first + step], out)


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
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """[rows, columns] of any content."""
        size = rows * columns * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(max(size, SCRATCH * torch.bfloat16.itemsize), dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(rows, columns)

    def converted(self, rows: Tensor) -> Tensor:
        return rows if self.dtype == torch.bfloat16 else rows.to(self.dtype)


# Without BF16 instructions the library multiplies row by row: 64 rows take 102 ms where float32 takes 18 (4096 x 2048,
# one AVX2 core). Converting blocks of the weight that stay in the cache and multiplying in float32 costs far less.
NATIVE_BF16 = bool(torch.cpu._is_avx512_bf16_supported())
FEW_ROWS = 3
BLOCK = 1 << 18  # values of a converted block (1 MB of float32)
_converted = torch.empty(BLOCK, dtype=torch.float32)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for weight [outputs, inputs], summed in float32 and rounded once to the dtype of x."""
    if weight.dtype == torch.float32:
        return F.linear(x.float(), weight).to(x.dtype)
    if x.dtype == torch.float32 or NATIVE_BF16 or x.shape[0] <= FEW_ROWS:
        return F.linear(x, weight)
    out = x.new_empty(x.shape[0], weight.shape[0])
    _in_float32(x.float(), weight, out)
    return out


def batched(x: Tensor, weight: Tensor) -> Tensor:
    """x [heads, rows, inputs] times weight [heads, inputs, outputs], in the manner of `linear`."""
    if x.dtype == torch.float32 or NATIVE_BF16 or x.shape[1] <= FEW_ROWS:
        return torch.bmm(x, weight)
    return torch.bmm(x.float(), weight.float()).to(x.dtype)


def product(matrix: Matrix, x: Tensor) -> Tensor:
    """x W^T, rounded to the dtype of x."""
    if _suits(matrix, x):
        return fused.product(matrix.weight, x.float()).T.to(x.dtype)
    out: Tensor | None = None
    for first, rows in matrix.blocks():
        part = linear(x, rows)
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
    if _suits(matrix, x):
        return fused.product(matrix.weight, x).T
    out = x.new_empty(x.shape[0], matrix.outputs)
    for first, block in matrix.blocks():
        _in_float32(x, block, out[:, first : first + block.shape[0]])
    return out


def _suits(matrix: Matrix, x: Tensor) -> TypeGuard[PlainMatrix]:
    return (
        isinstance(matrix, PlainMatrix)
        and matrix.fused
        and matrix.weight.dtype == torch.bfloat16
        and 0 < len(x) <= fused.ROWS
    )


def _in_float32(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Block by block of outputs, with one converted block in memory."""
    inputs = weight.shape[1]
    step = max(1, BLOCK // inputs)
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        if rows.dtype != torch.float32:
            fits = rows.numel() <= BLOCK
            target = _converted[: rows.numel()].view(rows.shape) if fits else rows.new_empty(rows.shape, dtype=x.dtype)
            rows = target.copy_(rows)
        out[:, start : start + step] = x @ rows.T
