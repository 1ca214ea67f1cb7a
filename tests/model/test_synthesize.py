from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from stepkernel.model import Checkpoint, CheckpointError, ConfigError, ModelConfig, preset
from stepkernel.model.formats import mxfp4_decode
from stepkernel.model.synthesize import synthesize
from stepkernel.model.synthetic_values import random_tensor
from stepkernel.model.tensors import tensor_table

MOE = "model.layers.1.block_sparse_moe."


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def tensors(directory: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as handle:
            found |= {name: handle.get_tensor(name).tobytes() for name in handle.keys()}  # noqa: SIM118
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(preset("tiny-k3"), tmp_path_factory.mktemp("synthetic") / "tiny-k3", seed=3)


def test_same_seed_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert contents(synthesize(preset("tiny-k3"), tmp_path / "again", seed=3)) == contents(tiny)
    other = tensors(synthesize(preset("tiny-k3"), tmp_path / "other", seed=4))
    unchanged = [name for name, raw in tensors(tiny).items() if other[name] == raw]
    assert unchanged == []


def test_sharding_does_not_change_the_weights(tiny: Path, tmp_path: Path) -> None:
    sharded = synthesize(preset("tiny-k3"), tmp_path / "sharded", seed=3, file_bytes=3_000_000)
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 5
    assert all(path.stat().st_size < 3_200_000 for path in sharded.glob("*.safetensors"))
    assert tensors(sharded) == tensors(tiny)
    assert Checkpoint.open(sharded).config == Checkpoint.open(tiny).config


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_layout_equals_the_published_one(name: str, assets: Path, tmp_path: Path) -> None:
    """Names, dtypes and shapes as in the checkpoints that come with the project, padded A_log included."""

    def layout(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            at.stored_name: (at.stored.dtype, at.stored.shape) for at in Checkpoint.open(directory).tensors.values()
        }

    assert layout(synthesize(preset(name), tmp_path / name)) == layout(assets / name)


def test_all_weights_are_finite(tiny: Path) -> None:
    weights = Checkpoint.open(tiny).weights()
    for name in tensor_table(weights.config).plain:
        spec = tensor_table(weights.config).plain[name]
        (weights.matrix if spec.kind == "matrix" else weights.vector)(name)


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    target = synthesize(preset("tiny-kimi-linear"), tmp_path / "m", progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] == Checkpoint.open(target).nbytes
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == len(tensor_table(preset("tiny-kimi-linear")))


def test_target_in_use_is_refused(tiny: Path, tmp_path: Path) -> None:
    before = contents(tiny)
    with pytest.raises(CheckpointError, match="already exists and is not an empty directory"):
        synthesize(preset("tiny-k3"), tiny)
    assert contents(tiny) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="already exists"):
        synthesize(preset("tiny-k3"), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert Checkpoint.open(synthesize(preset("tiny-k3"), tmp_path / "empty")).config == preset("tiny-k3")


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(preset("tiny-k3"), tmp_path / "new" / "model", progress=interrupt)
    assert os.listdir(tmp_path / "new") == []


def test_a_model_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needs 15\d\d\.\d GB, found \d+\.\d GB free on the disk"):
        synthesize(preset("kimi-k3"), tmp_path / "k3")


def test_an_invalid_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_size found 12"):
        synthesize(replace(preset("tiny-k3"), hidden_size=12), tmp_path / "m")


@pytest.mark.parametrize("name", ["k3-mini", "kimi-linear-mini"])
def test_router_load_is_near_balanced(name: str) -> None:
    config = preset(name)
    table = tensor_table(config)

    def tensor(inner: str) -> NDArray[np.float32]:
        spec = table.find(MOE + inner)
        assert spec is not None
        return random_tensor(config, MOE + inner, spec, 0).astype(np.float32)

    tokens = np.random.default_rng(0).standard_normal((4096, config.hidden_size), dtype=np.float32)
    tokens /= np.sqrt(np.mean(tokens**2, axis=1, keepdims=True))
    keys = 1.0 / (1.0 + np.exp(-tokens @ tensor("gate.weight").T)) + tensor("gate.e_score_correction_bias")
    chosen = np.argsort(-keys, axis=1)[:, : config.experts_per_token]
    load = np.bincount(chosen.ravel(), minlength=config.num_experts)
    assert load.max() / load.mean() < 1.35
    assert load.min() / load.mean() > 0.65


def test_decay_is_neither_dead_nor_frozen(tiny: Path, tmp_path: Path) -> None:
    linear = synthesize(preset("tiny-kimi-linear"), tmp_path / "linear")
    for directory in (tiny, linear):
        weights = Checkpoint.open(directory).weights()
        attention = weights.config.linear_attention
        rate = np.exp(weights.vector("model.layers.0.self_attn.A_log"))[:, None]
        noise = np.random.default_rng(0).standard_normal((attention.num_heads, attention.head_dim)) * 0.5
        z = weights.vector("model.layers.0.self_attn.dt_bias").reshape(noise.shape) + noise
        bound = attention.gate_lower_bound
        alpha = np.exp(-rate * np.logaddexp(0, z) if bound is None else bound / (1 + np.exp(-rate * z)))
        assert 0.5 < np.median(alpha) < 0.99
        assert np.quantile(alpha, 0.01) > 0.01
        assert alpha.max() < 1.0


def test_matrices_keep_the_size_of_their_input(tiny: Path) -> None:
    weights = Checkpoint.open(tiny).weights()
    tokens = np.random.default_rng(1).standard_normal((256, 256), dtype=np.float32)

    def gain(matrix: NDArray[np.float32]) -> float:
        return float(np.std(tokens[:, : matrix.shape[1]] @ matrix.T))

    def plain(name: str) -> NDArray[np.float32]:
        return weights.matrix(name).astype(np.float32)

    assert np.std(plain("model.embed_tokens.weight")) == pytest.approx(1.0, rel=0.02)
    assert gain(plain("lm_head.weight")) == pytest.approx(2.0, rel=0.05)
    assert gain(plain("model.layers.0.self_attn.q_proj.weight")) == pytest.approx(1.0, rel=0.05)
    output = plain("model.layers.0.self_attn.o_proj.weight")
    assert gain(output) == pytest.approx(0.5, rel=0.05)
    assert np.abs(output.mean(axis=1)).max() < 1e-4
    for matrix in ("w1", "w2", "w3"):
        packed = weights.packed(f"{MOE}experts.0.{matrix}")
        assert len(np.unique(packed.scale)) == 3
        decoded = mxfp4_decode(packed.packed, packed.scale)
        assert len(np.unique(packed.packed & 15)) == 16
        assert gain(decoded) == pytest.approx(1.0, rel=0.1)
        assert abs(decoded.mean()) < 0.005


def test_tokenizer_decodes_every_id(tiny: Path) -> None:
    config = ModelConfig.from_file(tiny)
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    pieces = [tokenizer.id_to_token(token) for token in range(config.vocab_size)]
    assert None not in pieces
    assert len(set(pieces)) == config.vocab_size
    assert (pieces[2040], pieces[2042], pieces[2047]) == ("[BOS]", "[EOS]", "[PAD]")
    text = "Grüße, 你好\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("[BOS]a").ids[0] == 2040
    assert tokenizer.decode([2040, 2042]) == ""


def test_tokenizer_of_a_small_vocabulary(micro_k3: Path) -> None:
    tokenizer = Tokenizer.from_file(str(micro_k3 / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 64
    assert tokenizer.id_to_token(61) == "[EOS2]"
