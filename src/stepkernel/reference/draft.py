"""The stages that only a DSpark draft has (spec 5.1, 5.3)."""

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.reference.numerics import Floats, sigmoid
from stepkernel.reference.step import DraftRows, Step


def rotation(positions: NDArray[np.int32], rope: int, theta: float) -> tuple[Floats, Floats]:
    """Cosine and sine float32 [rows, rope / 2] of the angles position * theta^(-2i / rope), products in float32."""
    powers = np.arange(0, rope, 2, dtype=np.float32) / np.float32(rope)
    frequencies = (1.0 / np.float32(theta) ** powers).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def rotate(stage: Rotate, step: Step) -> None:
    """x [rows, heads width]: the last `rope` values of each head as pairs (a, b) -> (a c - b s, a s + b c)."""
    cosine, sine = rotation(_rows(step).positions, stage.rope, stage.theta)
    x = step.read(stage.x).reshape(-1, stage.heads, stage.width).copy()
    a, b = x[:, :, -stage.rope :: 2].copy(), x[:, :, -stage.rope + 1 :: 2].copy()
    x[:, :, -stage.rope :: 2] = a * cosine[:, None] - b * sine[:, None]
    x[:, :, -stage.rope + 1 :: 2] = a * sine[:, None] + b * cosine[:, None]
    step.write(stage.x, x)


def markov_bias(stage: MarkovBias, step: Step) -> None:
    """logits [rows, vocab]: adds w_out w_in[previous] to the row of this position of every request."""
    low = step.weights.embedding(stage.w_in, _previous(stage, step, stage.position))
    bias = np.zeros((len(low), stage.vocab), np.float32)
    for rows, block in step.weights.named_blocks(stage.w_out, stage.vocab, stage.rank):
        bias[:, rows] = low @ block.T
    step.read(stage.bias)[: len(low)] = bias
    step.read(stage.logits)[stage.position :: stage.drafts_per_request] += bias


def choose_draft(stage: ChooseDraft, step: Step) -> None:
    """drafts int32 [rows, 1]: arg max, the lower id among equals, or the inverse of the cumulative softmax at the
    request's uniform number; -1 where the row holds a NaN."""
    rows = _rows(step)
    logits = step.read(stage.logits)[stage.position :: stage.drafts_per_request]
    chosen = step.indices(stage.drafts)[stage.position :: stage.drafts_per_request]
    for request, row in enumerate(logits):
        if np.isnan(row.max()):
            chosen[request] = -1
        elif rows.temperatures[request] == 0:
            chosen[request] = np.argmax(row)
        else:
            shares = np.exp((row - row.max()) / rows.temperatures[request])
            reached = np.cumsum(shares, dtype=np.float32)
            place = np.searchsorted(reached, rows.uniforms[request, stage.position] * reached[-1], side="right")
            chosen[request] = min(int(place), int(np.flatnonzero(shares)[-1]))


def confidence(stage: Confidence, step: Step) -> None:
    """hidden [rows, width] (final-normed), out [rows, 1]."""
    inputs = step.read(stage.hidden)
    if stage.w_in is not None:
        positions = range(stage.drafts_per_request)
        before = np.stack([_previous(stage, step, position) for position in positions], axis=1).ravel()
        inputs = np.concatenate([inputs, step.weights.embedding(stage.w_in, before)], axis=1)
    sums = inputs @ step.weights.vector(stage.weight) + step.weights.vector(stage.bias)
    step.write(stage.out, sigmoid(sums)[:, None])


def _previous(stage: MarkovBias | Confidence, step: Step, position: int) -> NDArray[np.int32]:
    """int32 [requests]: the token before a position of the block; a lost draft (-1) counts as token 0."""
    if position == 0:
        return step.inputs.token_ids[:: stage.drafts_per_request]
    return np.maximum(step.indices(stage.drafts)[position - 1 :: stage.drafts_per_request, 0], 0)


def _rows(step: Step) -> DraftRows:
    assert step.draft is not None  # a draft's program is only run by a drafter
    return step.draft
