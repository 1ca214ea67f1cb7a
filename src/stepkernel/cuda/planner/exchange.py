"""Records of what ranks send each other: sums and parts of a stage's output, queries, and parts of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepkernel.cuda.dims import ExchangeDims, MergeDims
from stepkernel.cuda.planner.builder import Builder
from stepkernel.cuda.records import At, Word
from stepkernel.program.stages import PARTIAL, GatherQueries, MergeContext


@dataclass(frozen=True)
class Move:
    """One thing that an exchange moves. x: what this rank has, rows `x_stride` bytes apart; `width` bytes of a row for
    a rank. `floats`: what is summed is float32."""

    mode: Literal["reduce", "gather", "scatter"]
    x: At
    x_stride: int
    out: At
    out_stride: int
    width: int
    floats: bool = False


def partial_sums(b: Builder, width: int) -> At:
    """Where a stage puts float32 sums that other ranks' are added to."""
    return b.need("partial sums", b.program.rows * width * 4)


def exchange(b: Builder, stage: str, moves: Sequence[Move]) -> None:
    """One exchange after everything before it: all its moves, side by side in a slot."""
    slot = 0
    for move in moves:
        if move.width % 16:
            raise ValueError(f"{stage}: parts of {move.width} bytes for each rank, multiples of 16 are supported")
        dims = ExchangeDims(
            move.mode,
            b.program.shard.size,
            b.program.rows,
            move.floats,
            b.geometry.multicast and move.mode != "scatter",
        )
        words: dict[str, Word] = {
            "x": move.x,
            "x_stride": move.x_stride,
            "out": move.out,
            "out_stride": move.out_stride,
            "width": move.width,
            "slot": slot,
            "number": b.exchanges,
            "opens": int(slot == 0),
            "greets": int(slot == 0 and b.exchanges == 0),
        }
        b.record(stage, dims, words, wait=slot == 0)
        slot += b.program.rows * move.width
    b.need_slot(slot)
    b.exchanges += 1


def gather_queries(b: Builder, stage: GatherQueries) -> None:
    x, out = b.buffer(stage.x), b.buffer(stage.out)
    width = stage.width * b.sizes[stage.x]
    exchange(b, stage.name, [Move("gather", x, b.stride(stage.x), out, b.stride(stage.out), width)])


def merge_context(b: Builder, stage: MergeContext) -> None:
    """Parts go to the ranks of their heads and come to lie in their place; then they are merged."""
    parts, width = b.buffer(stage.x), stage.heads * (stage.lora + PARTIAL) * 4
    exchange(b, stage.name, [Move("scatter", parts, b.stride(stage.x), parts, b.stride(stage.x), width)])
    dims = MergeDims(stage.ranks, b.program.rows, stage.heads, stage.lora)
    b.record(stage.name, dims, {"x": parts, "out": b.buffer(stage.out)}, wait=True)
