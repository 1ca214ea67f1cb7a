"""A draft's weights in the layouts of the CPU kernels; what it shares with its target is not packed twice."""

from stepkernel.cpu.arena import Arena
from stepkernel.cpu.stages import draft
from stepkernel.cpu.weights import CpuWeights, float_buffers, pack_stage
from stepkernel.model.weights import Weights
from stepkernel.program.draft_builder import DraftPrograms
from stepkernel.program.draft_stages import Confidence, MarkovBias, Rotate

SHARED = ("embed", "head")  # stages that are the same in target and draft (spec 5.1)


def pack_draft(programs: DraftPrograms, weights: Weights, target: CpuWeights, positions: int) -> CpuWeights:
    """Packs both programs of a draft. `positions`: rows may stand at 0 .. positions - 1.

    target: the packed weights of the target, whose embedding and head the draft uses; keep them alive as long.
    """
    arena = Arena()
    found: dict[str, tuple[int, ...]] = {}
    rotation: tuple[int, ...] = ()
    markov: tuple[int, ...] = ()
    for program in (programs.context, programs.block):
        exact = float_buffers(program)
        for stage in program.stages:
            match stage:
                case Rotate():
                    rotation = rotation or draft.pack_rotation(stage, positions, arena)
                    found[stage.name] = rotation
                case MarkovBias():
                    markov = markov or draft.pack_markov(stage, weights, arena)
                    found[stage.name] = markov
                case Confidence():
                    found[stage.name] = draft.pack_confidence(stage, weights, arena, markov[0] if stage.w_in else 0)
                case _ if stage.name in SHARED:
                    found[stage.name] = target.stages[stage.name]
                case _:
                    found[stage.name] = pack_stage(stage, weights, arena, exact)
            weights.release()
    return CpuWeights(arena, found, target.activation_bits)
