"""Which tensors a model has: canonical name, shape, storage and tensor-parallel rule, from the config alone.

A canonical name is the checkpoint's name without the `language_model.` prefix. The names of the routed
experts are kept as one template per layer and matrix, so that half a million tensors are still a small table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from stepkernel.model.config import ModelConfig
from stepkernel.model.quantization import GROUP_SIZE

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class Split(Enum):
    """Tensor-parallel rule: the axis of which each rank owns one contiguous part."""

    ROWS = "rows"  # axis 0: output rows, heads, vocabulary
    COLUMNS = "columns"  # axis 1: input columns; partial sums need a reduction
    REPLICATED = "replicated"


Kind = Literal["matrix", "vector", "packed"]
_DTYPES: dict[Kind, tuple[str, ...]] = {"matrix": ("BF16",), "vector": ("F32", "BF16"), "packed": ("U8",)}


@dataclass(frozen=True)
class TensorSpec:
    """One expected tensor.

    shape: as stored. kind: "matrix" (BF16), "vector" (small, read as float32) or "packed" (MXFP4 bytes).
    padded: a vector that may be stored longer or with more axes; only its first values count (A_log).
    """

    shape: tuple[int, ...]
    kind: Kind
    split: Split
    padded: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Accepted safetensors dtypes."""
        return _DTYPES[self.kind]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


_EXPERT = re.compile(r"(model\.layers\.(?:0|[1-9]\d*)\.block_sparse_moe\.experts\.)(0|[1-9]\d{0,8})\.(.+)")


@dataclass(frozen=True)
class TensorTable:
    """All tensors of a config: `plain` by name, `experts` by (prefix up to "experts.", name in an expert)."""

    plain: dict[str, TensorSpec]
    experts: dict[tuple[str, str], TensorSpec]
    num_experts: int

    def find(self, name: str) -> TensorSpec | None:
        """Spec of a canonical name, None if the model has no such tensor."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self.plain.get(name)
        if int(match[2]) >= self.num_experts:
            return None
        return self.experts.get((match[1], match[3]))

    def names(self) -> Iterator[str]:
        """Every canonical name, lazily, in a fixed order."""
        yield from self.plain
        for prefix, inner in self.experts:
            for expert in range(self.num_experts):
                yield f"{prefix}{expert}.{inner}"

    def __len__(self) -> int:
        return len(self.plain) + len(self.experts) * self.num_experts


def expert_of(name: str) -> tuple[str, int] | None:
    """(prefix up to "experts.", expert number) of a routed expert's tensor, None for any other name."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def tensor_table(config: ModelConfig) -> TensorTable:
    """The tensors a checkpoint of this config must have, no more and no fewer (vision parts aside)."""
    hidden = config.hidden_size
    plain: dict[str, TensorSpec] = {EMBEDDING: _rows(config.vocab_size, hidden)}
    if not config.tie_word_embeddings:
        plain[LM_HEAD] = _rows(config.vocab_size, hidden)
    plain["model.norm.weight"] = _shared_vector(hidden)
    if config.uses_attn_res:
        plain["model.output_attn_res_norm.weight"] = _shared_vector(hidden)
        plain["model.output_attn_res_proj.weight"] = _shared_vector(1, hidden)
    experts: dict[tuple[str, str], TensorSpec] = {}
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        attention = _kda(config) if config.is_kda(layer) else _mla(config)
        for inner, spec in {**_norms(config), **attention, **_feed_forward(config, layer)}.items():
            plain[prefix + inner] = spec
        if config.is_moe(layer):
            for inner, spec in _expert(config).items():
                experts[prefix + "block_sparse_moe.experts.", inner] = spec
    return TensorTable(plain, experts, config.num_experts)


def _rows(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), "matrix", Split.ROWS)


def _columns(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), "matrix", Split.COLUMNS)


def _whole(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), "matrix", Split.REPLICATED)


def _shared_vector(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "vector", Split.REPLICATED)


def _norms(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden = config.hidden_size
    norms = {name: _shared_vector(hidden) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    if config.uses_attn_res:
        for part in ("self_attention", "mlp"):
            norms[f"{part}_res_norm.weight"] = _shared_vector(hidden)
            norms[f"{part}_res_proj.weight"] = _shared_vector(1, hidden)
    return norms


def _kda(config: ModelConfig) -> dict[str, TensorSpec]:
    linear = config.linear_attention
    hidden, width, rank = config.hidden_size, config.kda_width, linear.head_dim
    tensors = {f"{name}_proj.weight": _rows(width, hidden) for name in ("q", "k", "v")}
    if linear.full_rank_gate:
        tensors["g_proj.weight"] = _rows(width, hidden)
    else:
        tensors["g_a_proj.weight"] = _whole(rank, hidden)
        tensors["g_b_proj.weight"] = _rows(width, rank)
    for name in ("q", "k", "v"):
        tensors[f"{name}_conv1d.weight"] = TensorSpec((width, 1, linear.conv_width), "vector", Split.ROWS)
    tensors["f_a_proj.weight"] = _whole(rank, hidden)
    tensors["f_b_proj.weight"] = _rows(width, rank)
    tensors["b_proj.weight"] = _rows(linear.num_heads, hidden)
    tensors["A_log"] = TensorSpec((linear.num_heads,), "vector", Split.ROWS, padded=True)
    tensors["dt_bias"] = TensorSpec((width,), "vector", Split.ROWS)
    tensors["o_norm.weight"] = _shared_vector(linear.head_dim)
    tensors["o_proj.weight"] = _columns(hidden, width)
    return {f"self_attn.{name}": spec for name, spec in tensors.items()}


def _mla(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden, heads = config.hidden_size, config.num_heads
    tensors: dict[str, TensorSpec] = {}
    if config.q_lora_rank is None:
        tensors["q_proj.weight"] = _rows(heads * config.qk_head_dim, hidden)
    else:
        tensors["q_a_proj.weight"] = _whole(config.q_lora_rank, hidden)
        tensors["q_a_layernorm.weight"] = _shared_vector(config.q_lora_rank)
        tensors["q_b_proj.weight"] = _rows(heads * config.qk_head_dim, config.q_lora_rank)
    tensors["kv_a_proj_with_mqa.weight"] = _whole(config.latent_row, hidden)
    tensors["kv_a_layernorm.weight"] = _shared_vector(config.kv_lora_rank)
    per_head = config.qk_nope_head_dim + config.v_head_dim
    tensors["kv_b_proj.weight"] = _rows(heads * per_head, config.kv_lora_rank)
    if config.output_gate:
        tensors["g_proj.weight"] = _rows(config.mla_width, hidden)
    tensors["o_proj.weight"] = _columns(hidden, config.mla_width)
    return {f"self_attn.{name}": spec for name, spec in tensors.items()}


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, TensorSpec]:
    return {
        f"{prefix}.gate_proj.weight": _rows(width, hidden),
        f"{prefix}.up_proj.weight": _rows(width, hidden),
        f"{prefix}.down_proj.weight": _columns(hidden, width),
    }


def _feed_forward(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    hidden = config.hidden_size
    if not config.is_moe(layer):
        return _mlp("mlp", hidden, config.intermediate_size)
    moe = "block_sparse_moe"
    tensors = {
        f"{moe}.gate.weight": _rows(config.num_experts, hidden),
        f"{moe}.gate.e_score_correction_bias": _shared_vector(config.num_experts),
        **_mlp(f"{moe}.shared_experts", hidden, config.shared_intermediate_size),
    }
    latent = config.routed_hidden_size
    if latent is not None:
        tensors[f"{moe}.routed_expert_down_proj.weight"] = _rows(latent, hidden)
        tensors[f"{moe}.routed_expert_up_proj.weight"] = _rows(hidden, latent)
        if config.latent_moe_use_norm:
            tensors[f"{moe}.routed_expert_norm.weight"] = _shared_vector(latent)
    return tensors


def _expert(config: ModelConfig) -> dict[str, TensorSpec]:
    """w1 = gate, w3 = up (rows split), w2 = down (columns split)."""
    width, outer = config.moe_intermediate_size, config.expert_input_size
    tensors: dict[str, TensorSpec] = {}
    for name, rows, columns, split in (
        ("w1", width, outer, Split.ROWS),
        ("w2", outer, width, Split.COLUMNS),
        ("w3", width, outer, Split.ROWS),
    ):
        if config.expert_format == "bf16":
            tensors[f"{name}.weight"] = TensorSpec((rows, columns), "matrix", split)
        else:
            tensors[f"{name}.weight_packed"] = TensorSpec((rows, columns // 2), "packed", split)
            tensors[f"{name}.weight_scale"] = TensorSpec((rows, columns // GROUP_SIZE), "packed", split)
    return tensors
