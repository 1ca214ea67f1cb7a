"""The compile-time constants of every stage kind, and the words of its records. Needs no compiler.

A stage is compiled once for each set of constants that a program has; what differs between stages of the same constants
(addresses, and the few numbers named in `words`) comes from the stage's record. Every record starts with the number of
its stage's code, whether it must wait for all earlier work and which exchange it opens (`Record`); its words follow.
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
from stepkernel.cuda.dims.exchange import MergeDims, PostDims, Posting, TakeDims
from stepkernel.cuda.dims.experts import CombineDims, ExpertsDims, SelectDims
from stepkernel.cuda.dims.products import AbsorbDims, LinearDims
from stepkernel.cuda.dims.rows import ActivateDims, ArgmaxDims, EmbedDims, MixNormDims

Dims = (
    EmbedDims
    | MixNormDims
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
    | PostDims
    | TakeDims
    | ArgmaxDims
)


def posting_of(dims: Dims) -> Posting | None:
    """How a stage posts what it computes, if it does."""
    return getattr(dims, "posting", None)


def ranks_of(dims: Dims) -> int:
    """Ranks that a stage posts to; 1 if it does not post."""
    posting = posting_of(dims)
    return 1 if posting is None else posting.ranks


def sharing(dims: Dims) -> int:
    """CTAs that share a row, a head or a context, so that the one that comes last has more to do; 0 or 1 if none."""
    return int(getattr(dims, "parts", 0) or getattr(dims, "splits", 0))


def takes(dims: Dims) -> bool:
    """Whether a stage takes what ranks have posted."""
    match dims:
        case MixNormDims():
            return dims.parts > 0
        case SelectDims():
            return dims.ranks > 1
        case _:
            return isinstance(dims, TakeDims)


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
    "ExpertsDims",
    "KdaDims",
    "Kind",
    "LatentDims",
    "LinearDims",
    "MergeDims",
    "MixNormDims",
    "PostDims",
    "Posting",
    "SelectDims",
    "TakeDims",
    "column_tiles",
    "posting_of",
    "ranks_of",
    "sharing",
    "takes",
]
