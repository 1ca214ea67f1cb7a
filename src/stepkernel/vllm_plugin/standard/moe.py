"""Routed experts: selection, the experts one after the other, the weighted sum (spec 2.8)."""

from collections.abc import Callable

import torch
from torch import Tensor

from stepkernel.model.config import ModelConfig
from stepkernel.program.stages import Combine, Exchange, Select
from stepkernel.vllm_plugin.standard.numerics import activate, rms_norm
from stepkernel.vllm_plugin.standard.products import linear

Expert = Callable[[int], tuple[Tensor, Tensor]]


def select(stage: Select, bias: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """ids and weights [rows, top_k] in descending key order, the lower id first among equals (spec 2.8.1)."""
    scores = logits.sigmoid()
    keys = torch.nan_to_num(scores + bias, nan=-torch.inf)
    ids = keys.sort(dim=-1, descending=True, stable=True).indices[:, : stage.top_k]
    weights = scores.gather(1, ids)
    if stage.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * stage.scaling


def experts(config: ModelConfig, expert: Expert, x: Tensor, ids: Tensor) -> Tensor:
    """[rows, top_k, width] in the dtype of x: act(x W1^T, x W3^T) W2^T of each chosen expert (spec 2.8.3).

    `expert(e)` gives W1 stacked on W3 and W2; they may lie in memory that the next call overwrites.
    """
    rows, top_k = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=config.num_experts).tolist()
    sources = order // top_k
    out: Tensor | None = None
    start = 0
    for e, count in enumerate(counts):
        if not count:
            continue
        up, down = expert(e)
        mine = slice(start, start + count)
        gate_up = linear(x[sources[mine]], up)
        width = gate_up.shape[1] // 2
        hidden = activate(gate_up[:, :width], gate_up[:, width:], config).to(x.dtype)
        result = linear(hidden, down)
        if out is None:
            out = x.new_empty(rows * top_k, result.shape[1])
        out[order[mine]] = result
        start += count
    if out is None:
        return x.new_zeros(rows, top_k, config.expert_input_size)
    return out.view(rows, top_k, -1)


def combine(
    stage: Combine, norm: Tensor | None, x: Tensor, weights: Tensor, exchange: Callable[[Exchange, Tensor], Tensor]
) -> Tensor:
    """Weighted sum over the slots, rounded, and over the ranks, then the latent norm if any (spec 2.8.4, 2.8.5)."""
    total = exchange(stage.exchange, (x.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype))
    if norm is None:
        return total
    return rms_norm(total.float(), norm, stage.eps).to(x.dtype)
