"""Models known by name, as data: no file is needed to plan, explain or synthesise them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stepkernel.model.config import ConfigError, LinearAttentionConfig, ModelConfig


def _mla_every(period: int, num_layers: int) -> tuple[int, ...]:
    """0-based MLA layers: every `period`-th one and, as in all published models, the last."""
    return tuple(layer for layer in range(num_layers) if (layer + 1) % period == 0 or layer == num_layers - 1)


def _others(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(num_layers) if layer not in layers)


_K3 = ModelConfig(
    family="kimi_k3",
    hidden_size=7168,
    num_layers=93,
    vocab_size=163840,
    num_heads=96,
    intermediate_size=33792,
    activation="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-5,
    num_experts=896,
    experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_hidden_size=3584,
    latent_moe_use_norm=True,
    renormalize=True,
    routed_scaling_factor=1.0,
    num_expert_group=1,
    topk_group=1,
    first_dense_layers=1,
    moe_layer_freq=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    output_gate=True,
    attn_res_block_size=12,
    max_positions=1048576,
    tie_word_embeddings=False,
    bos_token_id=163584,
    eos_token_ids=(163586,),
    pad_token_id=163839,
    logit_scale=1.0,
    linear_attention=LinearAttentionConfig(96, 128, 4, -5.0, True),
    kda_layers=_others(_mla_every(4, 93), 93),
    mla_layers=_mla_every(4, 93),
    expert_format="mxfp4",
)

_LINEAR_48B = replace(
    _K3,
    family="kimi_linear",
    hidden_size=2304,
    num_layers=27,
    num_heads=32,
    intermediate_size=9216,
    activation="silu",
    situ_beta=None,
    situ_linear_beta=None,
    num_experts=256,
    experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_hidden_size=None,
    latent_moe_use_norm=False,
    routed_scaling_factor=2.446,
    q_lora_rank=None,
    output_gate=False,
    attn_res_block_size=None,
    linear_attention=LinearAttentionConfig(32, 128, 4, None, False),
    kda_layers=_others(_mla_every(4, 27), 27),
    mla_layers=_mla_every(4, 27),
    expert_format="bf16",
)


def _tiny(config: ModelConfig, num_layers: int) -> ModelConfig:
    return replace(
        config,
        hidden_size=256,
        num_layers=num_layers,
        vocab_size=2048,
        num_heads=2,
        num_shared_experts=1,
        moe_intermediate_size=128,
        kv_lora_rank=128,
        max_positions=4096,
        bos_token_id=2040,
        eos_token_ids=(2042,),
        pad_token_id=2047,
        linear_attention=replace(config.linear_attention, num_heads=2),
        kda_layers=_others(_mla_every(4, num_layers), num_layers),
        mla_layers=_mla_every(4, num_layers),
    )


def _mini(config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        hidden_size=1024,
        num_layers=8,
        vocab_size=32768,
        num_heads=8,
        intermediate_size=4096,
        num_experts=64,
        experts_per_token=8,
        max_positions=131072,
        bos_token_id=32760,
        eos_token_ids=(32762, 32761),
        pad_token_id=32767,
        linear_attention=replace(config.linear_attention, num_heads=8),
        kda_layers=_others(_mla_every(4, 8), 8),
        mla_layers=_mla_every(4, 8),
    )


PRESETS: Mapping[str, ModelConfig] = {
    "kimi-k3": _K3,
    "kimi-linear-48b-a3b": _LINEAR_48B,
    "tiny-k3": replace(
        _tiny(_K3, 9),
        intermediate_size=768,
        num_experts=16,
        experts_per_token=4,
        routed_hidden_size=128,
        q_lora_rank=128,
        attn_res_block_size=4,
    ),
    "tiny-kimi-linear": replace(_tiny(_LINEAR_48B, 5), intermediate_size=512, num_experts=8, experts_per_token=2),
    "k3-mini": replace(
        _mini(_K3),
        num_shared_experts=2,
        moe_intermediate_size=512,
        routed_hidden_size=512,
        q_lora_rank=512,
        attn_res_block_size=4,
    ),
    "kimi-linear-mini": replace(_mini(_LINEAR_48B), num_shared_experts=1, moe_intermediate_size=256),
}


def preset(name: str) -> ModelConfig:
    """The named model; ConfigError listing the names otherwise."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; supported: {', '.join(PRESETS)}")
    return PRESETS[name]


def resolve_config(source: str | Path) -> ModelConfig:
    """Config of a preset name, of a model directory or of a config.json.

    A preset name wins over a path of the same spelling; write ./NAME for the path.
    """
    name = os.fspath(source)
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).exists():
        presets = ", ".join(PRESETS)
        raise ConfigError(
            f"{name}: no such file or directory and no preset; supported: a model directory, a config.json, "
            f"or one of {presets}"
        )
    return ModelConfig.from_file(name)
