"""Stages that work on rows alone: embedding, mixes and norms, products, activation, the choice of a token."""

from dataclasses import dataclass

from stepkernel.program.stages.values import Exchange, Matrix, Update


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
class Argmax:
    """The largest logit of each row, the lower id among equals; -1 for a row that holds a NaN."""

    name: str
    layer: int
    vocab: int
    logits: str
    out: str
