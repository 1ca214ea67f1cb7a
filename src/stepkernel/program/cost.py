"""Bytes and floating-point operations of one step on one shard, and the time they need at least (spec 7).

Every weight that a step touches is read once; what only lives in caches of the processor (activations, saved
blocks) is not counted. Of the routed experts a step reads the distinct ones its rows choose: counted if a
measurement is given, otherwise the number expected from independent, balanced routing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.program.program import Program
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GatherQueries,
    KdaCore,
    LatentInsert,
    Linear,
    Matrix,
    MergeContext,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)

DistinctExperts = Mapping[int, float]

_BF16 = 2
_F32 = 4


@dataclass(frozen=True)
class Load:
    """What runs in the step: requests x queries tokens; every request has `context` tokens in its cache.

    kv_bytes: bytes per value of the latent cache (2 for BF16, 1 for FP8).
    """

    requests: int
    queries: int = 1
    context: int = 0
    kv_bytes: int = 2

    def __post_init__(self) -> None:
        if self.requests < 1 or self.queries < 1 or self.context < 0 or self.kv_bytes < 1:
            raise ValueError(
                f"load of {self.requests} requests x {self.queries} queries, context {self.context}, "
                f"{self.kv_bytes} bytes per cached value: context must be at least 0, the others at least 1"
            )

    @property
    def rows(self) -> int:
        return self.requests * self.queries


@dataclass(frozen=True)
class Cost:
    """Bytes to move, by what they belong to, and operations. State and cache count reads and writes."""

    weight_bytes: float = 0.0
    state_bytes: float = 0.0
    cache_bytes: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.state_bytes + self.cache_bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.state_bytes + other.state_bytes,
            self.cache_bytes + other.cache_bytes,
            self.flops + other.flops,
        )


def expected_experts(experts: int, top_k: int, rows: int) -> float:
    """Distinct experts that `rows` independent tokens are expected to choose together (spec 7.1)."""
    return float(experts * (1.0 - (1.0 - top_k / experts) ** rows))


def cost(stage: Stage, load: Load, distinct: DistinctExperts | None = None) -> Cost:
    """Cost of one stage. `distinct` maps a layer to the distinct experts that were counted in it."""
    rows = load.rows
    match stage:
        case Embed():
            return Cost(weight_bytes=rows * stage.table.bytes / stage.table.rows)
        case MixNorm():
            scores = 2 * _BF16 if stage.score_norm else 0
            sources = stage.sources + 1
            return Cost((_BF16 + scores) * stage.width, flops=rows * stage.width * (4 * sources + 4))
        case Linear():
            return _matrices((p.matrix for p in stage.parts), rows)
        case KdaCore():
            return _kda(stage, load)
        case LatentInsert():
            values = stage.lora + stage.query_rank
            written = (
                rows * (stage.lora + stage.rope) * load.kv_bytes
            )  # at most: with a shared context, all on one rank
            return Cost(_BF16 * values, cache_bytes=written, flops=rows * values * 4)
        case Absorb():
            values = stage.heads * stage.nope * stage.lora
            return Cost(_BF16 * values, flops=2 * rows * values)
        case Attend():
            row = stage.lora + stage.rope
            # The rows of this step are still in the processor's caches; those of earlier steps are read once.
            # With a share of the rows, the average over the ranks.
            share = 1.0 if stage.context is None else 1.0 / stage.context.size
            read = load.requests * load.context * row * load.kv_bytes * share
            pairs = load.requests * (load.queries * load.context + load.queries * (load.queries + 1) // 2) * share
            return Cost(cache_bytes=read, flops=2 * pairs * stage.heads * (row + stage.lora))
        case GatherQueries():
            return Cost()
        case MergeContext():
            return Cost(flops=2 * rows * stage.heads * stage.lora)
        case ValueGate():
            values = stage.heads * stage.value * stage.lora
            return Cost(_BF16 * values, flops=2 * rows * values)
        case Select():
            return Cost(_F32 * stage.experts, flops=6 * rows * stage.experts)
        case ExpertsUp():
            return _experts((stage.w1, stage.w3), stage, rows, distinct)
        case ExpertsDown():
            return _experts((stage.w2,), stage, rows, distinct)
        case Combine():
            norm = _BF16 * stage.width if stage.norm else 0
            return Cost(norm, flops=2 * rows * stage.top_k * stage.width)
        case Activate():
            return Cost(flops=8 * rows * stage.width)
        case Argmax():
            return Cost(flops=rows * stage.vocab)
        case Rotate():
            return Cost(flops=3 * rows * stage.heads * stage.rope)
        case MarkovBias():
            # One position of every request; the rows of w_in are looked up like embeddings.
            looked_up = load.requests * stage.rank
            return Cost(
                _BF16 * (stage.vocab * stage.rank + looked_up), flops=2 * load.requests * stage.vocab * stage.rank
            )
        case ChooseDraft():
            return Cost(flops=load.requests * stage.vocab)
        case Confidence():
            inputs = stage.width + stage.rank
            return Cost(_F32 * inputs + rows * _BF16 * stage.rank, flops=2 * rows * inputs)


def step_cost(program: Program, load: Load, distinct: DistinctExperts | None = None) -> Cost:
    """Cost of the whole step; raises ValueError if the program is not prepared for this load."""
    if load.queries != program.queries or load.requests > program.requests:
        raise ValueError(
            f"load of {load.requests} requests x {load.queries} queries, program is prepared for up to "
            f"{program.requests} x {program.queries}"
        )
    return sum((cost(stage, load, distinct) for stage in program.stages), Cost())


def floor_ms(bytes_moved: float, gbps: float) -> float:
    """Milliseconds that moving the bytes takes at `gbps` (1e9 bytes per second)."""
    if not 0 < gbps < inf:
        raise ValueError(f"bandwidth {gbps} GB/s: must be above 0 and finite")
    return bytes_moved / gbps / 1e6


def _matrices(matrices: Iterable[Matrix], rows: int) -> Cost:
    return sum((Cost(m.bytes, flops=2.0 * rows * m.rows * m.columns) for m in matrices), Cost())


def _experts(
    matrices: tuple[Matrix, ...], stage: ExpertsUp | ExpertsDown, rows: int, distinct: DistinctExperts | None
) -> Cost:
    read = expected_experts(stage.experts, stage.top_k, rows) if distinct is None else distinct[stage.layer]
    values = sum(m.rows * m.columns for m in matrices)
    return Cost(read * sum(m.bytes for m in matrices), flops=2.0 * rows * stage.top_k * values)


def _kda(stage: KdaCore, load: Load) -> Cost:
    """The state is read once and written after every query (spec 5.5); each further query adds a column to
    the convolution window."""
    heads, dim = stage.heads, stage.head_dim
    channels = 3 * heads * dim
    history = stage.conv_width - 1
    recurrent = (1 + load.queries) * heads * dim * dim * _F32
    conv = (history + history - 1 + load.queries) * channels * _BF16
    vectors = _F32 * (channels * stage.conv_width + heads + heads * dim + dim)
    flops = load.rows * (7.0 * heads * dim * dim + 2.0 * channels * stage.conv_width)
    return Cost(vectors, state_bytes=load.requests * (recurrent + conv), flops=flops)
