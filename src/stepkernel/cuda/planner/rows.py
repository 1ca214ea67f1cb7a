"""Records of the stages that work on whole rows."""

from stepkernel.cuda.dims import ActivateDims, ArgmaxDims, EmbedDims, MixNormDims
from stepkernel.cuda.dims.rows import Taken
from stepkernel.cuda.planner.builder import Builder
from stepkernel.cuda.planner.exchange import NOTHING, Exchange, posting
from stepkernel.cuda.records import At, Word
from stepkernel.program.program import BLOCKS, PREFIX
from stepkernel.program.stages import Activate, Argmax, Embed, MixNorm


def betas(b: Builder) -> tuple[float, float]:
    """Of the activation; 0 for none."""
    config = b.program.config
    return (config.situ_beta or 0.0, config.situ_linear_beta or 0.0) if config.activation == "situ" else (0.0, 0.0)


def embed(b: Builder, stage: Embed) -> None:
    table, out, alone = stage.table, b.buffer(stage.out), stage.exchange == "none"
    start = b.program.shard.rank * table.rows
    words: dict[str, Word] = {"table": At("matrix", table.name), "start": start, "count": table.rows}
    exchange = Exchange(b, stage)
    posted = NOTHING if alone else exchange.post("reduce", out, b.stride(stage.out), table.columns * 2)
    dims = EmbedDims(table.columns, b.program.rows, None if alone else posting(b))
    b.record(stage.name, dims, {**words, **posted, "out": out if alone else 0})
    exchange.take()


def activate(b: Builder, stage: Activate) -> None:
    words: dict[str, Word] = {"x": b.buffer(stage.x), "out": b.buffer(stage.out)}
    b.record(stage.name, ActivateDims(stage.width, b.program.rows, *betas(b)), words)


def argmax(b: Builder, stage: Argmax) -> None:
    rows = b.program.rows
    parts = min(32, max(1, b.geometry.grid // rows))
    while stage.vocab % (4 * parts):
        parts -= 1
    words: dict[str, Word] = {
        "logits": b.buffer(stage.logits),
        "out": b.buffer(stage.out),
        "partial": b.need("argmax", 8 * rows * parts),
        "counters": b.need("counters argmax", 4 * rows),
    }
    b.record(stage.name, ArgmaxDims(stage.vocab, rows, parts), words)


def mix_norm(b: Builder, stage: MixNorm) -> None:
    if len(stage.delta) > 2:
        raise ValueError(f"{stage.name}: {len(stage.delta)} deltas, up to 2 are supported")
    deltas: list[Word] = [b.buffer(name) for name in stage.delta]
    deltas += [0] * (2 - len(deltas))
    block = b.program.rows * stage.width * 2
    mixes = stage.score_norm is not None and stage.score_proj is not None
    most = max(s.sources for s in b.program.stages if isinstance(s, MixNorm))
    tap = stage.tap
    first, second = [b.claim(name) for name in stage.delta] + [None] * (2 - len(stage.delta))
    taken = first or second
    ranks, parts = (b.program.shard.size, b.shared_by(stage.width // 4)) if taken else (1, 0)
    words: dict[str, Word] = {
        "prefix": b.buffer(PREFIX),
        "delta": deltas[0],
        "second": deltas[1],
        "blocks": At("buffer", BLOCKS) if BLOCKS in b.widths else 0,
        "save": 0 if stage.save is None else At("buffer", BLOCKS, stage.save * block),
        "score": At("score", f"{stage.score_norm}|{stage.score_proj}") if mixes else 0,
        "norm": At("norm", stage.norm),
        "out": b.buffer(stage.out),
        "sources": stage.sources,
        "restart": int(stage.update == "restart"),
        "round": int(stage.round_mix),
        "tap": 0 if tap is None else b.buffer(tap.out, tap.offset),
        "tap_stride": 0 if tap is None else b.widths[tap.out] * 2,
        "tap_mixed": int(tap is not None and tap.mixed),
        "slot": first.slot if first else 0,
        "second_slot": second.slot if second else 0,
        "number": taken.number if taken else 0,
        "counters": b.need("counters rows", 4 * b.program.rows) if taken else 0,
    }
    modes: list[Taken] = [posted.mode if posted else "" for posted in (first, second)]
    dims = MixNormDims(stage.width, b.program.rows, most, stage.eps, ranks, parts, *modes)
    b.record(stage.name, dims, words)
