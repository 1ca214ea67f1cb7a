"""What ranks send each other: sums and parts of a stage's output, queries, and parts of attention."""

from dataclasses import replace
from typing import Literal

from stepkernel.cuda.dims import MergeDims, PostDims, Posting, TakeDims
from stepkernel.cuda.planner.builder import Builder, Posted
from stepkernel.cuda.records import At, Word
from stepkernel.program.stages import PARTIAL, GatherQueries, MergeContext, MixNorm, Select, Stage

# The words of a stage that posts nothing.
NOTHING: dict[str, Word] = {"slot": 0, "number": 0}


def posting(b: Builder) -> Posting:
    """How stages post what all ranks get."""
    return Posting(b.program.shard.size, b.geometry.multicast)


def left_for(b: Builder, stage: Stage, out: str) -> bool:
    """Whether what is posted of a buffer is taken by the next stage itself."""
    following = b.program.stages[b.program.stages.index(stage) + 1 :][:1]
    match following:
        case (Select(logits=name),):
            return name == out
        case (MixNorm(delta=names),):
            return out in names
        case _:
            return False


class Exchange:
    """One exchange of a stage. First its records that post, each with words that `post` gives; then those of `take`,
    but for what a later stage takes itself."""

    def __init__(self, b: Builder, stage: Stage) -> None:
        self._b, self._stage, self._number = b, stage, b.exchanges
        self._ranks, self._slot = b.program.shard.size, 0
        self._takes: list[tuple[TakeDims, dict[str, Word]]] = []

    def post(
        self,
        mode: Literal["reduce", "gather"],
        out: At,
        out_stride: int,
        width: int,
        floats: bool = False,
        norm: tuple[At, float] | None = None,
    ) -> dict[str, Word]:
        """The words of the record that posts `width` bytes of each row, and what becomes of them; parts lie side by
        side in a slot. norm: of the sums, and its epsilon. Raises ValueError for a width that no thread can take."""
        if width % 16:
            raise ValueError(f"{self._stage.name}: parts of {width} bytes for each rank, multiples of 16 are supported")
        slot, self._slot = self._slot, self._slot + self._b.program.rows * width
        words: dict[str, Word] = {"slot": slot, "number": self._number}
        # Other stages take float32 sums and parts as they are.
        plain = norm is None and (floats or mode == "gather")
        if plain and left_for(self._b, self._stage, out.name):
            self._b.left[out.name] = Posted(mode, slot, width, self._number)
        else:
            self._taken(words, TakeDims(mode, self._ranks, self._b.program.rows, floats), out, out_stride, width, norm)
        return words

    def _taken(
        self,
        words: dict[str, Word],
        dims: TakeDims,
        out: At,
        out_stride: int,
        width: int,
        norm: tuple[At, float] | None,
    ) -> None:
        greets = int(words["slot"] == 0 and self._number == 0)
        words = {**words, "out": out, "out_stride": out_stride, "width": width, "greets": greets}
        words |= {"norm": 0, "counters": 0}
        if norm is not None:
            columns = width // (4 if dims.floats else 2)
            dims = replace(dims, parts=self._b.shared_by(width // 16), norm_width=columns, eps=norm[1])
            words |= {"norm": norm[0], "counters": self._b.need("counters rows", 4 * dims.rows)}
        self._takes.append((dims, words))

    def take(self) -> None:
        """Adds the records that take. They wait for nothing but what is posted."""
        for dims, words in self._takes:
            self._b.record(self._stage.name, dims, words)
        if self._slot:
            self._b.need_slot(self._slot)
            self._b.exchanges += 1


def gather_queries(b: Builder, stage: GatherQueries) -> None:
    width, exchange = stage.width * b.sizes[stage.x], Exchange(b, stage)
    posted = exchange.post("gather", b.buffer(stage.out), b.stride(stage.out), width)
    words: dict[str, Word] = {"x": b.buffer(stage.x), "x_stride": b.stride(stage.x), "width": width, **posted}
    b.record(stage.name, PostDims(b.program.rows, posting(b)), words)
    exchange.take()


def merge_context(b: Builder, stage: MergeContext) -> None:
    """Parts go to the ranks of their heads and come to lie in their place; then they are merged."""
    parts, width, exchange = b.buffer(stage.x), stage.heads * (stage.lora + PARTIAL) * 4, Exchange(b, stage)
    words: dict[str, Word] = {"x": parts, "x_stride": b.stride(stage.x), "width": width}
    posted = exchange.post("gather", parts, b.stride(stage.x), width)
    b.record(stage.name, PostDims(b.program.rows, Posting(stage.ranks), scatter=True), {**words, **posted})
    exchange.take()
    dims = MergeDims(stage.ranks, b.program.rows, stage.heads, stage.lora)
    b.record(stage.name, dims, {"x": parts, "out": b.buffer(stage.out)}, wait=True)
