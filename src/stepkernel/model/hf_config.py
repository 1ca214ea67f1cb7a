"""Hugging Face config.json <-> ModelConfig for both families: every field is read, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepkernel.model.config import Activation, ConfigError, LinearAttentionConfig, ModelConfig
from stepkernel.model.fields import Fields, read_json_object
from stepkernel.model.quantization import mxfp4_quantization, parse_expert_format

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_FAMILIES = ("kimi_k3", "kimi_linear")
_WIDTH = 8  # every vector width is a whole number of 8-element SIMD lanes and 16-byte BF16 loads
_MAX_EXPERTS = 65536


def read(path: Path) -> ModelConfig:
    """Config of a config.json or a model directory; generation_config.json beside it adds end tokens."""
    file = path / CONFIG_FILE if path.is_dir() else path
    config = parse(read_json_object(file), os.fspath(file))
    generation = file.parent / GENERATION_FILE
    if file.name != CONFIG_FILE or not generation.is_file():
        return config
    fields = Fields(read_json_object(generation), os.fspath(generation))
    if not fields.has("eos_token_id"):
        return config
    # A model may end its text with one token and its turn with another: both must stop generation.
    merged = dict.fromkeys((*config.eos_token_ids, *_eos_ids(fields, config.vocab_size)))
    return replace(config, eos_token_ids=tuple(merged))


def parse(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """ModelConfig of a parsed config.json; ConfigError with one line for anything missing or unsupported."""
    top = Fields(raw, source)
    top.require("model_type", *_FAMILIES)
    nested = top.text("model_type") == "kimi_k3"
    text = top.section("text_config") if nested else top
    if nested:
        text.require("model_type", "kimi_linear", None)
    _refuse_unsupported(text)

    hidden_size = text.width("hidden_size", _WIDTH)
    num_layers = text.integer("num_hidden_layers")
    vocab_size = text.integer("vocab_size")
    num_heads = text.integer("num_attention_heads")
    text.require("num_key_value_heads", num_heads, None)
    activation, beta, linear_beta = _activation(text)
    num_experts = text.integer("num_experts", high=_MAX_EXPERTS)
    routed = text.width("routed_expert_hidden_size", _WIDTH) if text.has("routed_expert_hidden_size") else None
    latent_norm = text.flag("latent_moe_use_norm", False)
    if latent_norm and routed is None:
        text.refuse("latent_moe_use_norm", "false without routed_expert_hidden_size")
    kda_layers, mla_layers = _layer_kinds(text.section("linear_attn_config"), num_layers)
    norm_eps = text.number("rms_norm_eps")
    tokens = text if text.has("eos_token_id") else top
    eos_token_ids = _eos_ids(tokens, vocab_size)

    config = ModelConfig(
        family="kimi_k3" if nested else "kimi_linear",
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        num_heads=num_heads,
        intermediate_size=text.width("intermediate_size", _WIDTH),
        activation=activation,
        situ_beta=beta,
        situ_linear_beta=linear_beta,
        rms_norm_eps=norm_eps,
        latent_norm_eps=text.number("latent_norm_eps", norm_eps),
        num_experts=num_experts,
        experts_per_token=text.integer("num_experts_per_token", high=num_experts),
        num_shared_experts=text.integer("num_shared_experts"),
        moe_intermediate_size=text.width("moe_intermediate_size", _WIDTH),
        routed_hidden_size=routed,
        latent_moe_use_norm=latent_norm,
        renormalize=text.flag("moe_renormalize"),
        routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
        num_expert_group=1,
        topk_group=1,
        first_dense_layers=text.integer("first_k_dense_replace", 0, low=0, high=num_layers),
        moe_layer_freq=text.integer("moe_layer_freq", 1),
        q_lora_rank=text.width("q_lora_rank", _WIDTH) if text.has("q_lora_rank") else None,
        kv_lora_rank=text.width("kv_lora_rank", _WIDTH),
        qk_nope_head_dim=text.width("qk_nope_head_dim", _WIDTH),
        qk_rope_head_dim=text.width("qk_rope_head_dim", _WIDTH),
        v_head_dim=text.width("v_head_dim", _WIDTH),
        output_gate=text.flag("mla_use_output_gate", False),
        attn_res_block_size=text.integer("attn_res_block_size") if text.has("attn_res_block_size") else None,
        max_positions=_max_positions(text),
        tie_word_embeddings=text.flag("tie_word_embeddings", False),
        bos_token_id=_token(text, top, "bos_token_id", vocab_size, None),
        eos_token_ids=eos_token_ids,
        pad_token_id=_token(text, top, "pad_token_id", vocab_size, eos_token_ids[0]),
        logit_scale=text.number("logit_scale", 1.0),
        linear_attention=_linear_attention(text.section("linear_attn_config")),
        kda_layers=kda_layers,
        mla_layers=mla_layers,
        expert_format=parse_expert_format(text if text.has("quantization_config") else top),
    )
    _check_expert_groups(text, config)
    return config


def _refuse_unsupported(text: Fields) -> None:
    for key in text.raw:
        if key.startswith("index_") or "indexer" in key:
            text.refuse(key, "models without a sparse attention indexer (Kimi K3.1 is not supported)")
    text.require("mla_use_nope", True)
    text.require("moe_router_activation_func", "sigmoid")
    text.require("num_expert_group", 1, None)
    text.require("topk_group", 1, None)
    text.require("topk_method", "noaux_tc", None)
    text.flag("use_grouped_topk", True)
    text.require("num_nextn_predict_layers", 0, None)
    text.require("dtype", "bfloat16", None)
    text.require("torch_dtype", "bfloat16", None)


def _activation(text: Fields) -> tuple[Activation, float | None, float | None]:
    text.require("hidden_act", "situ", "silu")
    if text.text("hidden_act") == "silu":
        return "silu", None, None
    has_linear = text.has("activation_situ_linear_beta")
    linear = text.number("activation_situ_linear_beta") if has_linear else None
    return "situ", text.number("activation_situ_beta"), linear


def _linear_attention(linear: Fields) -> LinearAttentionConfig:
    linear.require("short_conv_kernel_size", 4)
    bound = linear.number("gate_lower_bound", positive=False) if linear.has("gate_lower_bound") else None
    if bound is not None and not -5.0 <= bound < 0.0:
        linear.refuse("gate_lower_bound", "absent, or -5 <= value < 0")
    return LinearAttentionConfig(
        num_heads=linear.integer("num_heads"),
        head_dim=linear.width("head_dim", _WIDTH),
        conv_width=linear.integer("short_conv_kernel_size"),
        gate_lower_bound=bound,
        full_rank_gate=linear.flag("use_full_rank_gate", False),
    )


def _layer_kinds(linear: Fields, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """0-based KDA and MLA layers from the two 1-based lists, which must partition 1..num_layers."""
    kda, mla = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    listed = sorted((*kda, *mla))
    if len(listed) != num_layers or listed != list(range(1, num_layers + 1)):
        valid = range(1, num_layers + 1)
        outside = [layer for layer in listed if layer not in valid]
        twice = sorted({layer for layer, after in pairwise(listed) if layer == after})
        present = set(listed)
        missing = next((layer for layer in valid if layer not in present), None)
        fault = (
            f"layer {outside[0]} is outside 1..{num_layers}"
            if outside
            else f"layer {twice[0]} is listed twice"
            if twice
            else f"layer {missing} is in neither"
        )
        raise ConfigError(
            f"{linear.source}: {linear.name('kda_layers')} and full_attn_layers found {len(kda)} and "
            f"{len(mla)} layers, {fault}; supported: each of 1..{num_layers} in exactly one of them"
        )
    return tuple(layer - 1 for layer in sorted(kda)), tuple(layer - 1 for layer in sorted(mla))


def _max_positions(text: Fields) -> int:
    key = "max_position_embeddings"
    if not text.has(key) and text.has("model_max_length"):
        key = "model_max_length"
    return text.integer(key)


def _token(text: Fields, top: Fields, key: str, vocab_size: int, default: int | None) -> int:
    fields = text if text.has(key) else top
    return fields.integer(key, default, low=0, high=vocab_size - 1)


def _eos_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    key = "eos_token_id"
    if not isinstance(fields.raw.get(key), list):
        return (fields.integer(key, low=0, high=vocab_size - 1),)
    ids = tuple(dict.fromkeys(fields.integers(key)))
    if not ids or any(not 0 <= token < vocab_size for token in ids):
        fields.refuse(key, f"token ids from 0 to {vocab_size - 1}")
    return ids


def _check_expert_groups(text: Fields, config: ModelConfig) -> None:
    if config.expert_format != "mxfp4":
        return
    group = 32
    if config.moe_intermediate_size % group:
        text.refuse("moe_intermediate_size", f"multiples of {group} with MXFP4 experts")
    if config.expert_input_size % group:
        key = "routed_expert_hidden_size" if config.routed_hidden_size is not None else "hidden_size"
        text.refuse(key, f"multiples of {group} with MXFP4 experts")


def to_hf_dict(config: ModelConfig) -> dict[str, Any]:
    """config.json content; optional keys are left out where their default says the same."""
    linear = config.linear_attention
    eos: int | list[int] = list(config.eos_token_ids)
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id,
    }
    linear_attn: dict[str, Any] = {
        "num_heads": linear.num_heads,
        "head_dim": linear.head_dim,
        "short_conv_kernel_size": linear.conv_width,
        "gate_lower_bound": linear.gate_lower_bound,
        "use_full_rank_gate": linear.full_rank_gate,
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
    }
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.activation,
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "rms_norm_eps": config.rms_norm_eps,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.experts_per_token,
        "num_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "routed_expert_hidden_size": config.routed_hidden_size,
        "latent_moe_use_norm": config.latent_moe_use_norm,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": config.renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
        "use_grouped_topk": True,
        "num_expert_group": config.num_expert_group,
        "topk_group": config.topk_group,
        "topk_method": "noaux_tc",
        "first_k_dense_replace": config.first_dense_layers,
        "moe_layer_freq": config.moe_layer_freq,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": config.output_gate,
        "attn_res_block_size": config.attn_res_block_size,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "bfloat16",
        **tokens,
        "logit_scale": None if config.logit_scale == 1.0 else config.logit_scale,
        "latent_norm_eps": None if config.latent_norm_eps == config.rms_norm_eps else config.latent_norm_eps,
        "linear_attn_config": {key: value for key, value in linear_attn.items() if value is not None},
        "quantization_config": mxfp4_quantization() if config.expert_format == "mxfp4" else None,
    }
    optional = ("activation_situ_beta", "activation_situ_linear_beta", "routed_expert_hidden_size")
    absent = (*optional, "attn_res_block_size", "logit_scale", "latent_norm_eps", "quantization_config")
    text = {key: value for key, value in text.items() if value is not None or key not in absent}
    if config.family == "kimi_linear":
        return text
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        **tokens,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
    }
