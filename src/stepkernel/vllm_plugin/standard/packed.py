"""The standard path over the native kernels' weights: the only copy in memory, unpacked as it is used."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stepkernel.cpu.pack import padded_outputs
from stepkernel.cpu.stages.experts import group_bytes
from stepkernel.cpu.stages.linear import joint_parts
from stepkernel.cpu.weights import CpuWeights, float_buffers
from stepkernel.model.weights import Weights
from stepkernel.program.program import Program
from stepkernel.program.stages import Absorb, Embed, ExpertsDown, ExpertsUp, KdaCore, Linear, Projection, ValueGate
from stepkernel.program.stages import Matrix as Shape
from stepkernel.vllm_plugin.standard import mxfp4
from stepkernel.vllm_plugin.standard.kda import KdaWeights
from stepkernel.vllm_plugin.standard.moe import Experts
from stepkernel.vllm_plugin.standard.products import LANES, Matrix, Mxfp4Matrix, PackedMatrix, PlainMatrix, Scratch
from stepkernel.vllm_plugin.standard.weights import Joint, kda_weights


class PackedWeights:
    """Views of packed weights; vectors, a thousandth of the model, are read from the checkpoint."""

    def __init__(self, program: Program, packed: CpuWeights, source: Weights, dtype: torch.dtype) -> None:
        self._program, self._packed, self._source, self._dtype = program, packed, source, dtype
        self._scratch = Scratch(dtype)

    def vector(self, name: str) -> Tensor:
        return torch.from_numpy(self._source.vector(name).copy())

    def embedding(self, stage: Embed) -> Tensor:
        rows, columns = stage.table.rows, stage.table.columns
        return self._bytes(stage.name, 0, rows * columns * 2).view(torch.bfloat16).view(rows, columns)

    def joints(self, stage: Linear) -> list[Joint]:
        found = []
        exact = float_buffers(self._program)
        for index, parts in enumerate(joint_parts(stage, exact)):
            inputs = parts[0].matrix.columns
            rows = [padded_outputs(part.matrix.rows) for part in parts]
            words = self._words(stage.name, index, sum(rows), inputs)
            rounded = sum(1 for part in parts if part.out not in exact)
            for chosen, is_exact in ((slice(None, rounded), False), (slice(rounded, None), True)):
                if parts[chosen]:
                    first = sum(rows[: chosen.start or 0])
                    found.append(self._joint(parts[chosen], rows[chosen], words[first // LANES :], is_exact))
        return found

    def heads(self, stage: Absorb | ValueGate) -> Callable[[], Tensor]:
        outputs, inputs = (stage.lora, stage.nope) if isinstance(stage, Absorb) else (stage.value, stage.lora)
        padded = padded_outputs(outputs)
        words = self._words(stage.name, 0, stage.heads * padded, inputs)
        matrix = PackedMatrix(words, stage.heads * padded, self._scratch)

        def unpacked() -> Tensor:
            return matrix.whole().view(stage.heads, padded, inputs)[:, :outputs].mT

        return unpacked

    def experts(self, up: ExpertsUp, down: ExpertsDown) -> Experts:
        return UnpackedExperts(
            self._experts(up.name, up.experts, up.w1, 2), self._experts(down.name, down.experts, down.w2, 1)
        )

    def kda(self, stage: KdaCore) -> KdaWeights:
        return kda_weights(stage, self.vector)

    def _joint(self, parts: list[Projection], rows: list[int], words: Tensor, exact: bool) -> Joint:
        starts = np.cumsum([0, *rows]).tolist()
        matrix = PackedMatrix(words[: starts[-1] // LANES], starts[-1], self._scratch)
        return Joint(parts[0].x, tuple(parts), tuple(starts[:-1]), matrix, exact)

    def _experts(self, name: str, experts: int, shape: Shape, stacked: int) -> Callable[[int], Matrix]:
        """Matrices of an expert one above the other; packed, their groups of outputs alternate."""
        size, groups = group_bytes(shape), shape.rows // LANES
        memory = self._bytes(name, 0, experts * groups * stacked * size).view(experts, groups, stacked, size)
        rows, columns = stacked * shape.rows, shape.columns

        def plain(e: int) -> Matrix:
            words = memory[e].view(torch.int32).view(groups, stacked, columns // 2, LANES)
            target = self._scratch.take(rows, columns)
            target.view(torch.int32).view(stacked, groups, LANES, columns // 2).copy_(words.permute(1, 0, 3, 2))
            return PlainMatrix(self._scratch.converted(target))

        def quantised(e: int) -> Matrix:
            blocks = columns // mxfp4.GROUP
            scale = memory[e, :, :, : blocks * LANES].view(groups, stacked, blocks, LANES).permute(1, 0, 3, 2)
            nibbles = memory[e, :, :, blocks * LANES :].view(torch.int32).view(groups, stacked, columns // 8, LANES)
            packed = nibbles.permute(1, 0, 3, 2).contiguous().view(torch.uint8)
            return Mxfp4Matrix(packed.view(rows, columns // 2), scale.reshape(rows, blocks), self._scratch)

        return quantised if shape.format == "mxfp4" else plain

    def _words(self, name: str, index: int, outputs: int, inputs: int) -> Tensor:
        return self._bytes(name, index, outputs * inputs * 2).view(torch.int32).view(-1, inputs // 2, LANES)

    def _bytes(self, name: str, index: int, size: int) -> Tensor:
        """uint8 view of packed weights; their arena must outlive it."""
        start = self._packed.stages[name][index]
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)))


@dataclass(frozen=True)
class UnpackedExperts:
    """Each matrix is unpacked when it is used, in memory that all share."""

    up: Callable[[int], Matrix]
    down: Callable[[int], Matrix]

    def matrix(self, expert: int, down: bool) -> Matrix:
        return (self.down if down else self.up)(expert)

    def chosen(self, ids: Tensor, x: Tensor, down: bool) -> Tensor | None:
        return None
