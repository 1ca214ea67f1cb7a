"""Stages of the mixture of experts (spec 2.6)."""

from dataclasses import dataclass

from stepkernel.program.stages.values import Exchange, Matrix


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
