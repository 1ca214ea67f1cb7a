"""Records of the products with weights that all rows share."""

from collections.abc import Mapping

from stepkernel.cuda.dims import WARPS, AbsorbDims, LinearDims
from stepkernel.cuda.planner.builder import Builder, split
from stepkernel.cuda.planner.exchange import NOTHING, Exchange, posting
from stepkernel.cuda.records import Ahead, At, Word
from stepkernel.program.stages import Absorb, Linear, Projection, ValueGate


def linear(b: Builder, stage: Linear) -> None:
    """The projections of a stage. Those that other ranks have parts of post their outputs, and are taken at the end."""
    started = 0
    exchange = Exchange(b, stage)
    for part in stage.parts:
        summed, alone = part.exchange == "all_reduce", part.exchange == "none"
        to_bf16 = b.sizes[part.out] == 2 and not summed
        columns = part.matrix.columns
        warps = split(columns // 32)
        dims = LinearDims(columns, b.program.rows, warps, to_bf16, stage.scale, posting=None if alone else posting(b))
        out, stride, row = b.buffer(part.out, part.offset), b.stride(part.out), part.matrix.rows * (2 if to_bf16 else 4)
        words = _projection(b, part, started % b.geometry.grid)
        if alone:
            words |= {**NOTHING, "out": out, "out_stride": stride}
        elif summed:
            words |= {**exchange.post("reduce", out, stride, row, floats=True), "out": 0, "out_stride": row}
        else:
            gathered = b.buffer(part.out)
            words |= {**exchange.post("gather", gathered, stride, row), "out": 0, "out_stride": row}
        b.record(stage.name, dims, words, ahead=_lines(dims, words))
        started += -(-part.matrix.rows // (16 * WARPS // dims.split))
    exchange.take()


def _projection(b: Builder, part: Projection, first: int) -> dict[str, Word]:
    return {
        "weight": At("matrix", part.matrix.name),
        "x": b.buffer(part.x),
        "gate": 0,
        "outputs": part.matrix.rows,
        "x_stride": b.stride(part.x),
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
        **NOTHING,
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
