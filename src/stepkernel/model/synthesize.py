"""Writes a complete checkpoint of a config with random weights, reproducible byte for byte from a seed."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import save_file

from stepkernel.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, CheckpointError
from stepkernel.model.config import ModelConfig
from stepkernel.model.hf_config import CONFIG_FILE, GENERATION_FILE
from stepkernel.model.synthetic_tokenizer import special_tokens, synthetic_tokenizer
from stepkernel.model.synthetic_values import random_tensor, stored_dtype, stored_shape
from stepkernel.model.tensors import TensorSpec, TensorTable, tensor_table

Progress = Callable[[int, int], None]
FILE_BYTES = 256 << 20


def synthesize(
    config: ModelConfig,
    directory: str | Path,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Writes config, tokenizer and weights of a random model to a new directory and returns it.

    progress: called with (bytes written, bytes in total) after every tensor. file_bytes: largest size of a
    safetensors file, also the memory that writing takes. The directory appears only when it is complete.
    Raises CheckpointError if the target is in use or the disk too small, ConfigError for an invalid config.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: already exists and is not an empty directory; expected a new one")
    ModelConfig.from_dict(config.to_hf_dict(), "config to synthesise")
    table = tensor_table(config)
    total = _total_bytes(config, table)
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < total + (total >> 5):
        raise CheckpointError(f"{target}: needs {total / 1e9:.1f} GB, found {free / 1e9:.1f} GB free on the disk")
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=parent))
    try:
        partial.chmod(0o755)
        _write_texts(config, partial)
        _write_weights(config, table, partial, seed, total, progress, file_bytes)
        Checkpoint.open(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _nbytes(config: ModelConfig, name: str, spec: TensorSpec) -> int:
    return math.prod(stored_shape(config, name, spec)) * stored_dtype(config, name, spec).itemsize


def _total_bytes(config: ModelConfig, table: TensorTable) -> int:
    expert = sum(_nbytes(config, inner, spec) for (_, inner), spec in table.experts.items())
    plain = sum(_nbytes(config, name, spec) for name, spec in table.plain.items())
    return plain + expert * table.num_experts


def _files(config: ModelConfig, table: TensorTable, file_bytes: int) -> list[list[tuple[str, TensorSpec]]]:
    """Tensors by file, in table order, none above `file_bytes` unless a single tensor is."""
    files: list[list[tuple[str, TensorSpec]]] = []
    filled = file_bytes
    for name in table.names():
        spec = table.find(name)
        assert spec is not None
        nbytes = _nbytes(config, name, spec)
        if filled + nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append((name, spec))
        filled += nbytes
    return files


def _write_weights(
    config: ModelConfig,
    table: TensorTable,
    directory: Path,
    seed: int,
    total: int,
    progress: Progress | None,
    file_bytes: int,
) -> None:
    files = _files(config, table, file_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    for number, members in enumerate(files, start=1):
        single = len(files) == 1
        file_name = SINGLE_FILE if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, NDArray[Any]] = {}
        for name, spec in members:
            values = random_tensor(config, name, spec, seed)
            tensors[config.weight_prefix + name] = values
            weight_map[config.weight_prefix + name] = file_name
            done += values.nbytes
            if progress is not None:
                progress(done, total)
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        (directory / file_name).chmod(0o644)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / INDEX_FILE, index)


def _write_texts(config: ModelConfig, directory: Path) -> None:
    _write_json(directory / CONFIG_FILE, config.to_hf_dict())
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    _write_json(directory / GENERATION_FILE, {**ids, "eos_token_id": list(config.eos_token_ids)})
    names = special_tokens(config)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names[config.bos_token_id],
            "eos_token": names.get(config.eos_token_ids[0]),
            "pad_token": names.get(config.pad_token_id),
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
        },
    )
    synthetic_tokenizer(config).save(str(directory / "tokenizer.json"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
