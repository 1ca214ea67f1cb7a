"""What the standard path asks of weights, and the plain form: every matrix a tensor of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepkernel.model.weights import Weights
from stepkernel.program.program import Program
from stepkernel.program.stages import (
    Absorb,
    Embed,
    ExpertsDown,
    ExpertsUp,
    KdaCore,
    Linear,
    Projection,
    ValueGate,
)
from stepkernel.program.stages import Matrix as Shape
from stepkernel.vllm_plugin.standard import mxfp4
from stepkernel.vllm_plugin.standard.experts import PackedExperts, PlainExperts, WordExperts, words
from stepkernel.vllm_plugin.standard.kda import KdaWeights
from stepkernel.vllm_plugin.standard.moe import Experts
from stepkernel.vllm_plugin.standard.products import Matrix, PlainMatrix, Scratch


@dataclass(frozen=True)
class Joint:
    """One product for all parts of a `Linear` that share their input; `starts` are the parts' first outputs."""

    x: str
    parts: tuple[Projection, ...]
    starts: tuple[int, ...]
    matrix: Matrix
    exact: bool


class StandardWeights(Protocol):
    """Weights of the stages of one program, in the dtype of the activations unless said otherwise."""

    def vector(self, name: str) -> Tensor:
        """float32."""
        ...

    def embedding(self, stage: Embed) -> Tensor: ...

    def joints(self, stage: Linear) -> list[Joint]: ...

    def heads(self, stage: Absorb | ValueGate) -> Callable[[], Tensor]:
        """Absorb: W_UK [heads, nope, lora]; ValueGate: W_UV transposed [heads, lora, value]."""
        ...

    def experts(self, up: ExpertsUp, down: ExpertsDown) -> Experts: ...

    def kda(self, stage: KdaCore) -> KdaWeights: ...


def kda_weights(stage: KdaCore, vector: Callable[[str], Tensor]) -> KdaWeights:
    width = stage.heads * stage.head_dim
    filters = torch.cat([vector(name).view(width, stage.conv_width) for name in stage.conv])
    rate = vector(stage.a_log).exp()
    return KdaWeights(filters.T.contiguous(), rate, vector(stage.dt_bias), vector(stage.out_norm))


def split_parts(program: Program, stage: Linear) -> list[tuple[str, bool, tuple[Projection, ...]]]:
    """Input, whether its outputs stay float32, and parts of each product of a `Linear`."""
    exact = {b.name for b in program.buffers if b.dtype == "f32"}
    found: dict[tuple[str, bool], list[Projection]] = {}
    for part in stage.parts:
        found.setdefault((part.x, part.out in exact), []).append(part)
    return [(x, is_exact, tuple(parts)) for (x, is_exact), parts in found.items()]


class PlainWeights:
    """Copies of a checkpoint's matrices; MXFP4 stays packed.

    `fused`: products of few rows run as kernels of Inductor, for which MXFP4 lies in words side by side.
    """

    def __init__(self, program: Program, source: Weights, dtype: torch.dtype, fused: bool = False) -> None:
        self._program, self._source, self._dtype, self._fused = program, source, dtype, fused
        self._scratch = Scratch(dtype)  # layers run one after the other, blocks as well

    def vector(self, name: str) -> Tensor:
        return torch.from_numpy(self._source.vector(name).copy())

    def embedding(self, stage: Embed) -> Tensor:
        return self._matrix(stage.table.name)

    def joints(self, stage: Linear) -> list[Joint]:
        found = []
        for x, exact, parts in split_parts(self._program, stage):
            weight = torch.cat([self._matrix(part.matrix.name) for part in parts])
            starts = np.cumsum([0, *(part.matrix.rows for part in parts)]).tolist()
            found.append(Joint(x, parts, tuple(starts[:-1]), PlainMatrix(weight, self._fused), exact))
            self._source.release()
        return found

    def heads(self, stage: Absorb | ValueGate) -> Callable[[], Tensor]:
        kv_b = self._matrix(stage.kv_b).view(stage.heads, stage.nope + stage.value, stage.lora)
        matrices = kv_b[:, : stage.nope] if isinstance(stage, Absorb) else kv_b[:, stage.nope :].mT
        kept = matrices.contiguous()
        return lambda: kept

    def experts(self, up: ExpertsUp, down: ExpertsDown) -> Experts:
        one, other = (up.w1, up.w3), (down.w2,)
        found: Experts
        if down.w2.format != "mxfp4":
            found = PlainExperts(self._plain(one, up.experts), self._plain(other, up.experts), self._fused)
        else:
            first, second = self._packed(one, up.experts), self._packed(other, up.experts)
            if self._fused:
                found = WordExperts(words(*first), words(*second))
            else:
                found = PackedExperts(first, second, self._scratch)
        self._source.release()
        return found

    def kda(self, stage: KdaCore) -> KdaWeights:
        return kda_weights(stage, self.vector)

    def _matrix(self, name: str) -> Tensor:
        return _tensor(self._source.matrix(name)).to(self._dtype)

    def _plain(self, matrices: tuple[Shape, ...], experts: int) -> Tensor:
        rows = sum(m.rows for m in matrices)
        whole = torch.empty(experts, rows, matrices[0].columns, dtype=self._dtype)
        for e in range(experts):
            torch.cat([self._matrix(m.name.format(e)) for m in matrices], out=whole[e])
        return whole

    def _packed(self, matrices: tuple[Shape, ...], experts: int) -> tuple[Tensor, Tensor]:
        rows, columns = sum(m.rows for m in matrices), matrices[0].columns
        packed = torch.empty(experts, rows, columns // 2, dtype=torch.uint8)
        scale = torch.empty(experts, rows, columns // mxfp4.GROUP, dtype=torch.uint8)
        for e in range(experts):
            parts = [self._source.packed(m.name.format(e)) for m in matrices]
            packed[e] = torch.from_numpy(np.concatenate([p.packed for p in parts]))
            scale[e] = torch.from_numpy(np.concatenate([p.scale for p in parts]))
        return packed, scale


def _tensor(matrix: NDArray[Any]) -> Tensor:
    """A BF16 matrix as a tensor in memory of its own."""
    return torch.from_numpy(np.array(matrix.view(np.uint16)).view(np.int16)).view(torch.bfloat16)
