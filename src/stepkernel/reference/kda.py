"""KDA between its projections: convolution, gates, recurrence, gated norm (spec 2.5.2 to 2.5.7)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.inputs import StepInputs
from stepkernel.program.stages import KdaCore
from stepkernel.reference.delta_rule import chunked, corrected_step, fold, token_step
from stepkernel.reference.numerics import Floats, rms_norm, sigmoid, silu, softplus, unit
from stepkernel.reference.step import Step

States = NDArray[Any]  # [slots, heads, d_v, d_k], float32 or BF16
TOKEN_BY_TOKEN = 8  # up to here chunks save nothing, and verification needs every intermediate state


@dataclass(frozen=True)
class Slots:
    """Where each request's state lies (spec 4.1, 5.5).

    window  convolution slot, int [requests]; first column, of the history
    source  slot of the state that the step starts from
    target  slot after each query, int [requests, at least queries]; or [requests, 1]: only the last state is kept
    live    requests that have a state
    """

    window: NDArray[np.int64]
    first: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    live: NDArray[np.intp]


def slots_of(inputs: StepInputs) -> Slots:
    target = inputs.state_slots.astype(np.int64)
    first = inputs.accepted.astype(np.int64) - 1
    if inputs.recovers:
        first = np.maximum(first, 0)
        live = np.flatnonzero(target[:, 0] > 0)
        return Slots(target[:, 0], first, target[:, 0], target, live)
    source = target[np.arange(inputs.requests), first]
    live = np.flatnonzero((target[:, 0] > 0) & (source > 0))
    return Slots(target[:, 0], first, source, target, live)


def kda_core(stage: KdaCore, step: Step) -> None:
    """qkv [rows, 3 heads d], gamma and gate [rows, heads d], beta [rows, heads] to out [rows, heads d].

    Everything is float32 from the convolution to the product with the output gate, which is rounded once, as
    the fused decode kernels do. Requests without a state slot give zeros and touch nothing.
    """
    inputs = step.inputs
    shape = (inputs.requests, inputs.queries, stage.heads, stage.head_dim)
    slots = slots_of(inputs)
    q, k, v = _convolve(stage, step, slots)
    q = unit(q) * np.float32(stage.head_dim**-0.5)
    k = unit(k)
    log_decay = _log_decay(stage, step).reshape(shape)
    beta = sigmoid(step.read(stage.beta)).reshape(shape[:3])
    state = step.caches.recurrent[stage.index]
    mixed = np.zeros(shape, np.float32)
    for r in slots.live:
        slot = slots.window[r]
        if inputs.recovers:
            records = step.caches.records[stage.index][slot]
            _fold_in(state, slot, records[: inputs.accepted[r]])
        if inputs.recovers and not inputs.settles:
            mixed[r] = _record(state, slot, records, q[r], k[r], v[r], np.exp(log_decay[r]), beta[r])
        else:
            mixed[r] = _recur(state, slots, r, q[r], k[r], v[r], log_decay[r], beta[r])
    gate = sigmoid(step.read(stage.gate)).reshape(shape)
    out = rms_norm(mixed, step.weights.vector(stage.out_norm), stage.eps) * gate
    # The gate of a request without state may be anything; its output is zero all the same.
    idle = np.setdiff1d(np.arange(inputs.requests), slots.live)
    out[idle] = 0
    step.write(stage.out, out.reshape(inputs.rows, -1))


def _convolve(stage: KdaCore, step: Step, slots: Slots) -> Floats:
    """Causal depth-wise convolution and SiLU (spec 2.5.2), then the new window (spec 5.5).

    Returns [3, requests, queries, heads, d]. The window keeps the rows from which the next step's history can
    begin: with one slot per query that is after each number of accepted rows, otherwise only after the last
    row.
    """
    inputs, width = step.inputs, stage.conv_width
    history = width - 1
    raw = step.read(stage.qkv).reshape(inputs.requests, inputs.queries, -1)
    taps = np.zeros((inputs.requests, history + inputs.queries, raw.shape[2]), np.float32)
    taps[:, history:] = raw
    window = step.caches.conv[stage.index]
    for r in slots.live:
        taps[r, :history] = window[slots.window[r], slots.first[r] : slots.first[r] + history]
    filters = step.weights.filters(stage.conv, width)
    mixed = filters[0] * taps[:, : inputs.queries]
    for tap in range(1, width):
        mixed += filters[tap] * taps[:, tap : tap + inputs.queries]
    every = slots.target.shape[1] > 1 or (inputs.recovers and not inputs.settles)
    kept = taps[:, 1:] if every else taps[:, -history:]
    window[slots.window[slots.live], : kept.shape[1]] = kept[slots.live].astype(window.dtype)
    parts = silu(mixed).reshape(inputs.requests, inputs.queries, 3, stage.heads, stage.head_dim)
    return np.moveaxis(parts, 2, 0)


def _log_decay(stage: KdaCore, step: Step) -> Floats:
    """ln of the decay per key channel, <= 0, [rows, heads, d]: bounded or softplus form (spec 2.5.4)."""
    logits = step.read(stage.gamma) + step.weights.vector(stage.dt_bias)
    z = logits.reshape(-1, stage.heads, stage.head_dim)
    rate = np.exp(step.weights.vector(stage.a_log).ravel()[: stage.heads])[:, None]
    if stage.gate_lower_bound is None:
        return -rate * softplus(z)
    return np.float32(stage.gate_lower_bound) * sigmoid(rate * z)


def _fold_in(state: States, slot: np.int64, records: Floats) -> None:
    """Does to one request's state what recorded rows did (spec 5.6). records [rows, heads, 3, d]: correction, key,
    decay."""
    current = state[slot].astype(np.float32)
    for correction, key, factor in records.transpose(0, 2, 1, 3):
        fold(current, correction, key, factor)
        current = _stored(current, state)
    state[slot] = current


def _record(
    state: States, slot: np.int64, records: Floats, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
) -> Floats:
    """Runs one request's queries on a copy of its state and records them (spec 5.6)."""
    current = state[slot].astype(np.float32)
    out = np.empty((len(q), *v.shape[1:]), np.float32)
    for t in range(len(q)):
        out[t], correction = corrected_step(current, q[t], k[t], v[t], decay[t], beta[t])
        records[t] = np.stack([correction, k[t], decay[t]], axis=1)
        current = _stored(current, state)
    return out


def _recur(
    state: States, slots: Slots, r: np.intp, q: Floats, k: Floats, v: Floats, log_decay: Floats, beta: Floats
) -> Floats:
    """Runs one request's queries from its source slot and fills its target slots (spec 2.5.6, 5.5)."""
    target = slots.target[r]
    queries = len(q)
    every = len(target) > 1
    current = state[slots.source[r] if every else target[0]].astype(np.float32)
    if not every and queries > TOKEN_BY_TOKEN:
        out = chunked(current, q, k, v, log_decay, beta)
    else:
        out = np.empty((queries, *v.shape[1:]), np.float32)
        for t in range(queries):
            out[t] = token_step(current, q[t], k[t], v[t], log_decay[t], beta[t])
            if every and target[t] > 0:
                state[target[t]] = current
                current = _stored(current, state)
    if not every:
        state[target[0]] = current
    return out


def _stored(current: Floats, state: States) -> Floats:
    """What the cache keeps of a state: the next token starts from that, whether it lies in the cache or not."""
    return current if state.dtype == np.float32 else current.astype(state.dtype).astype(np.float32)
