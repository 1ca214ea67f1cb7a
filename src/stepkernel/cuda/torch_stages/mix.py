"""Residual stream: the pending additions, Attention Residuals and the norm in front of a sublayer."""

import torch
import torch.nn.functional as F

from stepkernel.cuda.torch_stages.binding import Binding, Run, Values
from stepkernel.program.program import BLOCKS, PREFIX
from stepkernel.program.stages import MixNorm


def mix_norm(stage: MixNorm, binding: Binding) -> Run:
    """The saved blocks are values of their own (spec 2.3, 2.4). Raises ValueError for a stream that a draft reads."""
    if stage.tap is not None:
        raise ValueError(f"{stage.name}: torch step: streams for a draft are not supported")
    width = (stage.width,)
    norm, score = binding.tensors.load("norm", stage.norm, width), None
    if stage.score_norm is not None and stage.score_proj is not None:
        score = binding.tensors.load("score", f"{stage.score_norm}|{stage.score_proj}", width)
    wide = norm.float()

    def run(values: Values) -> None:
        if stage.update != "none":
            delta = values[stage.delta[0]]
            for name in stage.delta[1:]:
                delta = delta + values[name]
            values[PREFIX] = delta if stage.update == "restart" else values[PREFIX] + delta
        prefix = values[PREFIX]
        if score is None:
            values[stage.out] = F.rms_norm(prefix, width, norm, stage.eps)
        else:
            blocks = [values[f"{BLOCKS}{index}"] for index in range(stage.sources)]
            sources = torch.stack([*blocks, prefix]).float()
            shares = F.rms_norm(sources, width, score, stage.eps).sum(-1, keepdim=True).softmax(0)
            mixed = (shares * sources).sum(0)
            if stage.round_mix:
                values[stage.out] = F.rms_norm(mixed.bfloat16(), width, norm, stage.eps)
            else:
                values[stage.out] = F.rms_norm(mixed, width, wide, stage.eps).bfloat16()
        if stage.save is not None:
            values[f"{BLOCKS}{stage.save}"] = prefix

    return run
