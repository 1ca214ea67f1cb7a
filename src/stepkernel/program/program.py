"""A program: the stages of one step of a model shard, and the buffers between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.program.context import ContextShard
from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Buffer,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GatherQueries,
    KdaCore,
    LatentInsert,
    Linear,
    MergeContext,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)

MAX_ROWS = 64
PREFIX = "prefix"
BLOCKS = "blocks"
TAPS = "taps"
CACHE = "latent cache"
CONV = "conv state"
RECURRENT = "recurrent state"


@dataclass(frozen=True)
class Program:
    """One decode step. `requests * queries` is the largest number of rows it takes (spec 6.2: at most 64).

    `context`: which latent rows this rank holds; None if all of them.
    """

    config: ModelConfig
    shard: Shard
    requests: int
    queries: int
    stages: tuple[Stage, ...]
    buffers: tuple[Buffer, ...]
    context: ContextShard | None = None

    @property
    def rows(self) -> int:
        return self.requests * self.queries

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


def reads(stage: Stage) -> frozenset[str]:
    """Names of everything a stage reads: buffers, and the state areas CACHE, CONV, RECURRENT with their index."""
    match stage:
        case Embed():
            return frozenset()
        case MixNorm():
            blocks = {f"{BLOCKS}{i}" for i in range(stage.sources)}
            prefix = set() if stage.update == "restart" else {PREFIX}
            return frozenset(blocks | prefix | set(stage.delta))
        case Linear():
            return frozenset(p.x for p in stage.parts)
        case KdaCore():
            state = {f"{CONV}{stage.index}", f"{RECURRENT}{stage.index}"}
            return frozenset({stage.qkv, stage.gamma, stage.gate, stage.beta} | state)
        case LatentInsert():
            return frozenset({stage.kv} | ({stage.query_low} if stage.query_low else set()))
        case Attend():
            return frozenset({stage.x, f"{CACHE}{stage.index}"})
        case ValueGate():
            return frozenset({stage.x} | ({stage.gate} if stage.gate else set()))
        case Select():
            return frozenset({stage.logits})
        case ExpertsUp() | ExpertsDown():
            return frozenset({stage.x, stage.ids})
        case Combine():
            return frozenset({stage.x, stage.weights})
        case Argmax():
            return frozenset({stage.logits})
        case Activate() | Absorb() | Rotate() | GatherQueries() | MergeContext():
            return frozenset({stage.x})
        case MarkovBias():
            return frozenset({stage.logits} | ({stage.drafts} if stage.position else set()))
        case ChooseDraft():
            return frozenset({stage.logits})
        case Confidence():
            return frozenset({stage.hidden, stage.drafts})


def writes(stage: Stage) -> frozenset[str]:
    """Names of everything a stage writes, in the vocabulary of `reads`."""
    match stage:
        case MixNorm():
            saved = {f"{BLOCKS}{stage.save}"} if stage.save is not None else set()
            tapped = {stage.tap.out} if stage.tap is not None else set()
            updated = {PREFIX} if stage.update != "none" else set()
            return frozenset({stage.out} | saved | tapped | updated)
        case Linear():
            return frozenset(p.out for p in stage.parts)
        case KdaCore():
            return frozenset({stage.out, f"{CONV}{stage.index}", f"{RECURRENT}{stage.index}"})
        case LatentInsert():
            return frozenset({f"{CACHE}{stage.index}"} | ({stage.query_out} if stage.query_out else set()))
        case Select():
            return frozenset({stage.ids, stage.weights})
        case Rotate():
            return frozenset({stage.x})
        case MarkovBias():
            return frozenset({stage.logits, stage.bias})
        case ChooseDraft():
            return frozenset({stage.drafts})
        case _:
            return frozenset({stage.out})


def barriers(stages: tuple[Stage, ...]) -> tuple[bool, ...]:
    """Whether all earlier work must have finished before each stage starts: true where it touches what was written, or
    writes what was read, since the last such point."""
    return waits([(reads(stage), writes(stage)) for stage in stages])


def waits(touched: Sequence[tuple[frozenset[str], frozenset[str]]]) -> tuple[bool, ...]:
    """The same for stages that read and write these."""
    needed: list[bool] = []
    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    for r, w in touched:
        wait = bool((r & written) | (w & (read | written)))
        if wait:
            read, written = frozenset(), frozenset()
        needed.append(wait)
        read, written = read | r, written | w
    return tuple(needed)
