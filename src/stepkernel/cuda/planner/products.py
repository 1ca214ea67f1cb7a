"""Records of the products with weights that all rows share."""

from collections.abc import Mapping

from stepkernel.cuda.dims import WARPS, AbsorbDims, LinearDims
from stepkernel.cuda.planner.builder import Builder, split
from stepkernel.cuda.planner.exchange import Move, exchange, partial_sums
from stepkernel.cuda.records import Ahead, At, Word
from stepkernel.program.stages import Absorb, Linear, Projection, ValueGate


def linear(b: Builder, stage: Linear) -> None:
    """The projections of a stage, then the exchange of those that other ranks have parts of."""
    started = 0
    moves = []
    for part in stage.parts:
        summed = part.exchange == "all_reduce"
        to_bf16 = b.sizes[part.out] == 2 and not summed
        columns = part.matrix.columns
        dims = LinearDims(columns, b.program.rows, split(columns // 32), to_bf16, stage.scale)
        out, stride, size = b.buffer(part.out, part.offset), b.stride(part.out), b.sizes[part.out]
        if summed:
            partial = partial_sums(b, part.matrix.rows)
            row = part.matrix.rows * 4
            moves.append(Move("reduce", partial, row, out, stride, row, floats=True))
            words = _projection(b, part, partial, row, started % b.geometry.grid)
        else:
            words = _projection(b, part, out, stride, started % b.geometry.grid)
            if part.exchange == "all_gather":
                moves.append(Move("gather", out, stride, b.buffer(part.out), stride, part.matrix.rows * size))
        b.record(stage.name, dims, words, ahead=_lines(dims, words))
        started += -(-part.matrix.rows // (16 * WARPS // dims.split))
    if moves:
        exchange(b, stage.name, moves)


def _projection(b: Builder, part: Projection, out: At, out_stride: int, first: int) -> dict[str, Word]:
    return {
        "weight": At("matrix", part.matrix.name),
        "x": b.buffer(part.x),
        "out": out,
        "gate": 0,
        "outputs": part.matrix.rows,
        "x_stride": b.stride(part.x),
        "out_stride": out_stride,
        "first": first,
    }


def _lines(dims: LinearDims, words: Mapping[str, Word]) -> Ahead:
    """Rows of the weight."""
    weight, outputs, first = words["weight"], words["outputs"], words["first"]
    assert isinstance(weight, At)
    assert isinstance(outputs, int)
    assert isinstance(first, int)
    row = dims.inputs * 2
    run = dims.per_head or outputs
    piece = 16 * WARPS // dims.split
    return Ahead(weight, outputs, piece, run, row, row, block=dims.head_bytes, first=first)


def value_gate(b: Builder, stage: ValueGate) -> None:
    dims = LinearDims(
        stage.lora,
        b.program.rows,
        split(stage.lora // 32),
        to_bf16=True,
        per_head=stage.value,
        head_bytes=(stage.nope + stage.value) * stage.lora * 2,
        gated=stage.gate is not None,
    )
    words: dict[str, Word] = {
        "weight": At("matrix", stage.kv_b, stage.nope * stage.lora * 2),
        "x": b.buffer(stage.x),
        "out": b.buffer(stage.out),
        "gate": b.buffer(stage.gate) if stage.gate else 0,
        "outputs": stage.heads * stage.value,
        "x_stride": stage.heads * stage.lora * 2,
        "out_stride": stage.heads * stage.value * 2,
        "first": 0,
    }
    b.record(stage.name, dims, words, ahead=_lines(dims, words))


def absorb(b: Builder, stage: Absorb) -> None:
    warps = split(stage.nope // 16)
    dims = AbsorbDims(stage.heads, stage.nope, stage.rope, stage.value, stage.lora, b.program.rows, warps)
    words: dict[str, Word] = {
        "weight": At("matrix", stage.kv_b),
        "x": b.buffer(stage.x),
        "out": b.buffer(stage.out),
    }
    across = stage.lora // 64
    ahead = Ahead(
        At("matrix", stage.kv_b),
        lines=stage.heads * across * stage.nope,
        piece=WARPS // warps * stage.nope,
        run=stage.nope,
        stride=stage.lora * 2,
        width=128,
        across=across,
        block=(stage.nope + stage.value) * stage.lora * 2,
    )
    b.record(stage.name, dims, words, ahead=ahead)
