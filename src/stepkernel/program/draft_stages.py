"""The stages that only a DSpark draft has (spec 5.1, 5.3).

Rows of a block program are request * drafts + position; `position` counts the rows of a request's block.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rotate:
    """Rotates adjacent pairs of the last `rope` values of each of `heads` groups of `width`, in place.

    The angle of pair i at position p is p * theta^(-2i / rope); float32, rounded once (spec 5.1).
    """

    name: str
    layer: int
    heads: int
    width: int
    rope: int
    theta: float
    x: str


@dataclass(frozen=True)
class MarkovBias:
    """`logits[position] += w_out @ w_in[previous]`: previous is the anchor, or the draft chosen one position before.

    w_in, w_out: names of BF16 matrices [vocab, rank]. The products are float32 and stay so; `bias` holds them.
    """

    name: str
    layer: int
    position: int
    drafts_per_request: int
    vocab: int
    rank: int
    w_in: str
    w_out: str
    logits: str
    drafts: str
    bias: str


@dataclass(frozen=True)
class ChooseDraft:
    """The draft token of one position: arg max at temperature 0, else the request's uniform number through the
    cumulative softmax of logits / temperature. -1 where the row holds a NaN."""

    name: str
    layer: int
    position: int
    drafts_per_request: int
    vocab: int
    logits: str
    drafts: str


@dataclass(frozen=True)
class Confidence:
    """`sigmoid(weight . [hidden | w_in[previous]] + bias)` per row in float32; without Markov inputs `w_in` is None."""

    name: str
    layer: int
    drafts_per_request: int
    width: int
    rank: int
    weight: str
    bias: str
    w_in: str | None
    hidden: str
    drafts: str
    out: str
