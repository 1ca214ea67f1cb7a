"""Element-wise functions and norms in float32 (spec 2.1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.model.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, float32 in and out; the weight multiplies before anything is rounded."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis (spec 2.5.3)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def activate(gate: Tensor, up: Tensor, config: ModelConfig) -> Tensor:
    """SiTU or SiLU of the gate times the up branch, float32 from rounded inputs (spec 2.7)."""
    gate, up = gate.float(), up.float()
    if config.activation == "silu" or config.situ_beta is None:
        return F.silu(gate) * up
    bounded = config.situ_beta * torch.tanh(gate / config.situ_beta) * torch.sigmoid(gate)
    if config.situ_linear_beta is None:
        return bounded * up
    return bounded * (config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta))
