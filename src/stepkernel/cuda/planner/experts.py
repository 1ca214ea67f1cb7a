"""Records of the mixture of experts."""

from collections.abc import Sequence

from stepkernel.cuda.dims import CombineDims, ExpertsDims, NormDims, SelectDims
from stepkernel.cuda.planner.builder import Builder, split
from stepkernel.cuda.planner.exchange import Move, exchange, partial_sums
from stepkernel.cuda.planner.rows import betas
from stepkernel.cuda.records import At, Word
from stepkernel.program.stages import Combine, ExpertsDown, ExpertsUp, Matrix, Select


def select(b: Builder, stage: Select) -> None:
    dims = SelectDims(stage.experts, stage.top_k, b.program.rows, stage.renormalize, stage.scaling)
    words: dict[str, Word] = {name: b.buffer(getattr(stage, name)) for name in ("logits", "ids", "weights")}
    b.record(stage.name, dims, {**words, "bias": At("vector", stage.bias)})


def experts_up(b: Builder, stage: ExpertsUp) -> None:
    _experts(b, stage, (stage.w1, stage.w3), b.widths[stage.x] * 2, betas(b))


def experts_down(b: Builder, stage: ExpertsDown) -> None:
    _experts(b, stage, (stage.w2,), 0, (0.0, 0.0))


def _experts(
    b: Builder, stage: ExpertsUp | ExpertsDown, matrices: Sequence[Matrix], x_stride: int, bends: tuple[float, float]
) -> None:
    first = matrices[0]
    packed = first.format == "mxfp4"
    chunk = next((c for c in (32, 16, 8) if first.columns % (4 * c) == 0), 8) if packed else 8
    dims = ExpertsDims(
        len(matrices) == 2,
        packed,
        first.rows,
        first.columns,
        stage.top_k,
        b.program.rows,
        split(first.columns // (4 * chunk)),
        chunk,
        *bends,
    )
    words: dict[str, Word] = {"second": 0, "second_scale": 0}
    for name, matrix in zip(("first", "second"), matrices, strict=False):
        words[name] = At("experts", matrix.name)
        words[f"{name}_scale"] = At("scales", matrix.name) if packed else 0
    words |= {
        "x": b.buffer(stage.x),
        "ids": b.buffer(stage.ids),
        "out": b.buffer(stage.out),
        "x_stride": x_stride,
    }
    b.record(stage.name, dims, words)


def combine(b: Builder, stage: Combine) -> None:
    """Of several ranks: each its part of the sum, the exchange, then the norm."""
    alone, rows, out = stage.exchange == "none", b.program.rows, b.buffer(stage.out)
    norm: Word = At("norm", stage.norm) if stage.norm else 0
    dims = CombineDims(stage.width, stage.top_k, rows, alone and stage.norm is not None, stage.eps, not alone)
    words: dict[str, Word] = {name: b.buffer(getattr(stage, name)) for name in ("x", "weights")}
    if alone:
        b.record(stage.name, dims, {**words, "out": out, "norm": norm})
        return
    partial, row = partial_sums(b, stage.width), stage.width * 4
    b.record(stage.name, dims, {**words, "out": partial, "norm": 0})
    exchange(b, stage.name, [Move("reduce", partial, row, out, b.stride(stage.out), row, floats=True)])
    if stage.norm:
        b.record(stage.name, NormDims(stage.width, rows, stage.eps), {"x": out, "norm": norm}, wait=True)
