"""Records of the mixture of experts."""

from collections.abc import Sequence

from stepkernel.cuda.dims import CombineDims, ExpertsDims, SelectDims
from stepkernel.cuda.planner.builder import Builder, split
from stepkernel.cuda.planner.exchange import NOTHING, Exchange, posting
from stepkernel.cuda.planner.rows import betas
from stepkernel.cuda.records import At, Word
from stepkernel.program.stages import Combine, ExpertsDown, ExpertsUp, Matrix, Select


def select(b: Builder, stage: Select) -> None:
    ranks = b.program.shard.size
    dims = SelectDims(stage.experts, stage.top_k, b.program.rows, stage.renormalize, stage.scaling, ranks)
    posted = b.claim(stage.logits)
    words: dict[str, Word] = {name: b.buffer(getattr(stage, name)) for name in ("logits", "ids", "weights")}
    words |= {"bias": At("vector", stage.bias), "width": 0, "slot": 0, "number": 0}
    if posted:
        words |= {"width": posted.width, "slot": posted.slot, "number": posted.number}
    b.record(stage.name, dims, words)


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
    norm = At("norm", stage.norm) if stage.norm else None
    normed = alone and norm is not None
    dims = CombineDims(stage.width, stage.top_k, rows, normed, stage.eps, None if alone else posting(b))
    words: dict[str, Word] = {name: b.buffer(getattr(stage, name)) for name in ("x", "weights")}
    if alone:
        b.record(stage.name, dims, {**words, **NOTHING, "out": out, "norm": norm or 0})
        return
    exchange = Exchange(b, stage)
    posted = exchange.post(
        "reduce", out, b.stride(stage.out), stage.width * 4, True, (norm, stage.eps) if norm else None
    )
    b.record(stage.name, dims, {**words, **posted, "out": 0, "norm": 0})
    exchange.take()
