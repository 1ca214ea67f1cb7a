"""Builds the program of one decode step for a model, a tensor-parallel shard and a number of rows (spec 2, 3.5)."""

from dataclasses import dataclass, replace

from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_config import AuxStream
from stepkernel.model.shard import Shard, shard_sizes
from stepkernel.program import attention, feedforward
from stepkernel.program.context import context_shard
from stepkernel.program.program import BLOCKS, MAX_ROWS, PREFIX, TAPS, Program
from stepkernel.program.stages import (
    Argmax,
    Buffer,
    Embed,
    Exchange,
    Linear,
    Matrix,
    MixNorm,
    Projection,
    Stage,
    Tap,
    Update,
)

SINGLE = Shard(0, 1)


@dataclass(frozen=True)
class Taps:
    """The streams that a step keeps for a draft: after these 0-based layers, ascending; prefix or mix (spec 5.2)."""

    layers: tuple[int, ...]
    stream: AuxStream = "prefix_only"


def build_program(
    config: ModelConfig,
    shard: Shard = SINGLE,
    requests: int = 1,
    queries: int = 1,
    max_rows: int = MAX_ROWS,
    taps: Taps | None = None,
    context_interleave: int | None = None,
) -> Program:
    """The step of up to `requests` requests with `queries` tokens each; with `taps` it also fills the buffer TAPS.

    With `context_interleave` the ranks share out the latent rows, so many consecutive tokens at a time (spec 4.3).
    Raises ValueError if the rows exceed `max_rows` (64, spec 6.2; prefill on the standard path passes its own limit) or
    the shard does not divide the model.
    """
    if requests < 1 or queries < 1 or requests * queries > max_rows:
        raise ValueError(f"{requests} requests x {queries} queries: a step takes 1 to {max_rows} rows")
    sizes = shard_sizes(config, shard.size)
    hidden = config.hidden_size
    context = context_shard(shard, context_interleave)
    stages: list[Stage] = [
        Embed("embed", -1, Matrix("model.embed_tokens.weight", sizes.vocab, hidden), PREFIX, _reduce(shard))
    ]
    delta: tuple[str, ...] = ()
    for layer in range(config.num_layers):
        stages.append(replace(_mix(config, layer, "attention", delta), tap=_tap(config, taps, layer - 1)))
        stages += attention.stages(config, sizes, layer, _reduce(shard), context)
        stages.append(_mix(config, layer, "mlp", ("attention_out",)))
        ffn, delta = feedforward.stages(config, sizes, shard, layer)
        stages += ffn
    stages.append(replace(_final_mix(config, delta), tap=_tap(config, taps, config.num_layers - 1)))
    head = Matrix("lm_head.weight", sizes.vocab, hidden)
    gather: Exchange = "all_gather" if shard.size > 1 else "none"
    logits = Projection(head, "hidden", "logits", shard.rank * sizes.vocab, gather)
    stages.append(Linear("head", config.num_layers, (logits,), config.logit_scale))
    stages.append(Argmax("argmax", config.num_layers, config.vocab_size, "logits", "tokens"))
    buffers = [
        Buffer(PREFIX, hidden, "bf16"),
        Buffer(BLOCKS, hidden, "bf16", config.num_blocks),
        Buffer("hidden", hidden, "bf16"),
        Buffer("attention_out", hidden, "bf16"),
        *attention.buffers(config, sizes, context),
        *feedforward.buffers(config, sizes),
        Buffer("logits", config.vocab_size, "f32"),
        Buffer("tokens", 1, "i32"),
        Buffer(TAPS, 0 if taps is None else len(taps.layers) * hidden, "bf16"),
    ]
    kept = tuple(b for b in buffers if b.width and b.copies)
    return Program(config, shard, requests, queries, tuple(stages), kept, context)


def _tap(config: ModelConfig, taps: Taps | None, layer: int) -> Tap | None:
    """What the mix after `layer` keeps, if anything."""
    if taps is None or layer not in taps.layers:
        return None
    return Tap(TAPS, taps.layers.index(layer) * config.hidden_size, taps.stream == "attn_res_stream")


def _reduce(shard: Shard) -> Exchange:
    return "all_reduce" if shard.size > 1 else "none"


def _mix(config: ModelConfig, layer: int, place: str, delta: tuple[str, ...]) -> MixNorm:
    """The mix before attention (spec 2.4 steps 1, 2, 7 of the layer before) or before the MLP (steps 4, 5)."""
    prefix = f"model.layers.{layer}."
    block = config.attn_res_block_size
    attends = place == "attention"
    update: Update = "add" if delta else "none"
    sources, save = 0, None
    if block is not None:
        starts = layer % block == 0
        if attends:
            sources, save = -(-layer // block), layer // block if starts else None
        else:
            sources = layer // block + 1
            update = "restart" if starts else "add"
    res = "self_attention_res" if attends else "mlp_res"
    # A single source mixes to itself, so layer 0's scores have no effect (spec 2.4).
    mixes = block is not None and sources > 0
    return MixNorm(
        name=f"L{layer:02d}.{place}.mix",
        layer=layer,
        update=update,
        delta=delta,
        sources=sources,
        save=save,
        score_norm=f"{prefix}{res}_norm.weight" if mixes else None,
        score_proj=f"{prefix}{res}_proj.weight" if mixes else None,
        norm=prefix + ("input_layernorm.weight" if attends else "post_attention_layernorm.weight"),
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        out="hidden",
    )


def _final_mix(config: ModelConfig, delta: tuple[str, ...]) -> MixNorm:
    mixes = config.attn_res_block_size is not None
    return MixNorm(
        name="final.mix",
        layer=config.num_layers,
        update="add",
        delta=delta,
        sources=config.num_blocks,
        save=None,
        score_norm="model.output_attn_res_norm.weight" if mixes else None,
        score_proj="model.output_attn_res_proj.weight" if mixes else None,
        norm="model.norm.weight",
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        out="hidden",
        round_mix=mixes,
    )
