"""Builds the two programs of a DSpark draft round (spec 5.3): context into the cache, and the block of drafts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_checkpoint import (
    CONFIDENCE_BIAS,
    CONFIDENCE_WEIGHT,
    CONTEXT_NORM,
    CONTEXT_PROJ,
    FINAL_NORM,
    MARKOV_IN,
    MARKOV_OUT,
)
from stepkernel.model.draft_config import DraftConfig
from stepkernel.model.shard import Shard, shard_sizes
from stepkernel.program import attention, feedforward
from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.program.program import MAX_ROWS, PREFIX, TAPS, Program
from stepkernel.program.stages import (
    Absorb,
    Attend,
    Buffer,
    Embed,
    LatentInsert,
    Linear,
    Matrix,
    MixNorm,
    Projection,
    Stage,
    Update,
)

SINGLE = Shard(0, 1)
LOGITS, DRAFTS, CONFIDENCE = "logits", "drafts", "confidence"
# Tapped rows that one call takes in. On two AVX2 cores a row takes 9 us in calls of 32 and 19 us in calls of 64 with
# the draft of tiny-k3, 73 and 79 us with that of k3-mini.
CONTEXT_ROWS = 32


@dataclass(frozen=True)
class DraftPrograms:
    """The parts of one draft round. They share the draft's latent cache, one array per draft layer, and nothing else.

    context: rows are tapped target rows. block: `drafts` rows for each of up to `requests` requests.
    """

    config: DraftConfig
    context: Program
    block: Program

    @property
    def requests(self) -> int:
        return self.block.requests

    @property
    def drafts(self) -> int:
        """Draft tokens per request."""
        return self.block.queries


def build_draft(
    config: DraftConfig, target: ModelConfig, requests: int, drafts: int, context_rows: int = MAX_ROWS
) -> DraftPrograms:
    """Programs of blocks of exactly `drafts` tokens and of up to `context_rows` tapped rows.

    Raises ConfigError if the draft is not made for this target or does not take so many drafts, ValueError for more
    rows than a step takes.
    """
    config.check_drafts(drafts)
    backbone = config.backbone(target)
    if requests < 1 or requests * drafts > MAX_ROWS:
        raise ValueError(f"{requests} requests x {drafts} drafts: a block takes 1 to {MAX_ROWS} rows")
    return DraftPrograms(config, _context(config, backbone, context_rows), _block(config, backbone, requests, drafts))


def _context(config: DraftConfig, backbone: ModelConfig, rows: int) -> Program:
    """Tapped streams to features, features to the latent rows of every draft layer (spec 5.3.1)."""
    hidden, row = config.hidden_size, backbone.latent_row
    features = Projection(Matrix(CONTEXT_PROJ, hidden, config.taps_width), TAPS, PREFIX)
    stages: list[Stage] = [
        Linear("context.features", -1, (features,)),
        _norm("context.norm", -1, "none", (), CONTEXT_NORM, config),
    ]
    names = [f"kv_low{layer}" for layer in range(config.num_layers)]
    keys = tuple(
        Projection(Matrix(f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", row, hidden), "hidden", name)
        for layer, name in enumerate(names)
    )
    stages.append(Linear("context.keys", -1, keys))
    for layer, name in enumerate(names):
        stages.append(_rotate(config, f"context.rotate{layer}", layer, 1, row, name))
        insert = _insert(backbone, layer)
        stages.append(
            replace(
                insert,
                name=f"context.insert{layer}",
                kv=name,
                query_low=None,
                query_norm=None,
                query_rank=0,
                query_out=None,
            )
        )
    buffers = (
        Buffer(TAPS, config.taps_width, "bf16"),
        Buffer(PREFIX, hidden, "bf16"),
        Buffer("hidden", hidden, "bf16"),
        *(Buffer(name, row, "bf16") for name in names),
    )
    return Program(backbone, SINGLE, rows, 1, tuple(stages), buffers)


def _block(config: DraftConfig, backbone: ModelConfig, requests: int, drafts: int) -> Program:
    """Anchor and mask rows through the layers, then one Markov step after the other (spec 5.3.2 to 5.3.5)."""
    vocab, rank = config.vocab_size, config.markov_rank
    sizes = shard_sizes(backbone, 1)
    stages: list[Stage] = [Embed("embed", -1, Matrix("model.embed_tokens.weight", vocab, config.hidden_size), PREFIX)]
    delta: tuple[str, ...] = ()
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        update: Update = "add" if delta else "none"
        stages.append(
            _norm(f"L{layer:02d}.attention.norm", layer, update, delta, prefix + "input_layernorm.weight", config)
        )
        stages += _attention(config, backbone, layer)
        norm = prefix + "post_attention_layernorm.weight"
        stages.append(_norm(f"L{layer:02d}.mlp.norm", layer, "add", ("attention_out",), norm, config))
        ffn, delta = feedforward.stages(backbone, sizes, SINGLE, layer)
        stages += ffn
    last = config.num_layers
    stages.append(_norm("final.norm", last, "add", delta, FINAL_NORM, config))
    head = Projection(Matrix("lm_head.weight", vocab, config.hidden_size), "hidden", LOGITS)
    stages.append(Linear("head", last, (head,), backbone.logit_scale))
    for j in range(drafts):
        places = (vocab, rank, MARKOV_IN, MARKOV_OUT, LOGITS, DRAFTS, "markov_bias")
        stages.append(MarkovBias(f"markov{j}.bias", last, j, drafts, *places))
        stages.append(ChooseDraft(f"markov{j}.choose", last, j, drafts, vocab, LOGITS, DRAFTS))
    if config.confidence_head:
        stages.append(
            Confidence(
                "confidence",
                last,
                drafts,
                config.hidden_size,
                rank if config.confidence_with_markov else 0,
                CONFIDENCE_WEIGHT,
                CONFIDENCE_BIAS,
                MARKOV_IN if config.confidence_with_markov else None,
                "hidden",
                DRAFTS,
                CONFIDENCE,
            )
        )
    buffers = [
        Buffer(PREFIX, config.hidden_size, "bf16"),
        Buffer("hidden", config.hidden_size, "bf16"),
        Buffer("attention_out", config.hidden_size, "bf16"),
        *attention.buffers(backbone, sizes),
        *feedforward.buffers(backbone, sizes),
        Buffer(LOGITS, vocab, "f32"),
        Buffer("markov_bias", vocab, "f32"),
        Buffer(DRAFTS, 1, "i32"),
        Buffer(CONFIDENCE, 1 if config.confidence_head else 0, "f32"),
    ]
    return Program(backbone, SINGLE, requests, drafts, tuple(stages), tuple(b for b in buffers if b.width))


def _attention(config: DraftConfig, backbone: ModelConfig, layer: int) -> Iterator[Stage]:
    """The target's MLA with two differences: queries and keys are rotated, and every row sees the whole block."""
    name, heads, width = f"L{layer:02d}.mla.", config.num_heads, backbone.qk_head_dim
    for stage in attention.stages(backbone, shard_sizes(backbone, 1), layer, "none"):
        if isinstance(stage, LatentInsert):
            yield _rotate(config, name + "rotate_key", layer, 1, backbone.latent_row, stage.kv)
        if isinstance(stage, Absorb):
            yield _rotate(config, name + "rotate_query", layer, heads, width, stage.x)
        yield replace(stage, causal=False) if isinstance(stage, Attend) else stage


def _insert(backbone: ModelConfig, layer: int) -> LatentInsert:
    found = attention.stages(backbone, shard_sizes(backbone, 1), layer, "none")
    return next(stage for stage in found if isinstance(stage, LatentInsert))


def _rotate(config: DraftConfig, name: str, layer: int, heads: int, width: int, x: str) -> Rotate:
    return Rotate(name, layer, heads, width, config.qk_rope_head_dim, config.rope_theta, x)


def _norm(name: str, layer: int, update: Update, delta: tuple[str, ...], weight: str, config: DraftConfig) -> MixNorm:
    """A plain residual and RMSNorm of the stream into `hidden`."""
    return MixNorm(
        name=name,
        layer=layer,
        update=update,
        delta=delta,
        sources=0,
        save=None,
        score_norm=None,
        score_proj=None,
        norm=weight,
        width=config.hidden_size,
        eps=config.rms_norm_eps,
        out="hidden",
    )
