"""Embedding, projections, dense activation and the greedy choice."""

import numpy as np

from stepkernel.program.stages import Activate, Argmax, Embed, Linear
from stepkernel.reference.numerics import activate
from stepkernel.reference.step import Step


def embed(stage: Embed, step: Step) -> None:
    """The embedding row of each token, BF16 as stored (spec 2.2.1). out [rows, hidden]."""
    step.write(stage.out, step.weights.embedding(stage.table.name, step.inputs.token_ids))


def linear(stage: Linear, step: Step) -> None:
    """scale x W^T for each part, float32 sums rounded once (spec 2.1, 2.2.3). x [rows, in], out [rows, out]."""
    for part in stage.parts:
        x = step.read(part.x)
        for rows, block in step.weights.blocks(part.matrix):
            sums = x @ block.T
            if stage.scale != 1.0:
                sums *= np.float32(stage.scale)
            step.write(part.out, sums, part.offset + rows.start)


def activate_dense(stage: Activate, step: Step) -> None:
    """act(gate, up) of the dense MLP or the shared experts (spec 2.7).

    x [rows, 2 width] is gate | up, out [rows, width].
    """
    both = step.read(stage.x)
    step.write(stage.out, activate(both[:, : stage.width], both[:, stage.width :], step.config))


def argmax(stage: Argmax, step: Step) -> None:
    """Largest logit, the lower id among equals, -1 for a row with a NaN.

    logits float32 [rows, vocab], out int32 [rows, 1].
    """
    logits = step.read(stage.logits)
    tokens = np.argmax(logits, axis=1)
    # np.argmax returns the first NaN if there is one, so the chosen value tells.
    lost = np.isnan(np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0])
    step.write(stage.out, np.where(lost, -1, tokens)[:, None])
