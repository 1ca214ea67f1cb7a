"""DSpark drafts: what is read, and that everything else is refused in one line before any weight."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from stepkernel.model.checkpoint import Checkpoint, CheckpointError
from stepkernel.model.config import ConfigError
from stepkernel.model.draft_checkpoint import DraftCheckpoint, draft_tensors
from stepkernel.model.draft_config import DraftConfig
from stepkernel.model.presets import preset
from stepkernel.model.synthesize_draft import synthesize_draft

ASSETS = Path(__file__).parents[2] / "assets"
RAW = json.loads((ASSETS / "tiny-k3-dspark" / "config.json").read_text())


def test_the_trained_draft() -> None:
    config = DraftConfig.from_file(ASSETS / "tiny-k3-dspark")
    assert (config.num_layers, config.num_heads, config.markov_rank) == (2, 2, 64)
    assert (config.target_layers, config.aux_stream, config.mask_token_id) == ((1, 4, 7), "prefix_only", 2046)
    assert config.confidence_head
    backbone = config.backbone(preset("tiny-k3"))
    assert (backbone.kda_layers, backbone.mla_layers, backbone.moe_layers) == ((), (0, 1), ())
    assert backbone.activation == "silu"
    weights = DraftCheckpoint.open(ASSETS / "tiny-k3-dspark").weights(Checkpoint.open(ASSETS / "tiny-k3").weights())
    assert weights.matrix("model.layers.1.self_attn.q_b_proj.weight").shape == (384, 128)
    assert weights.matrix("lm_head.weight").shape == (2048, 256)
    assert weights.vector("model.confidence_head.proj.weight").shape == (320,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "kimi_k3"}, 'model_type found "kimi_k3"; supported: "k3_dspark"'),
        ({"mla_use_nope": True}, "mla_use_nope found true; supported: false or absent"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate found true"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm found true"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor found true"),
        ({"q_lora_rank": None}, "q_lora_rank found null"),
        ({"hidden_act": "situ"}, 'hidden_act found "situ"'),
        ({"draft_vocab_size": 1024}, "draft_vocab_size found 1024; supported: 2048"),
        ({"markov_head_type": "gated"}, "markov_head_type"),
        ({"sample_from_anchor": False}, "sample_from_anchor found false"),
        ({"rope_interleave": False}, "rope_interleave found false"),
        ({"target_layer_ids": [4, 1, 7]}, "ascending order"),
        ({"target_layer_ids": [1, 1, 7]}, "ascending order"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"num_target_layers": 2}, "num_target_layers found 2; supported: 3"),
        ({"aux_hidden_stream": "mlp"}, "supported: prefix_only, attn_res, attn_res_stream"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 32}}, 'rope_parameters.rope_type found "yarn"'),
        ({"mask_token_id": 2048}, "mask_token_id found 2048"),
        ({"kv_lora_rank": 100}, "multiples of 8"),
    ],
)
def test_refused_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(RAW | change, "draft/config.json")
    assert str(caught.value).startswith("draft/config.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_optional_fields() -> None:
    config = DraftConfig.from_dict(RAW | {"rope_theta": None, "aux_hidden_stream": "attn_res"})
    assert (config.rope_theta, config.aux_stream) == (50000.0, "attn_res_stream")
    given_inside = DraftConfig.from_dict(RAW | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}})
    assert given_inside.rope_theta == 10000


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        ({}, "k3-mini", "vocab_size found 2048, the target model has 32768"),
        ({"target_layer_ids": [1, 4, 9]}, "tiny-k3", "the target model has layers 0 to 8"),
        ({"target_hidden_size": 512}, "tiny-k3", "target_hidden_size found 512, the target model has 256"),
        ({"aux_hidden_stream": "attn_res"}, "tiny-kimi-linear", "plain residuals"),
    ],
)
def test_a_draft_of_another_target_is_refused(change: dict[str, Any], target: str, message: str) -> None:
    change = change | ({"target_layer_ids": [0, 1, 2]} if target == "tiny-kimi-linear" else {})
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_dict(RAW | change).check_target(preset(target))


@pytest.mark.parametrize("drafts", [0, 8, -1])
def test_refused_numbers_of_drafts(drafts: int) -> None:
    with pytest.raises(ConfigError, match="supported: 1 to 7"):
        DraftConfig.from_dict(RAW).check_drafts(drafts)
    with pytest.raises(ConfigError, match="supported: 1 to 4"):
        DraftConfig.from_dict(RAW | {"num_speculative_tokens": 4}).check_drafts(5)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A tiny draft on disk and its tensors."""
    raw = RAW | {"num_hidden_layers": 1, "vocab_size": 64, "draft_vocab_size": 64, "mask_token_id": 1}
    directory = tmp_path / "draft"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    table = draft_tensors(DraftConfig.from_dict(raw))
    tensors = {
        name.removeprefix("model."): np.zeros(spec.shape, ml_dtypes.bfloat16) for name, spec in table.plain.items()
    }
    return directory, tensors


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("markov_head.markov_w2.weight", None, "tensor model.markov_head.markov_w2.weight is missing; found 18 of 19"),
        ("layers.1.mlp.up_proj.weight", np.zeros((4, 4), np.float32), "unexpected tensor layers.1.mlp.up_proj.weight"),
        ("final_norm.weight", np.zeros(255, np.float32), "has shape [255], expected [256]"),
        ("context_proj.weight", np.zeros((256, 768), np.float16), "has dtype F16, expected BF16"),
    ],
)
def test_broken_checkpoints(small: Any, name: str, value: Any, message: str) -> None:
    directory, tensors = small
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        DraftCheckpoint.open(directory)
    assert message in str(caught.value)
    assert str(directory) in str(caught.value)


def test_names_with_prefix_and_an_unused_confidence_head(small: Any) -> None:
    directory, tensors = small
    raw = json.loads((directory / "config.json").read_text()) | {"enable_confidence_head": False}
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({f"model.{name}": value for name, value in tensors.items()}, directory / "model.safetensors")
    assert "model.confidence_head.proj.bias" not in DraftCheckpoint.open(directory).tensors


def test_nan_in_a_weight_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "draft"
    shutil.copytree(ASSETS / "tiny-k3-dspark", directory)
    checkpoint = DraftCheckpoint.open(directory)
    at = checkpoint.tensors["model.final_norm.weight"]
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(at.stored.offset)
        file.write(np.array([np.nan], ml_dtypes.bfloat16).tobytes())
    weights = checkpoint.weights(Checkpoint.open(ASSETS / "tiny-k3").weights())
    with pytest.raises(CheckpointError, match=r"final_norm\.weight holds NaN"):
        weights.vector("model.final_norm.weight")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(RAW)),
        st.none()
        | st.integers(-3, 9)
        | st.text(max_size=3)
        | st.lists(st.integers(-2, 9), max_size=3)
        | st.booleans()
        | st.floats(),
        max_size=4,
    )
)
def test_any_config_is_read_or_refused(change: dict[str, Any]) -> None:
    message = ""
    try:
        DraftConfig.from_dict(RAW | change)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


def test_truncated_file(tmp_path: Path) -> None:
    directory = tmp_path / "draft"
    shutil.copytree(ASSETS / "tiny-k3-dspark", directory)
    data = (directory / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        (directory / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            DraftCheckpoint.open(directory)
    with pytest.raises(CheckpointError, match="no such directory"):
        DraftCheckpoint.open(tmp_path / "nothing")


def test_synthetic_drafts(tmp_path: Path) -> None:
    """Valid for its target, the same bytes for the same seed, and nothing half written."""
    target = preset("tiny-k3")
    first = synthesize_draft(target, tmp_path / "a", seed=3, layers=2)
    second = synthesize_draft(target, tmp_path / "b", seed=3, layers=2)
    other = synthesize_draft(target, tmp_path / "c", seed=4, layers=2)
    data = [(path / "model.safetensors").read_bytes() for path in (first, second, other)]
    assert data[0] == data[1] != data[2]
    DraftCheckpoint.open(first).config.check_target(target)
    with pytest.raises(CheckpointError, match="already exists"):
        synthesize_draft(target, first)
    with pytest.raises(ConfigError, match="markov_rank found 5"):
        synthesize_draft(target, tmp_path / "d", markov_rank=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
