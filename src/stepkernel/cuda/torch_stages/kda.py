"""KDA between its projections, one token of each request (spec 2.5.2 to 2.5.7), float32 within."""

import torch
import torch.nn.functional as F

from stepkernel.cuda.torch_stages.binding import Binding, Run, Values
from stepkernel.program.stages import KdaCore

EPS = 1e-6  # of the lengths of queries and keys (spec 2.5.3)


def kda_core(stage: KdaCore, binding: Binding) -> Run:
    """A request's state is taken out of its slot and put back; rows of padding use the null slot, whose contents are of
    no account."""
    heads, dim, history = stage.heads, stage.head_dim, stage.conv_width - 1
    channels = heads * dim
    load, slots = binding.tensors.load, binding.inputs.slots
    conv, states = binding.caches.conv[stage.index], binding.caches.recurrent[stage.index]
    filters = torch.cat([load("vector", name, (channels, stage.conv_width)) for name in stage.conv]).T.contiguous()
    bias = load("vector", stage.dt_bias, (channels,))
    rate = load("vector", stage.a_log, (heads,)).exp()[:, None]
    norm = load("vector", stage.out_norm, (dim,))
    # unit(x) = rms_norm(x) / sqrt(dim) with an epsilon that is divided too; queries are scaled by 1 / sqrt(dim) more.
    lengths = filters.new_tensor([1 / dim, dim**-0.5])[:, None, None]

    def run(values: Values) -> None:
        window = torch.cat([conv[slots, :history], values[stage.qkv].unsqueeze(1)], 1)
        conv[slots, :history] = window[:, 1:]
        mixed = F.silu((window * filters).sum(1)).view(-1, 3, heads, dim)
        q, k = (F.rms_norm(mixed[:, :2], (dim,), None, EPS / dim) * lengths).unbind(1)
        z = (values[stage.gamma] + bias).view(-1, heads, dim)
        if stage.gate_lower_bound is None:
            decay = (-rate * F.softplus(z)).exp()
        else:
            decay = (stage.gate_lower_bound * torch.sigmoid(rate * z)).exp()
        beta = torch.sigmoid(values[stage.beta].float()).unsqueeze(-1)
        state = states[slots]
        # Both products with the decayed state in one pass: o = S' q = S q + e (k . q).
        both = state @ (torch.stack([k, q], -1) * decay.unsqueeze(-1))
        error = beta * (mixed[:, 2] - both[..., 0])
        out = both[..., 1] + error * (k * q).sum(-1, keepdim=True)
        states[slots] = state.mul_(decay.unsqueeze(-2)).addcmul_(error.unsqueeze(-1), k.unsqueeze(-2))
        gate = torch.sigmoid(values[stage.gate].float()).view(-1, heads, dim)
        values[stage.out] = (F.rms_norm(out, (dim,), norm, stage.eps) * gate).flatten(1).bfloat16()

    return run
