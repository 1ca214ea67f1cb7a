"""The records that a kernel walks, before their addresses are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Place = Literal[
    "buffer",
    "matrix",  # bf16
    "norm",  # a vector as bf16
    "vector",  # a vector as f32
    "score",  # the f32 product of two vectors
    "experts",  # all experts' matrices of a name, bf16 or packed
    "scales",  # their scales
    "latent",
    "conv",
    "state",
    "records",
    "slots",
    "scratch",
]
SIZES = {"bf16": 2, "f32": 4, "i32": 4}


@dataclass(frozen=True)
class At:
    """`offset` bytes behind the start of something."""

    place: Place
    name: str
    offset: int = 0


Word = int | At


@dataclass(frozen=True)
class Ahead:
    """Where the weights of a record lie, in the order of its pieces: `lines` of `width` bytes, `piece` of them for each
    piece, of which the CTA `first` takes the first one. `run` lines lie `stride` bytes apart; of such runs `across` lie
    side by side, and then the next ones `block` bytes further. What is fetched ahead: `bytes` of each of the
    first `limit` lines."""

    weight: At
    lines: int
    piece: int
    run: int
    stride: int
    width: int
    across: int = 1
    block: int = 0
    first: int = 0
    limit: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Record:
    """One walk of a code over its pieces. `wait`: everything before must be finished. `ahead`: of its own weights, if
    they are known before it begins; `fetch`: how many records further those begin that are fetched here, and how many
    they are. `opens`: 1 + the number of the exchange that it is the first one to post, or 0."""

    stage: str
    code: int
    wait: bool
    words: Mapping[str, Word]
    ahead: Ahead | None = None
    fetch: tuple[int, int] = (0, 0)
    opens: int = 0


@dataclass(frozen=True)
class Geometry:
    """What the kernel is made for: CTAs, and the caches: rows of a page and of a convolution window, FP8 latent rows,
    recurrent states in BF16, states that are recovered from records (spec 5.6). With `multicast`, exchanges between
    ranks by NVLink multicast where all get the same."""

    grid: int
    page_tokens: int
    window: int
    multicast: bool = False
    fp8_latents: bool = False
    bf16_states: bool = False
    recovers: bool = False
