from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepkernel.model import PRESETS, ConfigError, ModelConfig, preset, resolve_config
from stepkernel.model.parameters import active_parameters, total_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_through_the_file_format(name: str) -> None:
    raw = json.loads(json.dumps(preset(name).to_hf_dict()))
    assert ModelConfig.from_dict(raw) == preset(name)


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_tiny_presets_equal_their_checkpoints(name: str, assets: Path) -> None:
    assert ModelConfig.from_file(assets / name) == preset(name)
    assert ModelConfig.from_file(assets / name / "config.json") == preset(name)
    assert resolve_config(str(assets / name)) == preset(name) == resolve_config(name)


def test_kimi_k3_layers() -> None:
    config = preset("kimi-k3")
    assert len(config.kda_layers) == 69
    assert config.mla_layers == (*range(3, 92, 4), 92)
    assert config.is_kda(90)
    assert not config.is_kda(91)
    assert config.dense_layers == (0,)
    assert config.num_moe_layers == 92
    assert config.num_blocks == 8


def test_kimi_linear_layers() -> None:
    config = preset("kimi-linear-48b-a3b")
    assert len(config.kda_layers) == 20
    assert [layer + 1 for layer in config.mla_layers] == [4, 8, 12, 16, 20, 24, 27]
    assert config.num_blocks == 0


def test_derived_widths() -> None:
    config = preset("kimi-k3")
    assert config.qk_head_dim == 192
    assert config.latent_row == 576
    assert config.kda_width == config.mla_width == 12288
    assert config.shared_intermediate_size == 6144
    assert config.expert_input_size == 3584
    assert config.softmax_scale == pytest.approx(192**-0.5)
    assert config.weight_prefix == "language_model."
    assert preset("kimi-linear-48b-a3b").expert_input_size == 2304


def test_moe_layer_frequency() -> None:
    raw = preset("tiny-k3").to_hf_dict()
    raw["text_config"] |= {"first_k_dense_replace": 2, "moe_layer_freq": 3}
    assert ModelConfig.from_dict(raw).moe_layers == (3, 6)


def test_published_parameter_counts() -> None:
    k3, linear = preset("kimi-k3"), preset("kimi-linear-48b-a3b")
    assert total_parameters(k3) == pytest.approx(2.7795e12, rel=2e-5)
    assert active_parameters(k3, embedding=False) == pytest.approx(104.19e9, rel=1e-4)
    assert total_parameters(linear) == pytest.approx(49.1e9, rel=1e-3)
    assert active_parameters(linear) == pytest.approx(3.48e9, rel=2e-3)
    assert active_parameters(linear, embedding=False) == pytest.approx(3.11e9, rel=2e-3)
    assert total_parameters(preset("tiny-k3")) == pytest.approx(12.66e6, rel=1e-3)


def test_defaults_of_absent_keys() -> None:
    raw = preset("tiny-kimi-linear").to_hf_dict()
    for key in ("topk_method", "mla_use_output_gate", "tie_word_embeddings", "pad_token_id", "dtype"):
        del raw[key]
    raw["model_max_length"] = raw.pop("max_position_embeddings")
    config = ModelConfig.from_dict(raw)
    assert config.pad_token_id == config.eos_token_ids[0]
    assert config.latent_norm_eps == config.rms_norm_eps
    assert config.max_positions == 4096
    assert config.logit_scale == 1.0


def test_optional_values_are_kept() -> None:
    raw = preset("tiny-k3").to_hf_dict()
    raw["text_config"] |= {"latent_norm_eps": 1e-6, "logit_scale": 0.5, "tie_word_embeddings": True}
    config = ModelConfig.from_dict(raw)
    assert (config.latent_norm_eps, config.logit_scale, config.tie_word_embeddings) == (1e-6, 0.5, True)
    assert ModelConfig.from_dict(config.to_hf_dict()) == config


def test_quantisation_may_stand_at_the_top_level() -> None:
    raw = preset("tiny-k3").to_hf_dict()
    raw["quantization_config"] = raw["text_config"].pop("quantization_config")
    assert ModelConfig.from_dict(raw) == preset("tiny-k3")


def test_all_end_tokens_of_both_files_stop(tmp_path: Path) -> None:
    raw = preset("tiny-kimi-linear").to_hf_dict()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2041, 2042]}')
    assert ModelConfig.from_file(tmp_path).eos_token_ids == (2042, 2041)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2041}')
    assert ModelConfig.from_file(tmp_path).eos_token_ids == (2042, 2041)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelConfig.from_file(tmp_path).eos_token_ids == (2042,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2048}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id found 2048"):
        ModelConfig.from_file(tmp_path)


def test_end_tokens_as_a_list() -> None:
    raw = preset("tiny-k3").to_hf_dict()
    raw["text_config"]["eos_token_id"] = [2042, 2041]
    config = ModelConfig.from_dict(raw)
    assert config.eos_token_ids == (2042, 2041)
    assert ModelConfig.from_dict(config.to_hf_dict()) == config


def test_unknown_preset_and_path() -> None:
    with pytest.raises(ConfigError, match="no preset 'kimi'; supported: kimi-k3, "):
        preset("kimi")
    with pytest.raises(ConfigError, match=r"nowhere/at-all: no such file or directory and no preset"):
        resolve_config("nowhere/at-all")
