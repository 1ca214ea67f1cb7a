from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from stepkernel.model import Checkpoint, CheckpointError, ConfigError, ModelConfig, Shard, Weights
from stepkernel.model.tensors import Split, TensorSpec, tensor_table

Edit = Callable[[Path, Any], None]
TINY = ["tiny-k3", "tiny-kimi-linear"]
FIRST = "model.layers.0."
EXPERT = "model.layers.1.block_sparse_moe.experts.3."


def read(weights: Weights, name: str, spec: TensorSpec) -> NDArray[Any]:
    if spec.kind == "matrix":
        return weights.matrix(name)
    if spec.kind == "vector":
        return weights.vector(name)
    base, _, part = name.rpartition(".weight_")
    matrix = weights.packed(base)
    return matrix.packed if part == "packed" else matrix.scale


def as_stored(directory: Path, name: str) -> tuple[bytes, str, list[int]]:
    """Raw bytes, dtype and shape by the format's own library."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as handle:
            for stored in handle.keys():  # noqa: SIM118
                if stored.removeprefix("language_model.") == name:
                    part = handle.get_slice(stored)
                    return handle.get_tensor(stored).tobytes(), part.get_dtype(), part.get_shape()
    raise AssertionError(name)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("size", [1, 2])
def test_slices_of_all_ranks_make_up_every_tensor(name: str, size: int, assets: Path) -> None:
    checkpoint = Checkpoint.open(assets / name)
    whole = checkpoint.weights()
    ranks = [checkpoint.weights(Shard(rank, size)) for rank in range(size)]
    table = tensor_table(checkpoint.config)
    for tensor in table.names():
        spec = table.find(tensor)
        assert spec is not None
        full = read(whole, tensor, spec)
        assert full.shape == tuple(axis for axis in spec.shape if axis != 1)
        parts = [read(rank, tensor, spec) for rank in ranks]
        if spec.split is Split.REPLICATED:
            for part in parts:
                np.testing.assert_array_equal(part, full)
        else:
            axis = 0 if spec.split is Split.ROWS else 1
            assert {part.shape[axis] for part in parts} == {full.shape[axis] // size}
            np.testing.assert_array_equal(np.concatenate(parts, axis=axis), full)


@pytest.mark.parametrize("name", TINY)
def test_values_equal_the_library_reader(name: str, assets: Path) -> None:
    weights = Checkpoint.open(assets / name).weights()
    table = tensor_table(weights.config)
    for tensor in [*list(table.plain)[::5], *list(table.names())[-40::7]]:
        spec = table.find(tensor)
        assert spec is not None
        values = read(weights, tensor, spec)
        raw, dtype, _ = as_stored(assets / name, tensor)
        types = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
        expected = np.frombuffer(raw, types[dtype])[: values.size]
        np.testing.assert_array_equal(values.ravel(), expected.astype(values.dtype))


def test_types_and_views(assets: Path) -> None:
    weights = Checkpoint.open(assets / "tiny-k3").weights(Shard(1, 2))
    matrix = weights.matrix(f"{FIRST}self_attn.o_proj.weight")
    assert (matrix.dtype, matrix.shape) == (ml_dtypes.bfloat16, (256, 128))
    assert not matrix.flags.owndata
    assert not matrix.flags.writeable
    vector = weights.vector(f"{FIRST}self_attn.q_conv1d.weight")
    assert (vector.dtype, vector.shape) == (np.float32, (128, 4))
    assert vector.flags.c_contiguous
    packed = weights.packed(f"{EXPERT}w2")
    assert (packed.shape, packed.packed.shape, packed.scale.shape) == ((128, 64), (128, 32), (128, 2))


def test_only_real_heads_of_a_padded_decay_are_used(assets: Path) -> None:
    raw, dtype, shape = as_stored(assets / "tiny-k3", f"{FIRST}self_attn.A_log")
    stored = np.frombuffer(raw, np.float32)
    assert (dtype, shape) == ("F32", [128])
    assert (stored[2:] == 9.0).all()
    checkpoint = Checkpoint.open(assets / "tiny-k3")
    np.testing.assert_array_equal(checkpoint.weights().vector(f"{FIRST}self_attn.A_log"), stored[:2])
    for rank in range(2):
        part = checkpoint.weights(Shard(rank, 2)).vector(f"{FIRST}self_attn.A_log")
        np.testing.assert_array_equal(part, stored[rank : rank + 1])


def test_padding_may_hold_anything(edit: Edit, k3_copy: Path) -> None:
    edit(
        k3_copy,
        lambda tensors: tensors[f"language_model.{FIRST}self_attn.A_log"].__setitem__(slice(2, None), np.nan),
    )
    assert np.isfinite(Checkpoint.open(k3_copy).weights().vector(f"{FIRST}self_attn.A_log")).all()


def test_four_dimensional_decay(assets: Path) -> None:
    raw, _, shape = as_stored(assets / "tiny-kimi-linear", f"{FIRST}self_attn.A_log")
    assert shape == [1, 1, 2, 1]
    weights = Checkpoint.open(assets / "tiny-kimi-linear").weights()
    np.testing.assert_array_equal(weights.vector(f"{FIRST}self_attn.A_log"), np.frombuffer(raw, np.float32))


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "language_model.model."])
def test_any_prefix(edit: Edit, prefix: str, k3_copy: Path) -> None:
    before = np.array(Checkpoint.open(k3_copy).weights().matrix("model.embed_tokens.weight"))

    def rename(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        outer = "language_model." if prefix.startswith("language_model.") else ""
        return {
            (outer + "lm_head.weight" if name.endswith("lm_head.weight") else prefix + name.split("model.")[-1]): value
            for name, value in tensors.items()
        }

    edit(k3_copy, rename)
    after = Checkpoint.open(k3_copy).weights().matrix("model.embed_tokens.weight")
    np.testing.assert_array_equal(before, after)


def test_vision_tensors_are_skipped(edit: Edit, k3_copy: Path) -> None:
    def add_vision(tensors: dict[str, NDArray[Any]]) -> None:
        tensors["vision_tower.encoder.blocks.0.weight"] = np.zeros((3, 3), np.float16)
        tensors["mm_projector.proj.0.bias"] = np.zeros(5, np.int64)

    edit(k3_copy, add_vision)
    checkpoint = Checkpoint.open(k3_copy)
    assert not any("vision" in name or "projector" in name for name in checkpoint.tensors)


def test_vectors_may_be_stored_in_either_type(edit: Edit, k3_copy: Path) -> None:
    names = [f"{FIRST}self_attn.{name}" for name in ("q_conv1d.weight", "A_log", "dt_bias", "o_norm.weight")]
    before = {name: Checkpoint.open(k3_copy).weights().vector(name) for name in names}

    def convert(tensors: dict[str, NDArray[Any]]) -> None:
        for name in names:
            tensors[f"language_model.{name}"] = tensors[f"language_model.{name}"].astype(ml_dtypes.bfloat16)

    edit(k3_copy, convert)
    for name in names:
        after = Checkpoint.open(k3_copy).weights().vector(name)
        np.testing.assert_array_equal(after, before[name].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_tied_head_reads_the_embedding(edit: Edit, k3_copy: Path) -> None:
    raw = json.loads((k3_copy / "config.json").read_text())
    raw["text_config"]["tie_word_embeddings"] = True
    (k3_copy / "config.json").write_text(json.dumps(raw))
    edit(k3_copy, lambda tensors: {k: v for k, v in tensors.items() if "lm_head" not in k})
    weights = Checkpoint.open(k3_copy).weights(Shard(1, 2))
    np.testing.assert_array_equal(weights.matrix("lm_head.weight"), weights.matrix("model.embed_tokens.weight"))


def test_unaligned_data_is_copied(k3_copy: Path) -> None:
    path = k3_copy / "model.safetensors"
    before = np.array(Checkpoint.open(k3_copy).weights().matrix("lm_head.weight"))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    path.write_bytes(padded)
    after = Checkpoint.open(k3_copy).weights().matrix("lm_head.weight")
    assert after.flags.aligned
    np.testing.assert_array_equal(before, after)


def test_wrong_kind_of_read(assets: Path) -> None:
    weights = Checkpoint.open(assets / "tiny-k3").weights()
    with pytest.raises(CheckpointError, match=r"no tensor .*w1.weight; it is MXFP4, read it as packed\('model"):
        weights.matrix(f"{EXPERT}w1.weight")
    with pytest.raises(CheckpointError, match="is a vector, asked for as a matrix"):
        weights.matrix("model.norm.weight")
    with pytest.raises(CheckpointError, match="is a matrix, asked for as a vector"):
        weights.vector("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"no tensor model\.nothing$"):
        weights.vector("model.nothing")
    plain = Checkpoint.open(assets / "tiny-kimi-linear").weights()
    assert plain.matrix(f"{EXPERT}w1.weight").shape == (128, 256)
    with pytest.raises(CheckpointError, match="is not MXFP4 in this model"):
        plain.packed(f"{EXPERT}w1")


def test_shard_that_does_not_divide(assets: Path) -> None:
    with pytest.raises(ConfigError, match="2 KDA heads do not divide by 4"):
        Checkpoint.open(assets / "tiny-k3").weights(Shard(0, 4))


def test_views_survive_release(assets: Path) -> None:
    weights = Checkpoint.open(assets / "tiny-k3").weights()
    view = weights.matrix("lm_head.weight")
    before = np.array(view)
    weights.release()
    np.testing.assert_array_equal(view, before)


def test_bytes_of_the_tensors(assets: Path) -> None:
    checkpoint = Checkpoint.open(assets / "tiny-kimi-linear")
    files = [load_header(path) for path in sorted((assets / "tiny-kimi-linear").glob("*.safetensors"))]
    assert checkpoint.nbytes == sum(files)
    assert checkpoint.config == ModelConfig.from_file(assets / "tiny-kimi-linear")


def load_header(path: Path) -> int:
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
