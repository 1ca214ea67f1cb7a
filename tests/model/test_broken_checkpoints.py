"""Each kind of broken checkpoint is refused in one line, before any weight is read (NaN: when it is read)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from stepkernel.model import Checkpoint, CheckpointError, ConfigError, Shard
from stepkernel.model.finite import first_bad_row

Tensors = dict[str, NDArray[Any]]
Edit = Callable[[Path, Any], None]
LAYER = "language_model.model.layers.1."
EXPERTS = f"{LAYER}block_sparse_moe.experts."


def refusal(directory: Path, kind: type[ValueError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(directory)
    text = str(caught.value)
    assert "\n" not in text
    assert str(directory) in text
    return text


CHANGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (
        lambda t: t.pop("language_model.model.norm.weight") is None,
        "tensor model.norm.weight is missing; found",
    ),
    "unknown": (
        lambda t: t.update({f"{LAYER}self_attn.indexer.wq.weight": np.zeros(1, np.float32)}),
        "layers.1.self_attn.indexer.wq.weight, not part of this kimi_k3 model",
    ),
    "layer too many": (
        lambda t: t.update({"language_model.model.layers.2.input_layernorm.weight": np.zeros(64, np.float32)}),
        "unexpected tensor language_model.model.layers.2.input_layernorm.weight",
    ),
    "shape": (
        lambda t: t.update({f"{LAYER}self_attn.o_proj.weight": np.zeros((64, 33), ml_dtypes.bfloat16)}),
        "tensor language_model.model.layers.1.self_attn.o_proj.weight has shape [64, 33], expected [64, 32]",
    ),
    "transposed": (
        lambda t: t.update({f"{LAYER}self_attn.o_proj.weight": np.zeros((32, 64), ml_dtypes.bfloat16)}),
        "has shape [32, 64], expected [64, 32]",
    ),
    "dtype": (
        lambda t: t.update({"language_model.lm_head.weight": np.zeros((64, 64), np.float16)}),
        "tensor language_model.lm_head.weight has dtype F16, expected BF16",
    ),
    "vector dtype": (
        lambda t: t.update({"language_model.model.norm.weight": np.zeros(64, np.float64)}),
        "tensor language_model.model.norm.weight has dtype F64, expected F32 or BF16",
    ),
    "short decay": (
        lambda t: t.update({"language_model.model.layers.0.self_attn.A_log": np.zeros(1, np.float32)}),
        "A_log has shape [1], expected at least 2 values",
    ),
    "too few experts": (
        lambda t: {name: value for name, value in t.items() if ".experts.3." not in name},
        "model.layers.1.block_sparse_moe holds 3 experts, numbered 0 to 2, expected 4 from 0 (num_experts in",
    ),
    "too many experts": (
        lambda t: t.update({f"{EXPERTS}{e}.w1.weight_packed": np.zeros((64, 16), np.uint8) for e in (4, 5)}),
        "model.layers.1.block_sparse_moe holds 6 experts, numbered 0 to 5, expected 4 from 0",
    ),
    "experts from one": (
        lambda t: {name.replace(".experts.0.", ".experts.4."): value for name, value in t.items()},
        "model.layers.1.block_sparse_moe holds 4 experts, numbered 1 to 4, expected 4 from 0",
    ),
    "half an expert": (
        lambda t: t.pop(f"{EXPERTS}2.w3.weight_scale") is None,
        "tensor model.layers.1.block_sparse_moe.experts.2.w3.weight_scale is missing",
    ),
    "packed width": (
        lambda t: t.update({f"{EXPERTS}0.w2.weight_packed": np.zeros((32, 64), np.uint8)}),
        "experts.0.w2.weight_packed has shape [32, 64], expected [32, 32]",
    ),
    "packed dtype": (
        lambda t: t.update({f"{EXPERTS}0.w2.weight_scale": np.zeros((32, 2), np.float32)}),
        "experts.0.w2.weight_scale has dtype F32, expected U8",
    ),
    "plain experts": (
        lambda t: t.update({f"{EXPERTS}0.w2.weight": np.zeros((32, 64), ml_dtypes.bfloat16)}),
        "experts.0.w2.weight, but config.json declares mxfp4 experts",
    ),
    "both prefixes": (
        lambda t: t.update({"model.norm.weight": np.zeros(64, np.float32)}),
        "model.norm.weight is also in model.safetensors as",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_differ(name: str, edit: Edit, k3_copy: Path) -> None:
    change, message = CHANGES[name]

    def apply(tensors: Tensors) -> Tensors | None:
        result = change(tensors)
        return result if isinstance(result, dict) else None

    edit(k3_copy, apply)
    assert message in refusal(k3_copy)


def test_files_that_are_missing(linear_copy: Path, k3_copy: Path, tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    (linear_copy / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: cannot be read (No such file" in refusal(linear_copy)
    (linear_copy / "model.safetensors.index.json").unlink()
    assert "found neither model.safetensors.index.json nor model.safetensors" in refusal(linear_copy)
    (linear_copy / "config.json").unlink()
    assert "config.json: cannot be read" in refusal(linear_copy, ConfigError)


def test_unknown_quantisation(k3_copy: Path) -> None:
    text = (k3_copy / "config.json").read_text().replace("mxfp4-pack-quantized", "nvfp4-pack-quantized")
    (k3_copy / "config.json").write_text(text)
    message = refusal(k3_copy, ConfigError)
    assert 'quantization_config.format found "nvfp4-pack-quantized"; supported: "mxfp4-pack-quantized"' in message


def test_quantised_config_with_plain_experts(linear_copy: Path, k3_copy: Path) -> None:
    raw = json.loads((linear_copy / "config.json").read_text())
    raw["quantization_config"] = json.loads((k3_copy / "config.json").read_text())["text_config"]["quantization_config"]
    (linear_copy / "config.json").write_text(json.dumps(raw))
    assert "experts.0.w1.weight, but config.json declares mxfp4 experts" in refusal(linear_copy)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 2000, -1])
def test_truncated_file(keep: int, k3_copy: Path) -> None:
    path = k3_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert refusal(k3_copy).startswith(f"{path}: ")


def test_truncation_names_both_sizes(k3_copy: Path) -> None:
    path = k3_copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    assert f"found {len(content) - 100} bytes" in refusal(k3_copy)
    path.write_bytes(content[:1000])
    assert "found 1000 bytes, but its header alone is said to take" in refusal(k3_copy)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_length(length: int, k3_copy: Path) -> None:
    path = k3_copy / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    assert refusal(k3_copy).startswith(f"{path}: ")


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


HEAD = "language_model.lm_head.weight"
HEADERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "overlap": lambda h: h[HEAD].update(data_offsets=[h[HEAD]["data_offsets"][0] - 8, h[HEAD]["data_offsets"][1] - 8]),
    "outside": lambda h: h[HEAD].update(data_offsets=[2**40, 2**40 + 8192]),
    "reversed": lambda h: h[HEAD].update(data_offsets=h[HEAD]["data_offsets"][::-1]),
    "negative": lambda h: h[HEAD].update(data_offsets=[-8192, 0]),
    "short": lambda h: h[HEAD].update(shape=[64, 63]),
    "overflow": lambda h: h[HEAD].update(shape=[2**63, 2**63]),
    "huge": lambda h: h[HEAD].update(shape=[2**64, 1]),
    "no shape": lambda h: h[HEAD].pop("shape"),
    "dtype": lambda h: h[HEAD].update(dtype="BF17"),
    "dtype size": lambda h: h[HEAD].update(dtype="U8"),
    "not an object": lambda h: h.update({HEAD: 7}),
    "gap": lambda h: h.pop(HEAD),
}


@pytest.mark.parametrize("name", HEADERS)
def test_inconsistent_header(name: str, k3_copy: Path) -> None:
    path = k3_copy / "model.safetensors"
    rewrite_header(path, HEADERS[name])
    assert refusal(k3_copy).startswith(f"{path}: found {path.stat().st_size} bytes that are no complete")


def test_a_tensor_that_is_named_twice(k3_copy: Path) -> None:
    """Equal entries too: the file is valid for the library, which keeps one of them."""
    path = k3_copy / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    text = json.dumps(header)[:-1] + f", {json.dumps(HEAD)}: {json.dumps(header[HEAD])}}}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[end:])
    assert refusal(k3_copy) == f"{path}: its header has {HEAD} twice; expected every name once"


def test_a_pipe_is_refused_and_not_waited_for(linear_copy: Path) -> None:
    shard = sorted(linear_copy.glob("*.safetensors"))[-1]
    for path, kind in ((shard, CheckpointError), (linear_copy / "config.json", ConfigError)):
        path.unlink()
        os.mkfifo(path)
        assert refusal(linear_copy, kind).startswith(f"{path}: not a regular file")


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no map": (lambda index: {"metadata": {}}, "weight_map is null, expected tensor names with their files"),
    "empty map": (lambda index: {"weight_map": {}}, "weight_map is {}"),
    "list": (lambda index: {"weight_map": ["a"]}, 'weight_map is ["a"]'),
    "number": (
        lambda index: index["weight_map"].update({"lm_head.weight": 3}),
        "maps tensor lm_head.weight to 3,",
    ),
    "escape": (
        lambda index: index["weight_map"].update({"lm_head.weight": "../secret.safetensors"}),
        'to "../secret.safetensors", expected a file in the same directory',
    ),
    "nul": (
        lambda index: index["weight_map"].update({"lm_head.weight": "a\0b"}),
        "expected a file in the same",
    ),
    "dots": (lambda index: index["weight_map"].update({"lm_head.weight": ".."}), "'..'"),
    "other file": (
        lambda index: index["weight_map"].update({"lm_head.weight": "model-00002-of-00002.safetensors"}),
        "maps tensor lm_head.weight to model-00002-of-00002.safetensors, which does not hold it",
    ),
    "unlisted": (
        lambda index: index["weight_map"].pop("lm_head.weight") is None,
        "holds tensor lm_head.weight, but model.safetensors.index.json does not list it",
    ),
    "invented": (
        lambda index: index["weight_map"].update({"a.b": "model-00001-of-00002.safetensors"}),
        "maps tensor a.b to model-00001-of-00002.safetensors, which does not hold it",
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_bad_index(name: str, linear_copy: Path) -> None:
    path = linear_copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change, message = INDEXES[name]
    replaced = change(index)
    path.write_text(json.dumps(replaced if isinstance(replaced, dict) else index))
    assert message.strip("'") in refusal(linear_copy)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": {"a": "b", "a": "c"}}'])
def test_index_that_is_no_json_object(content: str, linear_copy: Path) -> None:
    path = linear_copy / "model.safetensors.index.json"
    path.write_text(content)
    assert refusal(linear_copy).startswith(f"{path}: ")


def test_file_that_shrinks_after_opening(k3_copy: Path) -> None:
    weights = Checkpoint.open(k3_copy).weights()
    path = k3_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="when it was opened"):
        weights.matrix("lm_head.weight")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("language_model.lm_head.weight", (40, 3)),
        ("language_model.model.layers.0.self_attn.o_proj.weight", (63, 20)),
        ("language_model.model.layers.0.self_attn.k_conv1d.weight", (30, 0, 2)),
        ("language_model.model.layers.0.self_attn.A_log", (1,)),
        ("language_model.model.norm.weight", (5,)),
    ],
)
def test_non_finite_weights(value: float, name: str, where: tuple[int, ...], edit: Edit, k3_copy: Path) -> None:
    edit(k3_copy, lambda tensors: tensors[name].__setitem__(where, value))
    checkpoint = Checkpoint.open(k3_copy)
    canonical = name.removeprefix("language_model.")
    matrix = canonical.endswith(("proj.weight", "lm_head.weight"))

    def read(**options: bool) -> NDArray[Any]:
        weights = checkpoint.weights(Shard(1, 2), **options)
        return weights.matrix(canonical) if matrix else weights.vector(canonical)

    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {name} holds NaN or infinity in row"):
        read()
    assert not np.isfinite(read(check_finite=False).astype(np.float32)).all()


@pytest.mark.parametrize("scale", [253, 255])
def test_non_finite_scales(scale: int, edit: Edit, k3_copy: Path) -> None:
    edit(k3_copy, lambda tensors: tensors[f"{EXPERTS}1.w2.weight_scale"].__setitem__((7, 1), scale))
    checkpoint = Checkpoint.open(k3_copy)
    name = "model.layers.1.block_sparse_moe.experts.1.w2"
    assert checkpoint.weights(Shard(0, 2)).packed(name).shape == (32, 32)
    with pytest.raises(CheckpointError, match=r"experts\.1\.w2\.weight_scale holds NaN or infinity in row 7 of rank 1"):
        checkpoint.weights(Shard(1, 2)).packed(name)


def test_scan_finds_the_first_row_across_blocks() -> None:
    values = np.zeros((300, 1000), np.float32)
    assert first_bad_row(values) is None
    values[299, 999] = np.nan
    values[150, 0] = np.inf
    assert first_bad_row(values) == 150
    assert first_bad_row(values[:, 1:]) == 299
    assert first_bad_row(values.astype(ml_dtypes.bfloat16).view(np.uint16)[:, 500:]) == 299
    assert first_bad_row(np.zeros((0, 3), np.float32)) is None
    wide = np.zeros((2, 1 << 17), np.uint16)
    wide[1, -1] = 0x7F80
    assert first_bad_row(wide) == 1
