"""Experts as the standard path keeps them: BF16, MXFP4 bytes as stored, or MXFP4 words for fused kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepkernel.vllm_plugin.standard import fused
from stepkernel.vllm_plugin.standard.products import Matrix, Mxfp4Matrix, PlainMatrix, Scratch

Packed = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PlainExperts:
    """[experts, outputs, inputs] in the dtype of the activations."""

    up: Tensor
    down: Tensor
    fused: bool

    def matrix(self, expert: int, down: bool) -> Matrix:
        return PlainMatrix((self.down if down else self.up)[expert], self.fused)

    def chosen(self, ids: Tensor, x: Tensor, down: bool) -> Tensor | None:
        if not self.fused or len(ids) > fused.PAIRS:
            return None
        return fused.chosen(self.down if down else self.up, ids, x)


@dataclass(frozen=True)
class PackedExperts:
    """Bytes [experts, outputs, inputs / 2] and scales [experts, outputs, inputs / 32]."""

    up: Packed
    down: Packed
    scratch: Scratch

    def matrix(self, expert: int, down: bool) -> Matrix:
        values, scale = self.down if down else self.up
        return Mxfp4Matrix(values[expert], scale[expert], self.scratch)

    def chosen(self, ids: Tensor, x: Tensor, down: bool) -> Tensor | None:
        return None


@dataclass(frozen=True)
class WordExperts:
    """Words int32 [experts, inputs / 8, outputs] and scales [experts, inputs / 32, outputs]."""

    up: Packed
    down: Packed

    def matrix(self, expert: int, down: bool) -> Matrix:
        values, scale = self.down if down else self.up
        return PlainMatrix(fused.whole_words(values[expert], scale[expert]).T)

    def chosen(self, ids: Tensor, x: Tensor, down: bool) -> Tensor | None:
        if len(ids) > fused.PAIRS:
            return None
        return fused.chosen_words(*(self.down if down else self.up), ids, x)


def words(packed: Tensor, scale: Tensor) -> Packed:
    """The layout of `WordExperts`, expert by expert so that no second copy of all exists."""
    experts, outputs, half = packed.shape
    found = torch.empty(experts, half // 4, outputs, dtype=torch.int32)
    scales = torch.empty(experts, scale.shape[2], outputs, dtype=torch.uint8)
    for e in range(experts):
        found[e] = packed[e].view(torch.int32).T
        scales[e] = scale[e].T
    return found, scales
