"""The model class that vLLM instantiates for the Kimi K3 family."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ModelConfig
from stepkernel.program.builder import build_program
from stepkernel.vllm_plugin.layers import Dtypes, KdaLayer, MlaLayer, Shapes, state_shapes
from stepkernel.vllm_plugin.options import Options
from stepkernel.vllm_plugin.standard.path import StandardPath
from stepkernel.vllm_plugin.standard.weights import PlainWeights

logger = init_logger("vllm.stepkernel")


class KimiForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Text part of Kimi K3, and Kimi Linear."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.options = Options.parse(vllm_config.additional_config)
        self.dtype = vllm_config.model_config.dtype
        self.checkpoint = Checkpoint.open(model_directory(vllm_config))
        self.config = self.checkpoint.config
        name = f"{prefix}.layers" if prefix else "model.layers"
        self.kda_layers = {i: KdaLayer(self.config, vllm_config, f"{name}.{i}.kda") for i in self.config.kda_layers}
        self.mla_layers = {i: MlaLayer(self.config, vllm_config, f"{name}.{i}.mla") for i in self.config.mla_layers}
        self.program = build_program(self.config)
        self.standard: StandardPath | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Reads the checkpoint itself, memory-mapped and checked; vLLM's iterator is left alone."""
        source = self.checkpoint.weights()
        plain = PlainWeights(self.program, source, self.dtype)
        self.standard = StandardPath(self.program, plain, self.dtype, self.kda_layers, self.mla_layers)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError("prompt embeddings are not supported")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Normalised hidden rows; without rotation, positions are only in the lengths."""
        assert self.standard is not None
        return self.standard(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """float32 [rows, vocab]."""
        assert self.standard is not None
        return self.standard.logits(hidden_states)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Dtypes:
        return vllm_config.model_config.dtype, torch.float32

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Shapes:
        config = ModelConfig.from_file(model_directory(vllm_config))
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return state_shapes(config, ranks, vllm_config.num_speculative_tokens)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.kda_state_copy_func()


def model_directory(vllm_config: VllmConfig) -> Path:
    """The model's files here: its directory, or what the hub's cache holds of a repository."""
    model = vllm_config.model_config
    directory = Path(model.model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"]
    return Path(snapshot_download(model.model, revision=model.revision, allow_patterns=patterns))
