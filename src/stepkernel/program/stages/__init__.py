"""The stages of one decode step. A stage names its weights, the buffers it reads and writes, and its state; it does no
work.

Buffers hold one row per token of the step. Their values are float32 in memory; a buffer of dtype "bf16" holds values
that were rounded to BF16 (spec 2.1), so that every executor has the same rounding points.
"""

from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.program.stages.attention import (
    PARTIAL,
    Absorb,
    Attend,
    GatherQueries,
    KdaCore,
    LatentInsert,
    MergeContext,
    ValueGate,
)
from stepkernel.program.stages.experts import Combine, ExpertsDown, ExpertsUp, Select
from stepkernel.program.stages.rows import Activate, Argmax, Embed, Linear, MixNorm, Projection, Tap
from stepkernel.program.stages.values import BITS_PER_WEIGHT, Buffer, Exchange, Format, Matrix, Update

__all__ = [
    "BITS_PER_WEIGHT",
    "PARTIAL",
    "Absorb",
    "Activate",
    "Argmax",
    "Attend",
    "Buffer",
    "ChooseDraft",
    "Combine",
    "Confidence",
    "Embed",
    "Exchange",
    "ExpertsDown",
    "ExpertsUp",
    "Format",
    "GatherQueries",
    "KdaCore",
    "LatentInsert",
    "Linear",
    "MarkovBias",
    "Matrix",
    "MergeContext",
    "MixNorm",
    "Projection",
    "Rotate",
    "Select",
    "Stage",
    "Tap",
    "Update",
    "ValueGate",
]

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
