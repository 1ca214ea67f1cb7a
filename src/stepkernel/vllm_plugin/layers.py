"""The layers that vLLM sees: they own no weights, only a place in its cache."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from stepkernel.model.config import ModelConfig
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch
from stepkernel.vllm_plugin.metadata import LatentBackend, StateBackend
from stepkernel.vllm_plugin.options import FP8_CACHE
from stepkernel.vllm_plugin.standard.kda import KdaState

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Dtypes = tuple[torch.dtype, torch.dtype]


def state_shapes(config: ModelConfig, ranks: int, drafts: int) -> Shapes:
    """One slot of one KDA layer and rank: convolution window, oldest row first, and recurrent state (spec 4.1)."""
    linear = config.linear_attention
    heads = linear.num_heads // ranks
    window = (linear.conv_width - 1 + drafts, 3 * heads * linear.head_dim)
    return window, (heads, linear.head_dim, linear.head_dim)


class KdaLayer(nn.Module, MambaBase):
    """State slots of one KDA layer."""

    def __init__(self, config: ModelConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self._shapes = state_shapes(config, ranks, vllm_config.num_speculative_tokens)
        self._dtypes = (vllm_config.model_config.dtype, torch.float32)
        self.kv_cache: tuple[Tensor, ...] = ()
        _announce(self, vllm_config, prefix)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend

    def get_state_shape(self) -> Shapes:
        return self._shapes

    def get_state_dtype(self) -> Dtypes:
        return self._dtypes

    @property
    def state(self) -> KdaState | None:
        """None before vLLM has allocated its cache."""
        return KdaState(*self.kv_cache) if self.kv_cache else None

    def batch(self) -> StateBatch | None:
        """None in vLLM's profiling runs."""
        return _metadata(self.prefix)


class MlaLayer(nn.Module, AttentionLayerBase):
    """Latent rows of one MLA layer: cache [pages, page_tokens, row], in the model's dtype or E4M3 (spec 4.2)."""

    def __init__(self, config: ModelConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self._row = config.latent_row
        fp8 = vllm_config.cache_config.cache_dtype in FP8_CACHE
        self._dtype = torch.float8_e4m3fn if fp8 else vllm_config.model_config.dtype
        self.kv_cache: Tensor = torch.empty(0)
        _announce(self, vllm_config, prefix)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=1, head_size=self._row, dtype=self._dtype
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache

    def batch(self) -> PageBatch | None:
        return _metadata(self.prefix)


def _announce(layer: nn.Module, vllm_config: VllmConfig, prefix: str) -> None:
    """vLLM finds the layers that need cache in this table."""
    layers = vllm_config.compilation_config.static_forward_context
    if prefix in layers:
        raise ValueError(f"layer {prefix} exists twice")
    layers[prefix] = layer


def _metadata(prefix: str) -> Any:
    found = get_forward_context().attn_metadata
    return found.get(prefix) if isinstance(found, dict) else None
