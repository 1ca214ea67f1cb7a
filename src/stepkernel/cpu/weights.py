"""The weights of a model shard in the layouts of the CPU kernels, packed once and shared by every executor."""

from collections.abc import Callable
from dataclasses import dataclass

from stepkernel.cpu.arena import Arena
from stepkernel.cpu.stages import embed, experts, heads, kda, latent, linear, mix, router
from stepkernel.model.weights import Weights
from stepkernel.program.program import Program
from stepkernel.program.stages import (
    Absorb,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    KdaCore,
    LatentInsert,
    Linear,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CpuWeights:
    """Addresses of the packed weights by stage name; `arena` owns the memory. `activation_bits` is 15 or 8."""

    arena: Arena
    stages: dict[str, tuple[int, ...]]
    activation_bits: int

    @property
    def bytes(self) -> int:
        return self.arena.bytes


def float_buffers(program: Program) -> frozenset[str]:
    """Buffers that are not rounded to BF16."""
    return frozenset(b.name for b in program.buffers if b.dtype != "bf16")


def pack_weights(
    program: Program, weights: Weights, activation_bits: int = 15, progress: Progress | None = None
) -> CpuWeights:
    """Packs every weight of a program, which is one rank's part. `progress(done, total)` is called after each stage.

    Raises ValueError for an unsupported `activation_bits` and for weights of another rank, PackError for shapes the
    kernels cannot take.
    """
    if activation_bits not in (8, 15):
        raise ValueError(f"activation bits {activation_bits}: supported are 15 and 8")
    if weights.shard != program.shard:
        raise ValueError(f"weights of {weights.shard}, program of {program.shard}: expected the same part of the model")
    arena = Arena()
    exact = float_buffers(program)
    found = {}
    for done, stage in enumerate(program.stages, 1):
        found[stage.name] = pack_stage(stage, weights, arena, exact)
        weights.release()
        if progress is not None:
            progress(done, len(program.stages))
    return CpuWeights(arena, found, activation_bits)


def pack_stage(stage: Stage, weights: Weights, arena: Arena, exact: frozenset[str]) -> tuple[int, ...]:
    """Packs what one stage reads; the addresses its record takes. Stages of a draft alone are in draft_weights.py."""
    match stage:
        case Embed():
            return embed.pack(stage, weights, arena)
        case MixNorm():
            return mix.pack(stage, weights, arena)
        case Linear():
            return linear.pack(stage, weights, arena, exact)
        case KdaCore():
            return kda.pack(stage, weights, arena)
        case LatentInsert():
            return latent.pack(stage, weights, arena)
        case Absorb() | ValueGate():
            return heads.pack(stage, weights, arena)
        case Select():
            return router.pack_select(stage, weights, arena)
        case ExpertsUp():
            return experts.pack_up(stage, weights, arena)
        case ExpertsDown():
            return experts.pack_down(stage, weights, arena)
        case Combine():
            return router.pack_combine(stage, weights, arena)
        case _:
            return ()
