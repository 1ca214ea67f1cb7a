"""Attention Residuals and the norm in front of a sublayer (spec 2.3, 2.4)."""

import torch
from torch import Tensor

from stepkernel.program.stages import MixNorm
from stepkernel.vllm_plugin.standard.numerics import rms_norm


def mix(stage: MixNorm, sources: list[Tensor], score: Tensor | None) -> Tensor:
    """Softmax over the sources' scores, the raw sources mixed, in float32; the prefix comes last."""
    if score is None:
        return sources[-1].float()
    stacked = torch.stack(sources).float()
    root = torch.rsqrt(stacked.square().mean(-1) + stage.eps)
    shares = ((stacked * score).sum(-1) * root).softmax(0)
    return (shares.unsqueeze(-1) * stacked).sum(0)


def norm(stage: MixNorm, mixed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """RMSNorm of the mix, rounded once; only the final mix is rounded before."""
    if stage.round_mix:
        mixed = mixed.to(dtype).float()
    return rms_norm(mixed, weight, stage.eps).to(dtype)
