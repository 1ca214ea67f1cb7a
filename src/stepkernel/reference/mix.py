"""Residual stream: the pending additions, Attention Residuals and the norm in front of a sublayer."""

from collections.abc import Sequence

import numpy as np

from stepkernel.program.program import BLOCKS, PREFIX
from stepkernel.program.stages import MixNorm
from stepkernel.reference.numerics import Floats, inverse_rms, rms_norm
from stepkernel.reference.step import Step


def mix_norm(stage: MixNorm, step: Step) -> None:
    """Updates the prefix, mixes it with the saved blocks, saves a block, normalises (spec 2.3, 2.4).

    prefix [rows, hidden] and blocks [copies, rows, hidden] are rounded before they serve as sources. The
    float32 mix goes straight into the norm, except for the final mix (`round_mix`).
    """
    if stage.update != "none":
        delta = step.read(stage.delta[0])
        for name in stage.delta[1:]:
            delta = step.round(delta + step.read(name))
        step.write(PREFIX, delta if stage.update == "restart" else step.read(PREFIX) + delta)
    prefix = step.read(PREFIX)
    mixed = mix_input(stage, step)
    if stage.tap is not None:
        step.write(stage.tap.out, mixed if stage.tap.mixed else prefix, stage.tap.offset)
    if stage.round_mix:
        mixed = step.round(mixed)
    if stage.save is not None:
        step.read(BLOCKS)[stage.save] = prefix
    step.write(stage.out, rms_norm(mixed, step.weights.vector(stage.norm), stage.eps))


def mix_input(stage: MixNorm, step: Step) -> Floats:
    """The float32 value that the stage normalises, [rows, hidden], from the current prefix and blocks."""
    if stage.score_norm is None or stage.score_proj is None:
        return step.read(PREFIX)
    sources = [*step.read(BLOCKS)[: stage.sources], step.read(PREFIX)]
    return attention_residual(sources, step.weights.score(stage.score_norm, stage.score_proj), stage.eps)


def attention_residual(sources: Sequence[Floats], score: Floats, eps: float) -> Floats:
    """Softmax over the scores of the sources, applied to the raw sources, all [rows, hidden] (spec 2.4)."""
    scores = np.stack([(source * score).sum(axis=-1) * inverse_rms(source, eps)[:, 0] for source in sources])
    shares: Floats = np.exp(scores - scores.max(axis=0))
    shares /= shares.sum(axis=0)
    mixed: Floats = shares[0][:, None] * sources[0]
    for share, source in zip(shares[1:], sources[1:], strict=True):
        mixed += share[:, None] * source
    return mixed
