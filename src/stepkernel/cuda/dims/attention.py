"""Constants of the two kinds of attention, between their projections."""

from dataclasses import dataclass
from typing import ClassVar

from stepkernel.cuda.dims.common import WARPS, Kind, require


@dataclass(frozen=True)
class KdaDims:
    """`parts` CTAs share the value rows of a head. `bound`: lower bound of the decay's logarithm, 0: softplus form.

    `recovers`: a request has one state, into which the accepted tokens of the last step's records are folded; this
    step's tokens are recorded (spec 5.6).
    """

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
        "records",  # f32 [slots, rows, heads, 3, head_dim]; 0: states are not recovered
        "records_slot",  # bytes of a slot
    )
    heads: int
    requests: int
    queries: int
    parts: int
    bound: float
    eps: float
    head_dim: int = 128
    conv_width: int = 4
    bf16_states: bool = False
    recovers: bool = False

    @property
    def state_bytes(self) -> int:
        """Of a value of a state."""
        return 2 if self.bf16_states else 4

    def check(self) -> None:
        require(self.head_dim == 128, f"kda: head_dim {self.head_dim}, 128 is supported")
        require(self.conv_width == 4, f"kda: conv_width {self.conv_width}, 4 is supported")
        require(1 <= self.queries <= 8, f"kda: {self.queries} queries, 1 to 8 are supported")
        require(self.parts in (1, 2, 4, 8, 16), f"kda: {self.parts} parts, 1, 2, 4, 8 or 16 are supported")
        require(self.parts > 1 or not self.recovers, "kda: 1 part, states are recovered by 2 or more")

    def shared_bytes(self) -> int:
        return 4 * self.queries * (3 * self.head_dim + self.head_dim // self.parts + 1) + 4 * self.queries * 128 + 32


@dataclass(frozen=True)
class LatentDims:
    """`rank` 0: there is no low-rank query. `fp8`: the cache holds E4M3."""

    kind: ClassVar[Kind] = "latent"
    words: ClassVar[tuple[str, ...]] = ("kv", "norm", "cache", "query", "query_norm", "query_out")
    lora: int
    rope: int
    rank: int
    rows: int
    eps: float
    fp8: bool = False

    def check(self) -> None:
        require(self.lora % 8 == self.rope % 8 == self.rank % 8 == 0, "latent: widths are no multiples of 8")
        require(max(self.lora, self.rank) <= 8192, "latent: widths up to 8192 are supported")

    def shared_bytes(self) -> int:
        return 4 * WARPS


@dataclass(frozen=True)
class AttendDims:
    """A CTA computes 8 * `tiles` pairs of query and head over one of `splits` parts of the context.

    With several `ranks` that share out the tokens, `interleave` at a time, `out` holds what `MergeDims` says. `fp8`:
    the cache holds E4M3, and queries are rounded to it.
    """

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
    ranks: int = 1
    interleave: int = 1
    fp8: bool = False

    @property
    def pairs(self) -> int:
        return self.heads * self.queries

    @property
    def groups(self) -> int:
        return -(-self.pairs // (8 * self.tiles))

    def check(self) -> None:
        width = self.lora + self.rope
        require(width % 32 == 0, f"attend: rows of {width} values are no multiple of 32")
        require(
            self.lora % 64 == 0 and self.lora <= 512, f"attend: {self.lora} latent values: multiples of 64 up to 512"
        )
        require(self.tiles in (1, 2), f"attend: {self.tiles} tiles, 1 or 2 are supported")

    def shared_bytes(self) -> int:
        pairs = 8 * self.tiles
        queries = pairs * self.query_stride if self.fp8 else 0
        return 128 * 8 + 2 * pairs * 272 + 4 * pairs * WARPS + queries

    @property
    def query_stride(self) -> int:
        """Bytes of a query in shared memory, as F16: an odd number of 64 bytes, against bank conflicts."""
        return 64 * ((self.lora + self.rope) // 32 | 1)
