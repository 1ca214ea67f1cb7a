"""vLLM's backends and metadata builders for the two kinds of layer; they only translate. What they give is on the host,
where native steps are prepared, also on a GPU."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec

from stepkernel.vllm_plugin.batch import PageBatch, StateBatch


class LatentBuilder(AttentionMetadataBuilder[PageBatch]):
    """Pages of the MLA layers."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PageBatch:
        m = common_attn_metadata
        return PageBatch(
            starts=m.query_start_loc_cpu.tolist(),
            lengths=m.seq_lens.tolist(),
            pages=m.block_table_tensor.cpu(),
            slots=m.slot_mapping[: m.num_actual_tokens].cpu(),
        )


class LatentBackend(AttentionBackend):
    """MLA over latent rows in pages of any size."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "STEPKERNEL_MLA"

    @staticmethod
    def get_impl_cls() -> Any:
        return None

    @staticmethod
    def get_builder_cls() -> type[LatentBuilder]:
        return LatentBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_dcp(cls) -> bool:
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """vLLM sizes hybrid pages from heads of keys and values; what is stored is one latent row per token."""
        return MLAAttentionSpec(block_size=spec.block_size, num_kv_heads=1, head_size=spec.head_size, dtype=spec.dtype)


class StateBuilder(GDNAttentionMetadataBuilder):
    """States of a group of KDA layers.

    Of GDN's builder only the type matters: vLLM's runner hands accepted counts and drafts to its subclasses alone. The
    runner builds a step's metadata once and exchanges the slots for each further group.
    """

    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> StateBatch:
        m = common_attn_metadata
        starts, lengths = m.query_start_loc_cpu.tolist(), m.seq_lens.tolist()
        requests = len(starts) - 1
        verifies, accepted = [False] * requests, [1] * requests
        if num_decode_draft_tokens_cpu is not None and num_accepted_tokens is not None:
            verifies = (num_decode_draft_tokens_cpu >= 0).tolist()
            found = num_accepted_tokens.tolist()
            accepted = [n if verifying else 1 for n, verifying in zip(found, verifies, strict=True)]
        columns = self._columns(m.seq_lens.cpu())
        return StateBatch(
            starts=starts,
            slots=m.block_table_tensor.cpu().gather(1, columns),
            fresh=[lengths[r] == starts[r + 1] - starts[r] for r in range(requests)],
            accepted=accepted,
            verifies=verifies,
            columns=columns,
        )

    def update_block_table(
        self, metadata: StateBatch, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> StateBatch:
        """Another group of layers in the same step: only its slots differ."""
        return replace(metadata, slots=blk_table.cpu().gather(1, metadata.columns))

    def _columns(self, lengths: torch.Tensor) -> torch.Tensor:
        """With prefix caching ("align") a request has a state for each of its blocks; the last ones are in use."""
        spec = self.kv_cache_spec
        count = torch.arange(1 + spec.num_speculative_blocks)
        if self.vllm_config.cache_config.mamba_cache_mode == "none":
            return count.expand(len(lengths), -1)
        last = (lengths.long() - 1).clamp_(min=0) // spec.block_size
        return last[:, None] + count


class StateBackend(GDNAttentionBackend):
    """KDA over states in slots."""

    @staticmethod
    def get_name() -> str:
        return "STEPKERNEL_KDA"

    @staticmethod
    def get_builder_cls() -> type[StateBuilder]:
        return StateBuilder
