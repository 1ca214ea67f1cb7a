"""Routed experts: selection, the experts one after the other, the weighted sum (spec 2.8)."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stepkernel.model.config import ModelConfig
from stepkernel.program.stages import Combine, Exchange, Select
from stepkernel.vllm_plugin.standard.numerics import activate, rms_norm
from stepkernel.vllm_plugin.standard.products import Matrix, product


def select(stage: Select, bias: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """ids and weights [rows, top_k] in descending key order, the lower id first among equals (spec 2.8.1)."""
    scores = logits.sigmoid()
    keys = torch.nan_to_num(scores + bias, nan=-torch.inf)
    ids = keys.sort(dim=-1, descending=True, stable=True).indices[:, : stage.top_k]
    weights = scores.gather(1, ids)
    if stage.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * stage.scaling


class Experts(Protocol):
    """The experts of one layer."""

    def matrix(self, expert: int, down: bool) -> Matrix:
        """W1 stacked on W3, or W2; it may lie in memory that the next call overwrites."""
        ...

    def chosen(self, ids: Tensor, x: Tensor, down: bool) -> Tensor | None:
        """The product of each row of float32 x [pairs, inputs] with its own expert, float32 [pairs, outputs].

        None where that is not the way to go: the caller then goes through the experts.
        """
        ...


def experts(config: ModelConfig, layer: Experts, x: Tensor, ids: Tensor) -> Tensor:
    """[rows, top_k, width] in the dtype of x: act(x W1^T, x W3^T) W2^T of each chosen expert (spec 2.8.3)."""
    rows, top_k = ids.shape
    order = ids.flatten().argsort(stable=True)
    sources = order // top_k
    chosen = ids.flatten()[order]
    gate_up = layer.chosen(chosen, x[sources].float(), down=False)
    if gate_up is not None:
        hidden = _activated(gate_up.to(x.dtype), config)
        result = layer.chosen(chosen, hidden.float(), down=True)
        assert result is not None
        out = x.new_empty(rows * top_k, result.shape[1])
        out[order] = result.to(x.dtype)
        return out.view(rows, top_k, -1)
    counts = torch.bincount(chosen, minlength=config.num_experts).tolist()
    out = x.new_empty(rows * top_k, config.expert_input_size)
    start = 0
    for e, count in enumerate(counts):
        if count:
            mine = slice(start, start + count)
            hidden = _activated(product(layer.matrix(e, down=False), x[sources[mine]]), config)
            out[order[mine]] = product(layer.matrix(e, down=True), hidden)
            start += count
    return out.view(rows, top_k, -1)


def _activated(gate_up: Tensor, config: ModelConfig) -> Tensor:
    width = gate_up.shape[1] // 2
    return activate(gate_up[:, :width], gate_up[:, width:], config).to(gate_up.dtype)


def combine(
    stage: Combine, norm: Tensor | None, x: Tensor, weights: Tensor, exchange: Callable[[Exchange, Tensor], Tensor]
) -> Tensor:
    """Weighted sum over the slots, rounded, and over the ranks, then the latent norm if any (spec 2.8.4, 2.8.5)."""
    total = exchange(stage.exchange, (x.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype))
    if norm is None:
        return total
    return rms_norm(total.float(), norm, stage.eps).to(x.dtype)
