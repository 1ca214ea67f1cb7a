"""Attention Residuals and the norm in front of a sublayer (spec 2.3, 2.4)."""

import torch
from torch import Tensor

from stepkernel.program.stages import MixNorm
from stepkernel.vllm_plugin.standard.numerics import rms_norm


def mix_norm(stage: MixNorm, sources: list[Tensor], score: Tensor | None, norm: Tensor) -> Tensor:
    """Softmax over the sources' scores, the raw sources mixed in float32, then RMSNorm; the prefix comes last."""
    dtype = sources[0].dtype
    if score is None:
        mixed = sources[-1].float()
    else:
        stacked = torch.stack(sources).float()
        root = torch.rsqrt(stacked.square().mean(-1) + stage.eps)
        shares = ((stacked * score).sum(-1) * root).softmax(0)
        mixed = (shares.unsqueeze(-1) * stacked).sum(0)
    if stage.round_mix:
        mixed = mixed.to(dtype).float()
    return rms_norm(mixed, norm, stage.eps).to(dtype)
