from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from stepkernel.model import ModelConfig, preset
from stepkernel.model.synthesize import synthesize

ASSETS = Path(__file__).parents[2] / "assets"


def micro_config(family: str) -> ModelConfig:
    """A model of one KDA and one MLA layer that fits in a few kilobytes; MXFP4 experts for kimi_k3."""
    base = preset("tiny-k3" if family == "kimi_k3" else "tiny-kimi-linear")
    return replace(
        base,
        hidden_size=64,
        num_layers=2,
        vocab_size=64,
        intermediate_size=64,
        num_experts=4,
        experts_per_token=2,
        moe_intermediate_size=64,
        routed_hidden_size=32 if family == "kimi_k3" else None,
        q_lora_rank=32 if family == "kimi_k3" else None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        attn_res_block_size=1 if family == "kimi_k3" else None,
        bos_token_id=60,
        eos_token_ids=(62, 61),
        pad_token_id=63,
        linear_attention=replace(base.linear_attention, head_dim=16),
        kda_layers=(0,),
        mla_layers=(1,),
    )


@pytest.fixture
def assets() -> Path:
    return ASSETS


@pytest.fixture(scope="session")
def micro_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(micro_config("kimi_k3"), tmp_path_factory.mktemp("micro") / "k3", seed=1)


@pytest.fixture(scope="session")
def micro_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files and an index."""
    target = tmp_path_factory.mktemp("micro") / "linear"
    return synthesize(micro_config("kimi_linear"), target, seed=1, file_bytes=120_000)


@pytest.fixture
def k3_copy(micro_k3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(micro_k3, tmp_path / "k3"))


@pytest.fixture
def linear_copy(micro_linear: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(micro_linear, tmp_path / "linear"))


@pytest.fixture
def edit() -> Callable[[Path, Any], None]:
    """edit(directory, change): rewrites model.safetensors as `change(tensors)` leaves or returns them."""

    def rewrite(directory: Path, change: Any) -> None:
        path = directory / "model.safetensors"
        with safe_open(path, framework="numpy") as handle:
            tensors = {name: handle.get_tensor(name).copy() for name in handle.keys()}  # noqa: SIM118
        replaced = change(tensors)
        save_file(tensors if replaced is None else replaced, path, metadata={"format": "pt"})

    return rewrite
