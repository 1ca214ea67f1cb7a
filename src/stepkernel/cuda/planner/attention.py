"""Records of the two kinds of attention, between their projections."""

from dataclasses import replace

from stepkernel.cuda.dims import AttendDims, KdaDims, LatentDims
from stepkernel.cuda.planner.builder import Builder
from stepkernel.cuda.records import At, Word
from stepkernel.program.stages import Attend, KdaCore, LatentInsert


def kda(b: Builder, stage: KdaCore) -> None:
    requests, heads, dim = b.program.requests, stage.heads, stage.head_dim
    parts = 4 if b.geometry.recovers else 1  # 8 rows of a warp and what records need are too many registers
    while parts < 16 and 2 * parts * requests * heads <= b.geometry.grid:
        parts *= 2
    dims = KdaDims(
        heads,
        requests,
        b.program.queries,
        parts,
        stage.gate_lower_bound or 0.0,
        stage.eps,
        dim,
        stage.conv_width,
        b.geometry.bf16_states,
        b.geometry.recovers,
    )
    rows = b.geometry.window - stage.conv_width + 2
    words: dict[str, Word] = {name: b.buffer(getattr(stage, name)) for name in ("qkv", "gamma", "gate", "beta")}
    for name, tensor in zip(("filter_q", "filter_k", "filter_v"), stage.conv, strict=True):
        words[name] = At("vector", tensor)
    words |= {
        "out": b.buffer(stage.out),
        "a_log": At("vector", stage.a_log),
        "dt_bias": At("vector", stage.dt_bias),
        "norm": At("vector", stage.out_norm),
        "conv": At("conv", str(stage.index)),
        "conv_slot": b.geometry.window * 3 * heads * dim * 2,
        "state": At("state", str(stage.index)),
        "state_slot": heads * dim * dim * dims.state_bytes,
        "slots": At("slots", "0"),
        "partial": b.need("kda", b.program.rows * heads * dim * 4),
        "counters": b.need("counters kda", requests * heads * 4),
        "records": At("records", str(stage.index)) if dims.recovers else 0,
        "records_slot": rows * heads * 3 * dim * 4 if dims.recovers else 0,
    }
    b.record(stage.name, dims, words)


def latent_insert(b: Builder, stage: LatentInsert) -> None:
    dims = LatentDims(stage.lora, stage.rope, stage.query_rank, b.program.rows, stage.eps, fp8=b.geometry.fp8_latents)
    words: dict[str, Word] = {
        "kv": b.buffer(stage.kv),
        "norm": At("norm", stage.kv_norm),
        "cache": At("latent", str(stage.index)),
        "query": b.buffer(stage.query_low) if stage.query_low else 0,
        "query_norm": At("norm", stage.query_norm) if stage.query_norm else 0,
        "query_out": b.buffer(stage.query_out) if stage.query_out else 0,
    }
    b.record(stage.name, dims, words)


def attend(b: Builder, stage: Attend) -> None:
    if not stage.causal:
        raise ValueError(f"{stage.name}: attention that is not causal is not supported")
    requests, queries = b.program.requests, b.program.queries
    dims = AttendDims(
        stage.heads,
        stage.lora,
        stage.rope,
        stage.scale,
        requests,
        queries,
        splits=1,
        tiles=1 if stage.heads * queries <= 8 else 2,
        page_tokens=b.geometry.page_tokens,
        ranks=stage.context.size if stage.context else 1,
        interleave=stage.context.interleave if stage.context else 1,
        fp8=b.geometry.fp8_latents,
    )
    splits = max(1, min(32, b.geometry.grid // (requests * dims.groups)))
    dims = replace(dims, splits=splits)
    partials = requests * dims.groups * splits * 8 * dims.tiles
    words: dict[str, Word] = {
        "x": b.buffer(stage.x),
        "cache": At("latent", str(stage.index)),
        "out": b.buffer(stage.out),
        "partial": b.need("attend", partials * stage.lora * 4),
        "statistics": b.need("attend statistics", partials * 8),
        "counters": b.need("counters attend", requests * dims.groups * 4),
    }
    b.record(stage.name, dims, words)
