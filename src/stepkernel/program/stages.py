"""The stages of one decode step. A stage names its weights, the buffers it reads and writes, and its state; it does no
work.

Buffers hold one row per token of the step. Their values are float32 in memory; a buffer of dtype "bf16" holds values
that were rounded to BF16 (spec 2.1), so that every executor has the same rounding points.
"""

from dataclasses import dataclass
from typing import Literal

from stepkernel.program.context import ContextShard
from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate

Format = Literal["bf16", "mxfp4"]
Exchange = Literal["none", "all_reduce", "all_gather"]
Update = Literal["none", "add", "restart"]

PARTIAL = 8  # values behind a head's partial sum: its largest score, its total, and six to fill a vector
BITS_PER_WEIGHT: dict[Format, float] = {"bf16": 16.0, "mxfp4": 4.25}


@dataclass(frozen=True)
class Buffer:
    """Scratch of a step: `rows x width` values, or `rows` blocks of it when `copies` is larger than one."""

    name: str
    width: int
    dtype: Literal["bf16", "f32", "i32"]
    copies: int = 1


@dataclass(frozen=True)
class Matrix:
    """A weight matrix as this shard sees it: `rows` outputs x `columns` inputs under its checkpoint name (spec 3)."""

    name: str
    rows: int
    columns: int
    format: Format = "bf16"

    @property
    def bytes(self) -> float:
        return self.rows * self.columns * BITS_PER_WEIGHT[self.format] / 8


@dataclass(frozen=True)
class Embed:
    """Copies the embedding row of each token into `out` (spec 2.2.1)."""

    name: str
    layer: int
    table: Matrix
    out: str
    exchange: Exchange = "none"


@dataclass(frozen=True)
class Tap:
    """Where a `MixNorm` puts the stream a draft reads (spec 5.2): the updated prefix, or with `mixed` the mix itself,
    rounded, at column `offset` of the buffer."""

    out: str
    offset: int
    mixed: bool


@dataclass(frozen=True)
class MixNorm:
    """Residual update, AttnRes mix and RMSNorm (spec 2.3, 2.4).

    `delta` buffers are summed (one rounding each), then enter the prefix by `update`. The first `sources` saved blocks
    and the prefix are mixed with the scores of `score_norm * score_proj`; both None means a plain residual. The prefix
    is saved as block `save` after the mix. `out` is the normalised mix; `round_mix` rounds the mix to BF16 first.
    `tap` keeps the stream after the layer before, for a draft.
    """

    name: str
    layer: int
    update: Update
    delta: tuple[str, ...]
    sources: int
    save: int | None
    score_norm: str | None
    score_proj: str | None
    norm: str
    width: int
    eps: float
    out: str
    round_mix: bool = False
    tap: Tap | None = None


@dataclass(frozen=True)
class Projection:
    """One matrix of a `Linear`: `out[:, offset : offset + rows] = x @ matrix.T`, rounded as the out buffer says."""

    matrix: Matrix
    x: str
    out: str
    offset: int = 0
    exchange: Exchange = "none"


@dataclass(frozen=True)
class Linear:
    """Independent projections that run together; each rounds its FP32 sums, times `scale`, once (spec 2.1)."""

    name: str
    layer: int
    parts: tuple[Projection, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Activate:
    """`out = act(gate, up)` of a gate | up row, rounded once (spec 2.7)."""

    name: str
    layer: int
    x: str
    width: int
    out: str


@dataclass(frozen=True)
class KdaCore:
    """Convolution, gates, delta-rule recurrence and gated norm of one KDA layer (spec 2.5.2 to 2.5.7).

    Reads `qkv` (q | k | v), `gamma` (decay logits), `gate` (output gate) and `beta`; writes `out` and the layer's
    convolution and recurrent state. `index` counts KDA layers.
    """

    name: str
    layer: int
    index: int
    heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    eps: float
    conv: tuple[str, str, str]
    a_log: str
    dt_bias: str
    out_norm: str
    qkv: str
    gamma: str
    gate: str
    beta: str
    out: str


@dataclass(frozen=True)
class LatentInsert:
    """RMSNorm of the low-rank query (if any) and of the latent; the latent row goes into the cache (spec 2.6, 4.2).

    `index` counts MLA layers. `kv` is latent | unrotated key part; only the latent is normalised.
    """

    name: str
    layer: int
    index: int
    lora: int
    rope: int
    eps: float
    kv: str
    kv_norm: str
    query_low: str | None
    query_norm: str | None
    query_rank: int
    query_out: str | None


@dataclass(frozen=True)
class Absorb:
    """`out[h] = [W_UK[h]^T q_nope[h] | q_rope[h]]`, rounded once (spec 2.6). `kv_b`: per head k rows, then v rows."""

    name: str
    layer: int
    heads: int
    nope: int
    rope: int
    value: int
    lora: int
    kv_b: str
    x: str
    out: str


@dataclass(frozen=True)
class Attend:
    """Softmax attention of absorbed queries over the latent rows; `out` is the mixed latent (spec 2.6).

    Causal, or over all rows of the request for every query (a draft's block, spec 5.1). With `context` it attends with
    the heads of all ranks over the rows of this one, and `out` holds for each head lora + PARTIAL values: the sum
    that no total has divided yet, the largest score and the total of the weights relative to it (spec 4.3).
    """

    name: str
    layer: int
    index: int
    heads: int
    lora: int
    rope: int
    scale: float
    x: str
    out: str
    causal: bool = True
    context: ContextShard | None = None


@dataclass(frozen=True)
class GatherQueries:
    """The absorbed queries of all ranks' heads side by side (spec 4.3); `width` values come from each rank."""

    name: str
    layer: int
    width: int
    x: str
    out: str


@dataclass(frozen=True)
class MergeContext:
    """`out[h]` of this rank's heads from every rank's part: sum w_d s_d / sum w_d t_d with w_d = exp(m_d - max m), in
    rank order, rounded once; 0 where no rank holds a row (spec 4.3)."""

    name: str
    layer: int
    ranks: int
    heads: int
    lora: int
    x: str
    out: str


@dataclass(frozen=True)
class ValueGate:
    """`out[h] = bf16(W_UV[h] u[h])`, then times sigmoid(gate) if there is an output gate (spec 2.6)."""

    name: str
    layer: int
    heads: int
    nope: int
    value: int
    lora: int
    kv_b: str
    x: str
    gate: str | None
    out: str


@dataclass(frozen=True)
class Select:
    """Exact top-k on sigmoid scores plus bias; weights from the unbiased scores (spec 2.8.1).

    Slots are in descending key order, the lower id first among equals; NaN keys rank below every number.
    """

    name: str
    layer: int
    experts: int
    top_k: int
    bias: str
    renormalize: bool
    scaling: float
    logits: str
    ids: str
    weights: str


@dataclass(frozen=True)
class ExpertsUp:
    """`out[row, slot] = act(bf16(x W1_e^T), bf16(x W3_e^T))`, rounded (spec 2.8.3). Names hold `{}` for the expert."""

    name: str
    layer: int
    experts: int
    top_k: int
    w1: Matrix
    w3: Matrix
    x: str
    ids: str
    out: str


@dataclass(frozen=True)
class ExpertsDown:
    """`out[row, slot] = bf16(h W2_e^T)` (spec 2.8.3)."""

    name: str
    layer: int
    experts: int
    top_k: int
    w2: Matrix
    x: str
    ids: str
    out: str


@dataclass(frozen=True)
class Combine:
    """Weighted sum over slots in slot order, rounded, then the latent RMSNorm if there is one (spec 2.8.4, 2.8.5)."""

    name: str
    layer: int
    top_k: int
    width: int
    norm: str | None
    eps: float
    x: str
    weights: str
    out: str
    exchange: Exchange = "none"


@dataclass(frozen=True)
class Argmax:
    """The largest logit of each row, the lower id among equals; -1 for a row that holds a NaN."""

    name: str
    layer: int
    vocab: int
    logits: str
    out: str


Stage = (
    Embed
    | MixNorm
    | Linear
    | Activate
    | KdaCore
    | LatentInsert
    | Absorb
    | Attend
    | GatherQueries
    | MergeContext
    | ValueGate
    | Select
    | ExpertsUp
    | ExpertsDown
    | Combine
    | Argmax
    | Rotate
    | MarkovBias
    | ChooseDraft
    | Confidence
)
