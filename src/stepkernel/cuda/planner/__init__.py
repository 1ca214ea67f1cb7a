"""How each stage of a program becomes records: a file for each group of stages."""

from stepkernel.cuda.planner import attention, exchange, experts, products, rows
from stepkernel.cuda.planner.builder import Builder
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
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


def plan_stage(b: Builder, stage: Stage) -> None:
    """Adds the records of a stage. Raises ValueError for what the kernel cannot do."""
    match stage:
        case Embed():
            rows.embed(b, stage)
        case MixNorm():
            rows.mix_norm(b, stage)
        case Linear():
            products.linear(b, stage)
        case Activate():
            rows.activate(b, stage)
        case KdaCore():
            attention.kda(b, stage)
        case LatentInsert():
            attention.latent_insert(b, stage)
        case Absorb():
            products.absorb(b, stage)
        case GatherQueries():
            exchange.gather_queries(b, stage)
        case Attend():
            attention.attend(b, stage)
        case MergeContext():
            exchange.merge_context(b, stage)
        case ValueGate():
            products.value_gate(b, stage)
        case Select():
            experts.select(b, stage)
        case ExpertsUp():
            experts.experts_up(b, stage)
        case ExpertsDown():
            experts.experts_down(b, stage)
        case Combine():
            experts.combine(b, stage)
        case Argmax():
            rows.argmax(b, stage)
        case _:
            raise ValueError(f"{stage.name}: the GPU kernel has no stage {type(stage).__name__}")
