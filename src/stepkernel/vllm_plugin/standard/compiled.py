"""The standard path where vLLM compiles: one graph for steps of any shape, with the cores as opaque ops in it."""

from torch import Tensor
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode, VllmConfig

from stepkernel.vllm_plugin.standard.path import StandardPath


def compiles(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's CPU engine compiles in this mode; with STOCK_TORCH_COMPILE its CPU runner does not."""
    mode = vllm_config.compilation_config.mode
    return mode not in (None, CompilationMode.NONE, CompilationMode.STOCK_TORCH_COMPILE)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0})
class CompiledPath(StandardPath):
    """Made under vLLM's current configuration; compiled in its first call."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        return super().forward(input_ids)
