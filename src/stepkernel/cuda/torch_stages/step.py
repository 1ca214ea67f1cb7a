"""A whole step of a program in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepkernel.cuda.torch_stages.binding import Binding, Run, Values
from stepkernel.cuda.torch_stages.dense import activate_dense, argmax, embed, linear
from stepkernel.cuda.torch_stages.experts import combine, experts_down, experts_up, select
from stepkernel.cuda.torch_stages.kda import kda_core
from stepkernel.cuda.torch_stages.mix import mix_norm
from stepkernel.cuda.torch_stages.mla import absorb, attend, latent_insert, value_gate
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    KdaCore,
    LatentInsert,
    Linear,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)


def bind(stage: Stage, binding: Binding) -> Run:
    """What a stage does to the values of a step. Raises ValueError for a stage that torch is not written for."""
    match stage:
        case Embed():
            return embed(stage, binding)
        case MixNorm():
            return mix_norm(stage, binding)
        case Linear():
            return linear(stage, binding)
        case Activate():
            return activate_dense(stage, binding)
        case KdaCore():
            return kda_core(stage, binding)
        case LatentInsert():
            return latent_insert(stage, binding)
        case Absorb():
            return absorb(stage, binding)
        case Attend():
            return attend(stage, binding)
        case ValueGate():
            return value_gate(stage, binding)
        case Select():
            return select(stage, binding)
        case ExpertsUp():
            return experts_up(stage, binding)
        case ExpertsDown():
            return experts_down(stage, binding)
        case Combine():
            return combine(stage, binding)
        case Argmax():
            return argmax(stage, binding)
    raise ValueError(f"{stage.name}: torch step: stages of this kind are not supported")


class TorchStep:
    """A program of one token of each request, bound to weights and caches.

    `run` does a step with the inputs that were set and asks the device nothing, so that it can be captured in a CUDA
    graph; `logits` and `tokens` then hold its results, at addresses that stay with the graph.

    Raises ValueError for a program that torch is not written for.
    """

    def __init__(self, binding: Binding) -> None:
        if binding.program.queries != 1:
            raise ValueError(f"torch step: {binding.program.queries} tokens of each request, 1 is supported")
        self.binding = binding
        with torch.inference_mode():
            self.runs: Sequence[Run] = [bind(stage, binding) for stage in binding.program.stages]
        self.values: Values = {}

    def run(self) -> None:
        with torch.inference_mode():
            self.values.clear()
            for run in self.runs:
                run(self.values)

    @property
    def logits(self) -> Tensor:
        return self.values["logits"]

    @property
    def tokens(self) -> Tensor:
        return self.values["tokens"]
