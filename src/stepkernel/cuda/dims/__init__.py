"""The compile-time constants of every stage kind, and the words of its records. Needs no compiler.

A stage is compiled once for each set of constants that a program has; what differs between stages of the same constants
(addresses, and the few numbers named in `words`) comes from the stage's record. Every record starts with the number of
its stage's code and whether it must wait for all earlier work; its words follow.
"""

from stepkernel.cuda.dims.attention import AttendDims, KdaDims, LatentDims
from stepkernel.cuda.dims.common import (
    COLUMNS,
    HEADER_BYTES,
    RECORD_BYTES,
    STATIC_SHARED,
    THREADS,
    WARPS,
    Kind,
    column_tiles,
)
from stepkernel.cuda.dims.exchange import ExchangeDims, MergeDims
from stepkernel.cuda.dims.experts import CombineDims, ExpertsDims, SelectDims
from stepkernel.cuda.dims.products import AbsorbDims, LinearDims
from stepkernel.cuda.dims.rows import ActivateDims, ArgmaxDims, EmbedDims, MixNormDims, NormDims

Dims = (
    EmbedDims
    | MixNormDims
    | NormDims
    | LinearDims
    | ActivateDims
    | KdaDims
    | LatentDims
    | AbsorbDims
    | AttendDims
    | MergeDims
    | SelectDims
    | ExpertsDims
    | CombineDims
    | ExchangeDims
    | ArgmaxDims
)

__all__ = [
    "COLUMNS",
    "HEADER_BYTES",
    "RECORD_BYTES",
    "STATIC_SHARED",
    "THREADS",
    "WARPS",
    "AbsorbDims",
    "ActivateDims",
    "ArgmaxDims",
    "AttendDims",
    "CombineDims",
    "Dims",
    "EmbedDims",
    "ExchangeDims",
    "ExpertsDims",
    "KdaDims",
    "Kind",
    "LatentDims",
    "LinearDims",
    "MergeDims",
    "MixNormDims",
    "NormDims",
    "SelectDims",
    "column_tiles",
]
