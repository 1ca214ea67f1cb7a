"""Multi-head latent attention in absorbed form, between its projections (spec 2.6)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.cuda.torch_stages.binding import Binding, Run, Values
from stepkernel.program.stages import Absorb, Attend, LatentInsert, ValueGate


def latent_insert(stage: LatentInsert, binding: Binding) -> Run:
    """Rows of padding are written into the null page, whose contents are of no account."""
    cache = binding.caches.latent[stage.index].view(-1, stage.lora + stage.rope)
    load, written = binding.tensors.load, binding.inputs.written
    latent_norm = load("norm", stage.kv_norm, (stage.lora,))
    query_norm = load("norm", stage.query_norm, (stage.query_rank,)) if stage.query_norm else None

    def run(values: Values) -> None:
        latent, key = values[stage.kv].split([stage.lora, stage.rope], -1)
        rows = torch.cat([F.rms_norm(latent, (stage.lora,), latent_norm, stage.eps), key], 1)
        cache.index_copy_(0, written, rows)
        if stage.query_low and stage.query_out:
            low = values[stage.query_low]
            values[stage.query_out] = F.rms_norm(low, (stage.query_rank,), query_norm, stage.eps)

    return run


def absorb(stage: Absorb, binding: Binding) -> Run:
    """x [rows, heads (nope + rope)] to [rows, heads (lora + rope)]."""
    keys = _up_projection(stage, binding)[:, : stage.nope]

    def run(values: Values) -> None:
        query = values[stage.x].reshape(-1, stage.heads, stage.nope + stage.rope)
        absorbed = torch.bmm(query[..., : stage.nope].transpose(0, 1), keys).transpose(0, 1)
        values[stage.out] = torch.cat([absorbed, query[..., stage.nope :]], -1).flatten(1)

    return run


def attend(stage: Attend, binding: Binding) -> Run:
    """x [rows, heads (lora + rope)] to [rows, heads lora]: the heads are the queries of one attention over the latent
    rows, which are looked up by the page table. Raises ValueError for a share of the rows."""
    if stage.context is not None or not stage.causal:
        raise ValueError(f"{stage.name}: torch step: latent rows that ranks share, or a draft's, are not supported")
    row, inputs = stage.lora + stage.rope, binding.inputs
    cache = binding.caches.latent[stage.index].view(-1, row)

    def run(values: Values) -> None:
        rows = cache[inputs.rows].unsqueeze(1)
        query = values[stage.x].view(-1, 1, stage.heads, row)
        mixed = F.scaled_dot_product_attention(
            query, rows, rows[..., : stage.lora], attn_mask=inputs.seen, scale=stage.scale
        )
        values[stage.out] = mixed.reshape(len(query), -1)

    return run


def value_gate(stage: ValueGate, binding: Binding) -> Run:
    """x [rows, heads lora], gate and out [rows, heads value]."""
    values_up = _up_projection(stage, binding)[:, stage.nope :].transpose(1, 2)

    def run(values: Values) -> None:
        mixed = values[stage.x].view(-1, stage.heads, stage.lora)
        out = torch.bmm(mixed.transpose(0, 1), values_up).transpose(0, 1).flatten(1)
        values[stage.out] = out if stage.gate is None else out * torch.sigmoid(values[stage.gate])

    return run


def _up_projection(stage: Absorb | ValueGate, binding: Binding) -> Tensor:
    """kv_b as [heads, nope + value, lora]: per head the key rows, then the value rows."""
    rows = stage.heads * (stage.nope + stage.value)
    return binding.tensors.load("matrix", stage.kv_b, (rows, stage.lora)).view(stage.heads, -1, stage.lora)
