"""Every refusal: one line with the file, the field, what was found and what is supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepkernel.model import ConfigError, ModelConfig, preset

ABSENT = object()
WEIGHTS = "quantization_config.config_groups.group_0.weights"

# field of text_config, value (or ABSENT), what the error must say
REFUSED: list[tuple[str, Any, str]] = [
    ("model_type", "llama", "text_config.model_type found"),
    ("hidden_size", ABSENT, "hidden_size is absent; supported: a whole number"),
    ("hidden_size", "256", 'hidden_size found "256"'),
    ("hidden_size", True, "hidden_size found true"),
    ("hidden_size", 0, "hidden_size found 0"),
    ("hidden_size", -8, "hidden_size found -8"),
    ("hidden_size", 250, "hidden_size found 250; supported: multiples of 8"),
    ("hidden_size", 2**40, "hidden_size found 1099511627776"),
    ("hidden_size", 256.0, "hidden_size found 256.0"),
    ("num_hidden_layers", 8, "layer 9 is outside 1..8"),
    ("num_hidden_layers", 10, "layer 10 is in neither"),
    ("num_hidden_layers", 2**31, "num_hidden_layers found"),
    ("num_attention_heads", 0, "num_attention_heads found 0"),
    ("num_key_value_heads", 1, "num_key_value_heads found 1; supported: 2 or absent"),
    ("intermediate_size", 4, "intermediate_size found 4; supported: multiples of 8"),
    ("hidden_act", "gelu", 'hidden_act found "gelu"; supported: "situ" or "silu"'),
    ("activation_situ_beta", ABSENT, "activation_situ_beta is absent"),
    ("activation_situ_beta", -4.0, "activation_situ_beta found -4.0; supported: a finite number above 0"),
    ("activation_situ_linear_beta", 0, "activation_situ_linear_beta found 0"),
    ("rms_norm_eps", "tiny", 'rms_norm_eps found "tiny"; supported: a number'),
    ("rms_norm_eps", 0.0, "rms_norm_eps found 0.0"),
    ("num_experts", 10**6, "num_experts found 1000000"),
    ("num_experts_per_token", 17, "num_experts_per_token found 17; supported: a whole number from 1 to 16"),
    ("num_shared_experts", 0, "num_shared_experts found 0"),
    ("moe_intermediate_size", 8, "moe_intermediate_size found 8; supported: multiples of 32 with MXFP4"),
    ("routed_expert_hidden_size", 136, "routed_expert_hidden_size found 136; supported: multiples of 32"),
    ("routed_expert_hidden_size", None, "latent_moe_use_norm found true"),
    ("latent_moe_use_norm", 1, "latent_moe_use_norm found 1; supported: true or false"),
    ("moe_router_activation_func", "softmax", 'moe_router_activation_func found "softmax"'),
    ("moe_router_activation_func", ABSENT, "moe_router_activation_func is absent"),
    ("moe_renormalize", "yes", "moe_renormalize found"),
    ("routed_scaling_factor", 0, "routed_scaling_factor found 0"),
    ("routed_scaling_factor", 10**400, "routed_scaling_factor found 1000"),
    ("use_grouped_topk", 1, "use_grouped_topk found 1"),
    ("num_expert_group", 8, "num_expert_group found 8; supported: 1 or absent"),
    ("topk_group", 4, "topk_group found 4"),
    ("topk_method", "greedy", 'topk_method found "greedy"'),
    ("first_k_dense_replace", 10, "first_k_dense_replace found 10"),
    ("first_k_dense_replace", -1, "first_k_dense_replace found -1"),
    ("moe_layer_freq", 0, "moe_layer_freq found 0"),
    ("q_lora_rank", 0, "q_lora_rank found 0"),
    ("kv_lora_rank", None, "kv_lora_rank found null"),
    ("qk_nope_head_dim", 100, "qk_nope_head_dim found 100"),
    ("qk_rope_head_dim", 60, "qk_rope_head_dim found 60"),
    ("v_head_dim", 1, "v_head_dim found 1"),
    ("mla_use_nope", False, "mla_use_nope found false; supported: true"),
    ("mla_use_nope", ABSENT, "mla_use_nope is absent; supported: true"),
    ("mla_use_output_gate", "no", "mla_use_output_gate found"),
    ("attn_res_block_size", 0, "attn_res_block_size found 0"),
    ("num_nextn_predict_layers", 1, "num_nextn_predict_layers found 1"),
    ("max_position_embeddings", ABSENT, "max_position_embeddings is absent"),
    ("tie_word_embeddings", 0, "tie_word_embeddings found 0"),
    ("bos_token_id", 2048, "bos_token_id found 2048; supported: a whole number from 0 to 2047"),
    ("eos_token_id", [], r"eos_token_id found []; supported: token ids from 0 to 2047"),
    ("eos_token_id", [2042, -1], "eos_token_id found [2042, -1]"),
    ("eos_token_id", [2042, "x"], "eos_token_id found"),
    ("eos_token_id", 2048, "eos_token_id found 2048"),
    ("pad_token_id", -1, "pad_token_id found -1"),
    ("dtype", "float16", 'dtype found "float16"; supported: "bfloat16" or absent'),
    ("torch_dtype", "float32", "torch_dtype found"),
    ("logit_scale", 0, "logit_scale found 0"),
    ("latent_norm_eps", -1e-6, "latent_norm_eps found -1e-06"),
    ("index_topk", 2048, "index_topk found 2048; supported: models without a sparse attention indexer"),
    ("use_indexer", True, "use_indexer found true"),
    ("linear_attn_config", None, "linear_attn_config found null; supported: a JSON object"),
    ("linear_attn_config.num_heads", 0, "text_config.linear_attn_config.num_heads found 0"),
    ("linear_attn_config.head_dim", 60, "head_dim found 60; supported: multiples of 8"),
    ("linear_attn_config.short_conv_kernel_size", 3, "short_conv_kernel_size found 3; supported: 4"),
    ("linear_attn_config.gate_lower_bound", -5.5, "gate_lower_bound found -5.5; supported: absent, or -5 <="),
    ("linear_attn_config.gate_lower_bound", 0, "gate_lower_bound found 0"),
    ("linear_attn_config.gate_lower_bound", "x", "gate_lower_bound found"),
    ("linear_attn_config.use_full_rank_gate", "x", "use_full_rank_gate found"),
    ("linear_attn_config.kda_layers", [1, 2, 3, 5, 6, 6], "layer 6 is listed twice"),
    ("linear_attn_config.kda_layers", [0, 1, 2, 3, 5, 6], "layer 0 is outside 1..9"),
    ("linear_attn_config.kda_layers", [1, 2, 3, 4, 6, 7], "layer 4 is listed twice"),
    ("linear_attn_config.kda_layers", [1, 2, 3, 5, 6], "5 and 3 layers, layer 7 is in neither"),
    ("linear_attn_config.kda_layers", [1, 2, 3, 5, 6, "7"], "kda_layers found"),
    ("linear_attn_config.full_attn_layers", 4, "full_attn_layers found 4; supported: a list"),
    ("quantization_config", "fp8", 'quantization_config found "fp8"'),
    (
        "quantization_config.quant_method",
        "gptq",
        'quant_method found "gptq"; supported: "compressed-tensors"',
    ),
    ("quantization_config.format", "nvfp4-pack-quantized", "quantization_config.format found"),
    ("quantization_config.quantization_status", "frozen", "quantization_status found"),
    ("quantization_config.kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme found"),
    ("quantization_config.config_groups", {}, "config_groups found {}; supported: exactly one group"),
    ("quantization_config.config_groups.group_0.targets", ["Conv"], "targets found"),
    ("quantization_config.config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations"),
    ("quantization_config.config_groups.group_0.format", "int4", "group_0.format found"),
    (f"{WEIGHTS}.num_bits", 8, "num_bits found 8; supported: 4"),
    (f"{WEIGHTS}.type", "int", "weights.type found"),
    (f"{WEIGHTS}.group_size", 16, "group_size found 16; supported: 32"),
    (f"{WEIGHTS}.strategy", "tensor", "strategy found"),
    (f"{WEIGHTS}.symmetric", False, "symmetric found false"),
    (f"{WEIGHTS}.dynamic", True, "dynamic found true"),
    (f"{WEIGHTS}.scale_dtype", "torch.float16", "scale_dtype found"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED, ids=[f"{f}={v!r:.20}" for f, v, _ in REFUSED])
def test_refused(field: str, value: object, message: str) -> None:
    raw = preset("tiny-k3").to_hf_dict()
    *parents, key = field.split(".")
    owner = raw["text_config"]
    for parent in parents:
        owner = owner[parent]
    if value is ABSENT:
        del owner[key]
        raw.pop(key, None)
    else:
        owner[key] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw, "some/config.json")
    text = str(caught.value)
    assert text.startswith("some/config.json: text_config.")
    assert message in text
    assert "supported: " in text
    assert "\n" not in text
    assert len(text) < 300


def test_every_required_key_is_missed() -> None:
    optional = {
        "model_type", "architectures", "activation_situ_linear_beta", "routed_expert_hidden_size",
        "latent_moe_use_norm", "routed_scaling_factor", "use_grouped_topk", "num_expert_group", "topk_group",
        "topk_method", "first_k_dense_replace", "moe_layer_freq", "q_lora_rank", "mla_use_output_gate",
        "attn_res_block_size", "num_nextn_predict_layers", "tie_word_embeddings", "dtype",
        "num_key_value_heads", "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id",
    }  # fmt: skip
    for key in preset("tiny-k3").to_hf_dict()["text_config"].keys() - optional:
        raw = preset("tiny-k3").to_hf_dict()
        del raw["text_config"][key]
        with pytest.raises(ConfigError, match=f"text_config.{key} is absent"):
            ModelConfig.from_dict(raw)


def test_unknown_family() -> None:
    with pytest.raises(ConfigError, match=r'c\.json: model_type found "qwen3"; supported: "kimi_k3" or "kimi_linear"'):
        ModelConfig.from_dict({"model_type": "qwen3"}, "c.json")
    with pytest.raises(ConfigError, match="model_type is absent"):
        ModelConfig.from_dict({}, "c.json")
    with pytest.raises(ConfigError, match="text_config is absent; supported: a JSON object"):
        ModelConfig.from_dict({"model_type": "kimi_k3"}, "c.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "top level is []; supported: a JSON object"),
        (b'{"rms_norm_eps": NaN}', "found NaN, which is not JSON"),
        (b'{"a": {"b": 1, "b": 2}}', 'key "b" occurs twice'),
    ],
    ids=["empty", "cut", "encoding", "deep", "list", "nan", "duplicate"],
)
def test_broken_files(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_file(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: cannot be read \(No such file or directory\)"):
        ModelConfig.from_file(tmp_path)


def test_duplicate_key_deep_in_a_real_config(tmp_path: Path) -> None:
    text = json.dumps(preset("tiny-k3").to_hf_dict())
    (tmp_path / "config.json").write_text(text.replace('"num_bits": 4', '"num_bits": 8, "num_bits": 4'))
    with pytest.raises(ConfigError, match='key "num_bits" occurs twice'):
        ModelConfig.from_file(tmp_path)
