"""Writes a random DSpark draft for a target config, reproducible from a seed: for timing, what it drafts is noise."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from stepkernel.model.checkpoint import SINGLE_FILE, CheckpointError
from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_checkpoint import DraftCheckpoint, draft_tensors
from stepkernel.model.draft_config import CONFIG_FILE, MAX_DRAFTS, DraftConfig
from stepkernel.model.formats import BFLOAT16
from stepkernel.model.synthetic_values import generator
from stepkernel.model.tensors import TensorSpec

TAPPED = 3


def draft_config(target: ModelConfig, layers: int = 1, markov_rank: int = 64) -> dict[str, Any]:
    """config.json content of a draft with the target's attention widths and an MLP of twice the hidden size."""
    deepest = target.num_layers - 1
    tapped = sorted({deepest * (i + 1) // TAPPED for i in range(TAPPED)})
    return {
        "model_type": "k3_dspark",
        "architectures": ["K3DSparkModel"],
        "hidden_size": target.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_heads,
        "intermediate_size": 2 * target.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "q_lora_rank": target.q_lora_rank or target.kv_lora_rank,
        "kv_lora_rank": target.kv_lora_rank,
        "qk_nope_head_dim": target.qk_nope_head_dim,
        "qk_rope_head_dim": target.qk_rope_head_dim,
        "v_head_dim": target.v_head_dim,
        "rope_theta": 50000.0,
        "rope_interleave": True,
        "max_position_embeddings": target.max_positions,
        "target_layer_ids": tapped,
        "num_target_layers": len(tapped),
        "target_hidden_size": target.hidden_size,
        "mask_token_id": target.pad_token_id,
        "num_speculative_tokens": MAX_DRAFTS,
        "markov_rank": markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "aux_hidden_stream": "prefix_only",
        "sample_from_anchor": True,
        "dtype": "bfloat16",
    }


def synthesize_draft(
    target: ModelConfig, directory: str | Path, seed: int = 0, layers: int = 1, markov_rank: int = 64
) -> Path:
    """Writes config and weights to a new directory, which appears only when it is complete, and returns it.

    Raises CheckpointError if the target is in use, ConfigError for sizes a draft cannot have.
    """
    place = Path(directory)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{place}: already exists and is not an empty directory; expected a new one")
    raw = draft_config(target, layers, markov_rank)
    config = DraftConfig.from_dict(raw, "draft to synthesise")
    config.check_target(target)
    parent = place.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".partial", dir=parent))
    try:
        partial.chmod(0o755)
        (partial / CONFIG_FILE).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        table = draft_tensors(config).plain
        tensors = {name.removeprefix("model."): _values(name, spec, seed) for name, spec in table.items()}
        save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
        (partial / SINGLE_FILE).chmod(0o644)
        DraftCheckpoint.open(partial)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return place


def _values(name: str, spec: TensorSpec, seed: int) -> NDArray[Any]:
    """BF16: matrices that keep the RMS of their inputs, norms around one."""
    noise = generator(seed, name).standard_normal(spec.shape, dtype=np.float32)
    values = noise / np.float32(np.sqrt(spec.shape[-1])) if spec.kind == "matrix" else 1 + np.float32(0.1) * noise
    return np.asarray(values.astype(BFLOAT16))
