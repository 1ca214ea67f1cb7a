"""Stages of the two attention kinds: KDA (spec 2.5) and MLA in absorbed form (spec 2.6)."""

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import ShardSizes
from stepkernel.program.context import ContextShard
from stepkernel.program.stages import (
    PARTIAL,
    Absorb,
    Attend,
    Buffer,
    Exchange,
    GatherQueries,
    KdaCore,
    LatentInsert,
    Linear,
    Matrix,
    MergeContext,
    Projection,
    Stage,
    ValueGate,
)


def stages(
    config: ModelConfig, sizes: ShardSizes, layer: int, reduce: Exchange, context: ContextShard | None = None
) -> list[Stage]:
    if config.is_kda(layer):
        return _kda(config, sizes, layer, reduce)
    return _mla(config, sizes, layer, reduce, context)


def buffers(config: ModelConfig, sizes: ShardSizes, context: ContextShard | None = None) -> list[Buffer]:
    linear = config.linear_attention
    width = sizes.kda_heads * linear.head_dim
    row = config.latent_row
    low_rank_gate = not linear.full_rank_gate
    found: list[Buffer] = []
    if config.kda_layers:
        found += [
            Buffer("qkv", 3 * width, "bf16"),
            Buffer("beta", sizes.kda_heads, "bf16"),
            Buffer("decay_low", linear.head_dim, "bf16"),
            Buffer("decay", width, "bf16"),
            Buffer("gate_low", linear.head_dim if low_rank_gate else 0, "bf16"),
            Buffer("gate", width, "bf16"),
            Buffer("kda_out", width, "bf16"),
        ]
    if config.mla_layers:
        heads = sizes.mla_heads
        found += [
            Buffer("query_low", config.q_lora_rank or 0, "bf16"),
            Buffer("query_latent", config.q_lora_rank or 0, "bf16"),
            Buffer("kv_low", row, "bf16"),
            Buffer("mla_gate", heads * config.v_head_dim if config.output_gate else 0, "bf16"),
            Buffer("query", heads * config.qk_head_dim, "bf16"),
            Buffer("query_absorbed", heads * row, "bf16"),
            Buffer("latent_out", heads * config.kv_lora_rank, "bf16"),
            Buffer("mla_out", heads * config.v_head_dim, "bf16"),
        ]
    if config.mla_layers and context is not None:
        everyone = sizes.mla_heads * context.size
        found += [
            Buffer("query_gathered", everyone * row, "bf16"),
            Buffer("latent_parts", everyone * (config.kv_lora_rank + PARTIAL), "f32"),
        ]
    return found


def _kda(config: ModelConfig, sizes: ShardSizes, layer: int, reduce: Exchange) -> list[Stage]:
    linear, hidden = config.linear_attention, config.hidden_size
    heads, dim = sizes.kda_heads, linear.head_dim
    width = heads * dim
    prefix = f"model.layers.{layer}.self_attn."
    name = f"L{layer:02d}.kda."

    def matrix(tensor: str, rows: int, columns: int) -> Matrix:
        return Matrix(f"{prefix}{tensor}.weight", rows, columns)

    parts = [
        *(
            Projection(matrix(f"{x}_proj", width, hidden), "hidden", "qkv", i * width)
            for i, x in enumerate(("q", "k", "v"))
        ),
        Projection(matrix("f_a_proj", dim, hidden), "hidden", "decay_low"),
        Projection(matrix("b_proj", heads, hidden), "hidden", "beta"),
    ]
    low = [Projection(matrix("f_b_proj", width, dim), "decay_low", "decay")]
    if linear.full_rank_gate:
        parts.append(Projection(matrix("g_proj", width, hidden), "hidden", "gate"))
    else:
        parts.append(Projection(matrix("g_a_proj", dim, hidden), "hidden", "gate_low"))
        low.append(Projection(matrix("g_b_proj", width, dim), "gate_low", "gate"))
    core = KdaCore(
        name=name + "core",
        layer=layer,
        index=config.kda_layers.index(layer),
        heads=heads,
        head_dim=dim,
        conv_width=linear.conv_width,
        gate_lower_bound=linear.gate_lower_bound,
        eps=config.rms_norm_eps,
        conv=(f"{prefix}q_conv1d.weight", f"{prefix}k_conv1d.weight", f"{prefix}v_conv1d.weight"),
        a_log=f"{prefix}A_log",
        dt_bias=f"{prefix}dt_bias",
        out_norm=f"{prefix}o_norm.weight",
        qkv="qkv",
        gamma="decay",
        gate="gate",
        beta="beta",
        out="kda_out",
    )
    out = Projection(matrix("o_proj", hidden, width), "kda_out", "attention_out", 0, reduce)
    return [
        Linear(name + "input", layer, tuple(parts)),
        Linear(name + "low", layer, tuple(low)),
        core,
        Linear(name + "output", layer, (out,)),
    ]


def _mla(
    config: ModelConfig, sizes: ShardSizes, layer: int, reduce: Exchange, context: ContextShard | None
) -> list[Stage]:
    hidden, heads, rank = config.hidden_size, sizes.mla_heads, config.q_lora_rank
    nope, rope, value, lora = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
    )
    prefix = f"model.layers.{layer}.self_attn."
    name = f"L{layer:02d}.mla."
    index = config.mla_layers.index(layer)

    def matrix(tensor: str, rows: int, columns: int) -> Matrix:
        return Matrix(f"{prefix}{tensor}.weight", rows, columns)

    parts = [Projection(matrix("kv_a_proj_with_mqa", lora + rope, hidden), "hidden", "kv_low")]
    if rank is None:
        parts.append(Projection(matrix("q_proj", heads * (nope + rope), hidden), "hidden", "query"))
    else:
        parts.append(Projection(matrix("q_a_proj", rank, hidden), "hidden", "query_low"))
    if config.output_gate:
        parts.append(Projection(matrix("g_proj", heads * value, hidden), "hidden", "mla_gate"))
    insert = LatentInsert(
        name=name + "insert",
        layer=layer,
        index=index,
        lora=lora,
        rope=rope,
        eps=config.latent_norm_eps,
        kv="kv_low",
        kv_norm=f"{prefix}kv_a_layernorm.weight",
        query_low=None if rank is None else "query_low",
        query_norm=None if rank is None else f"{prefix}q_a_layernorm.weight",
        query_rank=rank or 0,
        query_out=None if rank is None else "query_latent",
    )
    found: list[Stage] = [Linear(name + "input", layer, tuple(parts)), insert]
    if rank is not None:
        query = Projection(matrix("q_b_proj", heads * (nope + rope), rank), "query_latent", "query")
        found.append(Linear(name + "query", layer, (query,)))
    kv_b = f"{prefix}kv_b_proj.weight"
    gate = "mla_gate" if config.output_gate else None
    out = Projection(matrix("o_proj", hidden, heads * value), "mla_out", "attention_out", 0, reduce)
    return [
        *found,
        Absorb(name + "absorb", layer, heads, nope, rope, value, lora, kv_b, "query", "query_absorbed"),
        *_attend(config, heads, layer, context),
        ValueGate(name + "value", layer, heads, nope, value, lora, kv_b, "latent_out", gate, "mla_out"),
        Linear(name + "output", layer, (out,)),
    ]


def _attend(config: ModelConfig, heads: int, layer: int, context: ContextShard | None) -> list[Stage]:
    name, index = f"L{layer:02d}.mla.", config.mla_layers.index(layer)
    lora, rope, scale = config.kv_lora_rank, config.qk_rope_head_dim, config.softmax_scale
    if context is None:
        return [Attend(name + "attend", layer, index, heads, lora, rope, scale, "query_absorbed", "latent_out")]
    everyone = heads * context.size
    return [
        GatherQueries(name + "gather", layer, heads * (lora + rope), "query_absorbed", "query_gathered"),
        Attend(
            name + "attend",
            layer,
            index,
            everyone,
            lora,
            rope,
            scale,
            "query_gathered",
            "latent_parts",
            context=context,
        ),
        MergeContext(name + "merge", layer, context.size, heads, lora, "latent_parts", "latent_out"),
    ]
