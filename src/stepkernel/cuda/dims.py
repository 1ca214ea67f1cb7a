"""The compile-time constants of every stage kind, and the words of its records. Needs no compiler.

A stage is compiled once for each set of constants that a program has; what differs between stages of the same constants
(addresses, and the few numbers named in `words`) comes from the stage's record. Every record starts with the number of
its stage's code and whether it must wait for all earlier work; its words follow.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

THREADS = 256
WARPS = THREADS // 32
RECORD_BYTES = 256
HEADER_BYTES = 16
STATIC_SHARED = 48 << 10

Kind = Literal[
    "embed",
    "mix_norm",
    "linear",
    "activate",
    "kda",
    "latent",
    "absorb",
    "attend",
    "select",
    "experts",
    "combine",
    "argmax",
]


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise ValueError(message)


@dataclass(frozen=True)
class EmbedDims:
    kind: ClassVar[Kind] = "embed"
    words: ClassVar[tuple[str, ...]] = ("table", "out")
    width: int
    rows: int

    def check(self) -> None:
        _require(self.width % 8 == 0, f"embed: width {self.width} is no multiple of 8")

    def shared_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class MixNormDims:
    """`sources`: the most saved blocks that a stage mixes."""

    kind: ClassVar[Kind] = "mix_norm"
    words: ClassVar[tuple[str, ...]] = (
        "prefix",
        "delta",  # 0: nothing is added
        "second",  # 0: one delta
        "blocks",
        "save",  # address of the block, or 0
        "score",  # 0: a plain residual
        "norm",
        "out",
        "sources",
        "restart",  # 1: the delta becomes the prefix
        "round",  # 1: the mix is rounded first
        "tap",  # address, or 0
        "tap_stride",  # bytes
        "tap_mixed",  # 1: the mix instead of the prefix
    )
    width: int
    rows: int
    sources: int
    eps: float

    def check(self) -> None:
        _require(self.width % 8 == 0, f"mix_norm: width {self.width} is no multiple of 8")
        _require(self.width <= 8192, f"mix_norm: width {self.width}, up to 8192 are supported")

    def shared_bytes(self) -> int:
        return 4 * (WARPS + 2 * (self.sources + 1))


@dataclass(frozen=True)
class LinearDims:
    """`per_head` outputs have inputs and a block of the weight of their own (0: all share them); heads are
    `head_bytes` apart in the weight."""

    kind: ClassVar[Kind] = "linear"
    words: ClassVar[tuple[str, ...]] = ("weight", "x", "out", "gate", "outputs", "x_stride", "out_stride", "first")
    inputs: int
    rows: int
    split: int
    to_bf16: bool
    scale: float = 1.0
    per_head: int = 0
    head_bytes: int = 0
    gated: bool = False

    def check(self) -> None:
        _require(self.inputs % 32 == 0, f"linear: {self.inputs} inputs are no multiple of 32")
        _require(1 <= self.rows <= 8, f"linear: {self.rows} rows, 1 to 8 are supported")
        _require(self.split in (1, 2, 4, 8), f"linear: {self.split} warps per tile, 1, 2, 4 or 8 are supported")
        _require(self.inputs // 32 % self.split == 0, f"linear: {self.inputs} inputs for {self.split} warps of 32")
        _require(self.per_head % 16 == 0, f"linear: {self.per_head} outputs per head are no multiple of 16")

    def shared_bytes(self) -> int:
        return WARPS * 512


@dataclass(frozen=True)
class ActivateDims:
    """`beta` 0: SiLU; `linear_beta` 0: the up branch as it is."""

    kind: ClassVar[Kind] = "activate"
    words: ClassVar[tuple[str, ...]] = ("x", "out")
    width: int
    rows: int
    beta: float
    linear_beta: float

    def check(self) -> None:
        _require(self.width % 8 == 0, f"activate: width {self.width} is no multiple of 8")

    def shared_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class KdaDims:
    """`parts` CTAs share the value rows of a head. `bound`: lower bound of the decay's logarithm, 0: softplus form."""

    kind: ClassVar[Kind] = "kda"
    words: ClassVar[tuple[str, ...]] = (
        "qkv",
        "gamma",
        "gate",
        "beta",
        "out",
        "filter_q",  # f32 [channels, 4] each
        "filter_k",
        "filter_v",
        "a_log",  # f32
        "dt_bias",  # f32
        "norm",  # f32 [head_dim]
        "conv",
        "conv_slot",  # bytes of a slot
        "state",
        "state_slot",  # bytes of a slot
        "slots",  # int32 table of this layer
        "partial",  # f32 [rows, heads, head_dim]
        "counters",  # u32 [requests, heads], 0 between stages
    )
    heads: int
    requests: int
    queries: int
    parts: int
    bound: float
    eps: float
    head_dim: int = 128
    conv_width: int = 4

    def check(self) -> None:
        _require(self.head_dim == 128, f"kda: head_dim {self.head_dim}, 128 is supported")
        _require(self.conv_width == 4, f"kda: conv_width {self.conv_width}, 4 is supported")
        _require(1 <= self.queries <= 8, f"kda: {self.queries} queries, 1 to 8 are supported")
        _require(self.parts in (1, 2, 4, 8, 16), f"kda: {self.parts} parts, 1, 2, 4, 8 or 16 are supported")

    def shared_bytes(self) -> int:
        return 4 * self.queries * (3 * self.head_dim + self.head_dim // self.parts + 1) + 4 * self.queries * 128 + 32


@dataclass(frozen=True)
class LatentDims:
    """`rank` 0: there is no low-rank query."""

    kind: ClassVar[Kind] = "latent"
    words: ClassVar[tuple[str, ...]] = ("kv", "norm", "cache", "query", "query_norm", "query_out")
    lora: int
    rope: int
    rank: int
    rows: int
    eps: float

    def check(self) -> None:
        _require(self.lora % 8 == self.rope % 8 == self.rank % 8 == 0, "latent: widths are no multiples of 8")
        _require(max(self.lora, self.rank) <= 8192, "latent: widths up to 8192 are supported")

    def shared_bytes(self) -> int:
        return 4 * WARPS


@dataclass(frozen=True)
class AbsorbDims:
    kind: ClassVar[Kind] = "absorb"
    words: ClassVar[tuple[str, ...]] = ("weight", "x", "out")
    heads: int
    nope: int
    rope: int
    value: int
    lora: int
    rows: int
    split: int

    def check(self) -> None:
        _require(self.lora % 64 == 0, f"absorb: {self.lora} latent values are no multiple of 64")
        _require(self.nope % (16 * self.split) == 0, f"absorb: {self.nope} inputs for {self.split} warps of 16")
        _require(self.rope % 2 == 0, f"absorb: {self.rope} further values are odd")
        _require(1 <= self.rows <= 8, f"absorb: {self.rows} rows, 1 to 8 are supported")

    def shared_bytes(self) -> int:
        return WARPS * 2048


@dataclass(frozen=True)
class AttendDims:
    """A CTA computes 8 * `tiles` pairs of query and head over one of `splits` parts of the context."""

    kind: ClassVar[Kind] = "attend"
    words: ClassVar[tuple[str, ...]] = ("x", "cache", "out", "partial", "statistics", "counters")
    heads: int
    lora: int
    rope: int
    scale: float
    requests: int
    queries: int
    splits: int
    tiles: int
    page_tokens: int

    @property
    def pairs(self) -> int:
        return self.heads * self.queries

    @property
    def groups(self) -> int:
        return -(-self.pairs // (8 * self.tiles))

    def check(self) -> None:
        width = self.lora + self.rope
        _require(width % 32 == 0, f"attend: rows of {width} values are no multiple of 32")
        _require(
            self.lora % 64 == 0 and self.lora <= 512, f"attend: {self.lora} latent values: multiples of 64 up to 512"
        )
        _require(self.tiles in (1, 2), f"attend: {self.tiles} tiles, 1 or 2 are supported")

    def shared_bytes(self) -> int:
        pairs = 8 * self.tiles
        return 128 * 8 + 2 * pairs * 272 + 4 * pairs * WARPS


@dataclass(frozen=True)
class SelectDims:
    kind: ClassVar[Kind] = "select"
    words: ClassVar[tuple[str, ...]] = ("logits", "bias", "ids", "weights")
    experts: int
    top_k: int
    rows: int
    renormalize: bool
    scaling: float

    def check(self) -> None:
        _require(1 <= self.top_k <= min(32, self.experts), f"select: {self.top_k} of {self.experts}, up to 32 chosen")
        _require(self.experts <= 1024, f"select: {self.experts} experts, up to 1024 are supported")

    def shared_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class ExpertsDims:
    """`up`: two matrices and the activation; otherwise one matrix. The experts of a matrix lie one after the other.

    `chunk`: consecutive columns of a thread; `hardware`: E2M1 by conversion instructions (from sm_100 on).
    """

    kind: ClassVar[Kind] = "experts"
    words: ClassVar[tuple[str, ...]] = ("first", "first_scale", "second", "second_scale", "x", "ids", "out", "x_stride")
    up: bool
    packed: bool
    outputs: int
    inputs: int
    top_k: int
    rows: int
    split: int
    chunk: int
    beta: float = 0.0
    linear_beta: float = 0.0
    hardware: bool = False

    def check(self) -> None:
        _require(self.outputs % 16 == 0, f"experts: {self.outputs} outputs are no multiple of 16")
        _require(1 <= self.rows <= 8, f"experts: {self.rows} rows, 1 to 8 are supported")
        _require(self.top_k <= 32, f"experts: {self.top_k} chosen, up to 32 are supported")
        _require(self.chunk in ((8, 16, 32) if self.packed else (8,)), f"experts: chunks of {self.chunk} columns")
        _require(
            self.inputs % (4 * self.chunk) == 0 and self.inputs % 32 == 0,
            f"experts: {self.inputs} inputs in chunks of {self.chunk}",
        )
        _require(
            self.inputs // (4 * self.chunk) % self.split == 0,
            f"experts: {self.inputs} inputs in chunks of {self.chunk} for {self.split} warps",
        )

    def shared_bytes(self) -> int:
        matrices = 2 if self.up else 1
        scales = 16 * WARPS // self.split * self.inputs // 32 if self.packed else 0
        return WARPS * 512 * matrices + 32 + matrices * scales


@dataclass(frozen=True)
class CombineDims:
    kind: ClassVar[Kind] = "combine"
    words: ClassVar[tuple[str, ...]] = ("x", "weights", "norm", "out")
    width: int
    top_k: int
    rows: int
    normed: bool
    eps: float

    def check(self) -> None:
        _require(self.width % 8 == 0, f"combine: width {self.width} is no multiple of 8")
        _require(self.width <= 8192, f"combine: width {self.width}, up to 8192 are supported")

    def shared_bytes(self) -> int:
        return 4 * WARPS


@dataclass(frozen=True)
class ArgmaxDims:
    """`parts` CTAs share a row."""

    kind: ClassVar[Kind] = "argmax"
    words: ClassVar[tuple[str, ...]] = ("logits", "out", "partial", "counters")
    vocab: int
    rows: int
    parts: int

    def check(self) -> None:
        _require(self.vocab % (4 * self.parts) == 0, f"argmax: {self.vocab} logits in {self.parts} parts of fours")
        _require(1 <= self.parts <= 32, f"argmax: {self.parts} parts, 1 to 32 are supported")

    def shared_bytes(self) -> int:
        return 8 * WARPS + 16


Dims = (
    EmbedDims
    | MixNormDims
    | LinearDims
    | ActivateDims
    | KdaDims
    | LatentDims
    | AbsorbDims
    | AttendDims
    | SelectDims
    | ExpertsDims
    | CombineDims
    | ArgmaxDims
)
