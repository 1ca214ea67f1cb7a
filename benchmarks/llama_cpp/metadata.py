"""What llama.cpp wants to know about a model, as GGUF keys and values (its architectures kimi-linear and kimi-k3)."""

from stepkernel.model.config import ModelConfig

Value = int | float | bool | str | list[int]

ARCHITECTURES = {"kimi_linear": "kimi-linear", "kimi_k3": "kimi-k3"}
SIGMOID_ROUTER = 2


class ConversionError(ValueError):
    """The model uses something that llama.cpp's graph of this family does not compute."""


def metadata(config: ModelConfig) -> dict[str, Value]:
    """All keys but those of the file itself. Raises ConversionError."""
    _refuse(config)
    linear = config.linear_attention
    keys: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.head_count": config.num_heads,
        # 0 marks a KDA layer; an MLA layer caches one latent row, which all heads share
        "attention.head_count_kv": [0 if config.is_kda(layer) else 1 for layer in range(config.num_layers)],
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.latent_row,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": linear.conv_width,
        "kda.head_dim": linear.head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "leading_dense_block_count": config.first_dense_layers,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.renormalize,
        "expert_gating_func": SIGMOID_ROUTER,
    }
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.family == "kimi_k3":
        keys |= _k3(config)
    architecture = ARCHITECTURES[config.family]
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _k3(config: ModelConfig) -> dict[str, Value]:
    assert config.situ_beta is not None
    keys: dict[str, Value] = {
        "attn_res.block_size": config.attn_res_block_size or 0,
        "activation.situ_beta": config.situ_beta,
        "activation.situ_linear_beta": config.situ_linear_beta or 0.0,
    }
    if config.linear_attention.gate_lower_bound is not None:
        keys["kda.gate_lower_bound"] = config.linear_attention.gate_lower_bound
    if config.routed_hidden_size is not None:
        keys["expert_latent_length"] = config.routed_hidden_size
    return keys


def _refuse(config: ModelConfig) -> None:
    linear = config.linear_attention
    k3 = config.family == "kimi_k3"
    checks = {
        "MLA and KDA heads must be equal in number": linear.num_heads == config.num_heads,
        "one epsilon must serve all norms": config.latent_norm_eps == config.rms_norm_eps,
        "every layer after the dense ones must be a mixture of experts": config.moe_layer_freq == 1,
        "experts must be in one group": config.num_expert_group == 1,
        "logits must not be scaled": config.logit_scale == 1.0,
        "kimi-linear: router weights must be renormalised": k3 or config.renormalize,
        "kimi-linear: q_proj must be of full rank": k3 or config.q_lora_rank is None,
        "kimi-linear: unbounded KDA gate, no output gate, no latent experts": k3
        or (linear.gate_lower_bound is None and not config.output_gate and config.routed_hidden_size is None),
        "kimi-k3: SiTU and a full-rank KDA gate": not k3
        or (config.activation == "situ" and config.situ_beta is not None and linear.full_rank_gate),
    }
    for requirement, holds in checks.items():
        if not holds:
            raise ConversionError(f"llama.cpp cannot run this model: {requirement}")
