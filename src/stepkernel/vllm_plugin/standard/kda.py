"""KDA between its projections: convolution, gates, recurrence, gated norm (spec 2.5.2 to 2.5.7)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.program.stages import KdaCore
from stepkernel.vllm_plugin.batch import StateBatch
from stepkernel.vllm_plugin.standard.delta_rule import scan, token_step
from stepkernel.vllm_plugin.standard.numerics import rms_norm, unit


@dataclass(frozen=True)
class KdaWeights:
    """filters [width, 3P], rate = exp(A_log) [heads], bias [P], norm [d], all float32."""

    filters: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class KdaState:
    """One layer's part of vLLM's cache: conv [slots, window, 3P], recurrent float32 [slots, heads, d_v, d_k]."""

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True)
class _Rows:
    """Inputs of the recurrence for rows of the step, float32: raw q|k|v [rows, 3P], the rest [rows, heads, (d)]."""

    raw: Tensor
    log_decay: Tensor
    beta: Tensor

    def take(self, index: slice | Tensor) -> "_Rows":
        return _Rows(self.raw[index], self.log_decay[index], self.beta[index])


def kda_core(
    stage: KdaCore,
    weights: KdaWeights,
    state: KdaState,
    batch: StateBatch,
    qkv: Tensor,
    gamma: Tensor,
    gate: Tensor,
    beta: Tensor,
) -> Tensor:
    """float32 [rows, heads d] before its rounding; rows beyond the batch (padding) are zero and touch no state."""
    rows = batch.starts[-1]
    inputs = _Rows(qkv[:rows].float(), _log_decay(stage, weights, gamma[:rows].float()), beta[:rows].float().sigmoid())
    mixed = qkv.new_zeros(qkv.shape[0], stage.heads, stage.head_dim, dtype=torch.float32)
    single = [r for r in range(batch.requests) if batch.starts[r + 1] - batch.starts[r] == 1 and not batch.verifies[r]]
    if single:
        _decode(stage, weights, state, batch, single, inputs, mixed)
    for r in range(batch.requests):
        first, last = batch.starts[r], batch.starts[r + 1]
        if batch.verifies[r]:
            mixed[first:last] = _verify(stage, weights, state, batch, r, inputs.take(slice(first, last)))
        elif last - first > 1:
            mixed[first:last] = _prefill(stage, weights, state, batch, r, inputs.take(slice(first, last)))
    out = rms_norm(mixed, weights.norm, stage.eps) * gate.float().view_as(mixed).sigmoid()
    return out.flatten(1)


def _log_decay(stage: KdaCore, weights: KdaWeights, gamma: Tensor) -> Tensor:
    """ln of the decay per key channel, <= 0: bounded or softplus form (spec 2.5.4)."""
    z = (gamma + weights.bias).view(-1, stage.heads, stage.head_dim)
    rate = weights.rate[:, None]
    if stage.gate_lower_bound is None:
        return -rate * F.softplus(z)  # threshold 20, as in the spec
    return stage.gate_lower_bound * torch.sigmoid(rate * z)


def _decode(
    stage: KdaCore,
    weights: KdaWeights,
    state: KdaState,
    batch: StateBatch,
    single: list[int],
    inputs: _Rows,
    mixed: Tensor,
) -> None:
    """One token of each of many requests, together."""
    rows = torch.tensor([batch.starts[r] for r in single])
    slots = batch.slots[single, 0].long()
    taken = inputs.take(rows)
    history = stage.conv_width - 1
    window = torch.cat([state.conv[slots, :history].float(), taken.raw.unsqueeze(1)], 1)
    recurrent = state.recurrent[slots]
    fresh = torch.tensor([batch.fresh[r] for r in single])
    if fresh.any():
        window[fresh, :history] = 0
        recurrent[fresh] = 0
    q, k, v = _heads(stage, (window * weights.filters).sum(1))
    mixed[rows] = token_step(recurrent, q, k, v, taken.log_decay, taken.beta)
    state.conv[slots, :history] = window[:, 1:].to(state.conv.dtype)
    state.recurrent[slots] = recurrent


def _prefill(
    stage: KdaCore, weights: KdaWeights, state: KdaState, batch: StateBatch, request: int, inputs: _Rows
) -> Tensor:
    """Consecutive tokens of one request; only the state after the last is kept."""
    slot, history = int(batch.slots[request, 0]), stage.conv_width - 1
    if batch.fresh[request]:
        before = inputs.raw.new_zeros(history, inputs.raw.shape[1])
        recurrent = torch.zeros_like(state.recurrent[slot])
    else:
        before, recurrent = state.conv[slot, :history].float(), state.recurrent[slot]
    taps = torch.cat([before, inputs.raw])
    q, k, v = _heads(stage, _filtered(taps, weights.filters, len(inputs.raw)))
    out = scan(recurrent, q, k, v, inputs.log_decay, inputs.beta)
    state.conv[slot, :history] = taps[-history:].to(state.conv.dtype)
    if batch.fresh[request]:
        state.recurrent[slot] = recurrent
    return out


def _verify(
    stage: KdaCore, weights: KdaWeights, state: KdaState, batch: StateBatch, request: int, inputs: _Rows
) -> Tensor:
    """Drafted tokens of one request: the state after each goes to a slot of its own (spec 5.5)."""
    slots, history = batch.slots[request].tolist(), stage.conv_width - 1
    accepted, queries = batch.accepted[request], len(inputs.raw)
    window = state.conv[slots[0]]
    if batch.fresh[request]:
        # A one-token prompt among verifying requests: vLLM pads it with drafts that are none.
        window[:history] = 0
        state.recurrent[slots[0]] = 0
    taps = torch.cat([window[accepted - 1 : accepted - 1 + history].float(), inputs.raw])
    q, k, v = _heads(stage, _filtered(taps, weights.filters, queries))
    recurrent = state.recurrent[slots[accepted - 1]].clone().unsqueeze(0)
    out = []
    for i in range(queries):
        at = slice(i, i + 1)
        out.append(token_step(recurrent, q[at], k[at], v[at], inputs.log_decay[at], inputs.beta[at]))
        state.recurrent[slots[i]] = recurrent[0]
    window[: history + queries - 1] = taps[1:].to(window.dtype)
    return torch.cat(out)


def _filtered(taps: Tensor, filters: Tensor, rows: int) -> Tensor:
    mixed = filters[0] * taps[:rows]
    for tap in range(1, len(filters)):
        mixed = torch.addcmul(mixed, filters[tap], taps[tap : tap + rows])
    return mixed


def _heads(stage: KdaCore, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU, then q and k of unit length, q scaled: each [rows, heads, d] (spec 2.5.3)."""
    q, k, v = F.silu(mixed).view(-1, 3, stage.heads, stage.head_dim).unbind(1)
    return unit(q) * stage.head_dim**-0.5, unit(k), v
