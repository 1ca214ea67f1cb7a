"""The architecture of one model as plain data: what config.json says, with 0-based layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["kimi_k3", "kimi_linear"]
Activation = Literal["situ", "silu"]
ExpertFormat = Literal["bf16", "mxfp4"]


class ConfigError(ValueError):
    """A model configuration that cannot be used; one line: file, field, what was found, what is supported."""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Kimi Delta Attention (KDA).

    gate_lower_bound: ln of the strongest decay per token (bounded form), or None for the softplus form.
    full_rank_gate: output gate by one matrix `g_proj`, otherwise by the pair `g_a_proj`, `g_b_proj`.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    full_rank_gate: bool


@dataclass(frozen=True)
class ModelConfig:
    """One Kimi K3 or Kimi Linear text model. Build it with `from_file` or `from_dict`, which validate.

    Layer numbers are 0-based here (the files count from 1). `num_heads` counts MLA heads; `linear_attention`
    has its own. `routed_hidden_size` is the latent width of the routed experts, None when they read the
    hidden state itself. `latent_norm_eps` is the epsilon of the MLA low-rank norms.
    """

    family: Family
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    situ_beta: float | None
    situ_linear_beta: float | None
    rms_norm_eps: float
    latent_norm_eps: float
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_hidden_size: int | None
    latent_moe_use_norm: bool
    renormalize: bool
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int
    first_dense_layers: int
    moe_layer_freq: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool
    attn_res_block_size: int | None
    max_positions: int
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    logit_scale: float
    linear_attention: LinearAttentionConfig
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    expert_format: ExpertFormat

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Validates the parsed content of a config.json; `source` names it in errors (ConfigError)."""
        # Imported late: hf_config builds ModelConfig and so imports this module.
        from stepkernel.model.hf_config import parse

        return parse(raw, source)

    @staticmethod
    def from_file(path: str | Path) -> ModelConfig:
        """Reads a config.json, or the one in a model directory together with its generation_config.json.

        Raises ConfigError for a missing or broken file and for everything this engine does not support.
        """
        from stepkernel.model.hf_config import read

        return read(Path(path))

    def to_hf_dict(self) -> dict[str, Any]:
        """The config.json content of this model; `from_dict` of it gives an equal ModelConfig."""
        from stepkernel.model.hf_config import to_hf_dict

        return to_hf_dict(self)

    def is_kda(self, layer: int) -> bool:
        """True if the 0-based layer is a KDA layer, False if it is an MLA layer."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """True if the feed-forward part of the 0-based layer is a mixture of experts, False if dense."""
        return layer >= self.first_dense_layers and layer % self.moe_layer_freq == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if not self.is_moe(layer))

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def num_dense_layers(self) -> int:
        return len(self.dense_layers)

    @property
    def expert_input_size(self) -> int:
        """Width that a routed expert reads and writes: latent width, or hidden size without one."""
        return self.routed_hidden_size if self.routed_hidden_size is not None else self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that stands for all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def qk_head_dim(self) -> int:
        """Query and key width of one MLA head: the part from the latent, then the shared part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_row(self) -> int:
        """Values per token in the MLA cache: normalised latent, then the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """MLA score factor, 1/sqrt(qk_head_dim), in the direct and the absorbed form."""
        return 1.0 / math.sqrt(self.qk_head_dim)

    @property
    def kda_width(self) -> int:
        return self.linear_attention.num_heads * self.linear_attention.head_dim

    @property
    def mla_width(self) -> int:
        return self.num_heads * self.v_head_dim

    @property
    def num_blocks(self) -> int:
        """Block vectors that Attention Residuals saves in one forward pass; 0 with plain residuals."""
        return 0 if self.attn_res_block_size is None else -(-self.num_layers // self.attn_res_block_size)

    @property
    def uses_attn_res(self) -> bool:
        return self.attn_res_block_size is not None

    @property
    def weight_prefix(self) -> str:
        """Prefix that tensor names of this family usually carry; a hint, readers accept both."""
        return "language_model." if self.family == "kimi_k3" else ""
