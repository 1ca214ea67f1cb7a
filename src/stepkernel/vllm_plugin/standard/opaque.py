"""Cores that torch.compile must not look into: their work depends on what is in the step and in the caches.

One custom op stands for all of them. A graph holds only the core's name; which core it is, the engine that runs the
graph knows, so a graph that vLLM kept on disk works for the next engine as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

TABLE = "stepkernel.cores"  # where vLLM's table of layers holds the cores of a model
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Core:
    """`run` computes; `shape` gives an empty contiguous tensor of the same shape and dtype."""

    run: Run
    shape: Run


class Cores(dict[str, Core]):
    """The cores of one model by name."""


def _call(inputs: list[Tensor], name: str) -> Tensor:
    return _core(name).run(*inputs).contiguous()


def _fake(inputs: list[Tensor], name: str) -> Tensor:
    return _core(name).shape(*inputs)


def _core(name: str) -> Core:
    found: Core = get_forward_context().no_compile_layers[TABLE][name]
    return found


direct_register_custom_op(op_name="stepkernel_core", op_func=_call, fake_impl=_fake)


def opaque(name: str) -> Run:
    """Calls the core of this name in a way that a graph can hold."""

    def call(*inputs: Tensor) -> Tensor:
        return torch.ops.vllm.stepkernel_core(list(inputs), name)

    return call
