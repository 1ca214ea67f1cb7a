"""Routed experts: selection, the two halves of an expert, the weighted sum (spec 2.8)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.stages import Combine, ExpertsDown, ExpertsUp, Select
from stepkernel.reference.numerics import Floats, activate, rms_norm, sigmoid
from stepkernel.reference.step import Step


def select(stage: Select, step: Step) -> None:
    """Exact top-k of sigmoid + bias, weights from the unbiased sigmoid, all float32 (spec 2.8.1).

    logits [rows, experts], ids int32 and weights [rows, top_k] in descending key order.
    """
    weigh(stage, step, choose(stage, step.read(stage.logits), step.weights.vector(stage.bias)))


def choose(stage: Select, logits: Floats, bias: Floats) -> NDArray[np.intp]:
    """Ids [rows, top_k]."""
    # A stable sort keeps the lower id first among equals, and NumPy sorts NaN behind every number.
    return np.argsort(-(sigmoid(logits) + bias), axis=1, kind="stable")[:, : stage.top_k]


def weigh(stage: Select, step: Step, ids: NDArray[np.integer[Any]]) -> None:
    """Writes a choice, and weights for it."""
    scores = sigmoid(step.read(stage.logits))
    weights = np.take_along_axis(scores, ids, axis=1)
    if stage.renormalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
    step.write(stage.ids, ids)
    step.write(stage.weights, weights * np.float32(stage.scaling))


def experts_up(stage: ExpertsUp, step: Step) -> None:
    """act(x W1^T, x W3^T) of the chosen experts, both products rounded (spec 2.1, 2.7, 2.8.3).

    x [rows, in], out [rows, top_k width].
    """
    x = step.read(stage.x)
    out = np.empty((len(x), stage.top_k, stage.w1.rows), np.float32)
    for expert, rows, slots in _chosen(step.indices(stage.ids)):
        gate = _product(step, x[rows], step.weights.expert(stage.w1, expert))
        up = _product(step, x[rows], step.weights.expert(stage.w3, expert))
        out[rows, slots] = activate(step.round(gate), step.round(up), step.config)
    step.write(stage.out, out)


def experts_down(stage: ExpertsDown, step: Step) -> None:
    """h W2^T, rounded once (spec 2.8.3). x [rows, top_k width], out [rows, top_k out]."""
    ids = step.indices(stage.ids)
    x = step.read(stage.x).reshape(len(ids), stage.top_k, -1)
    out = np.empty((len(ids), stage.top_k, stage.w2.rows), np.float32)
    for expert, rows, slots in _chosen(ids):
        out[rows, slots] = _product(step, x[rows, slots], step.weights.expert(stage.w2, expert))
    step.write(stage.out, out)


def combine(stage: Combine, step: Step) -> None:
    """Weighted sum in slot order, rounded, then the latent norm if any (spec 2.8.4, 2.8.5).

    x [rows, top_k width], weights float32 [rows, top_k], out [rows, width].
    """
    weights = step.read(stage.weights)
    x = step.read(stage.x).reshape(len(weights), stage.top_k, stage.width)
    total = weights[:, 0, None] * x[:, 0]
    for slot in range(1, stage.top_k):
        total += weights[:, slot, None] * x[:, slot]
    if stage.norm is not None:
        # The norm's statistics come from the rounded sum (spec 2.8, numerics).
        total = rms_norm(step.round(total), step.weights.vector(stage.norm), stage.eps)
    step.write(stage.out, total)


def _chosen(ids: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
    """Each expert in use with the rows and slots that chose it."""
    order = np.argsort(ids, axis=None, kind="stable")
    experts, starts = np.unique(ids.ravel()[order], return_index=True)
    for expert, places in zip(experts.tolist(), np.split(order, starts[1:]), strict=True):
        rows, slots = np.divmod(places, ids.shape[1])
        yield expert, rows, slots


def _product(step: Step, x: Floats, matrix: Floats) -> Floats:
    """x [n, in] times matrix [out, in]^T.

    Each row is a product of its own: how many others chose the same expert, which depends on their
    contents, must not change its bits. Only the rows of one prompt, which share their fate, go as one
    product.
    """
    if step.is_prompt:
        return x @ matrix.T
    return np.asarray(np.matmul(matrix, x[:, :, None])[:, :, 0])
