"""Stages with a state or a cache: the KDA core, and the steps of absorbed MLA attention (spec 2.4, 2.5)."""

from dataclasses import dataclass

from stepkernel.program.context import ContextShard

PARTIAL = 8  # values behind a head's partial sum: its largest score, its total, and six to fill a vector


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
