from __future__ import annotations

import pytest

from stepkernel.model import preset
from stepkernel.model.tensors import Split, expert_of, tensor_table

MOE = "model.layers.1.block_sparse_moe."
KIMI_K3 = {
    "model.embed_tokens.weight": ((163840, 7168), Split.ROWS),
    "lm_head.weight": ((163840, 7168), Split.ROWS),
    "model.norm.weight": ((7168,), Split.REPLICATED),
    "model.output_attn_res_proj.weight": ((1, 7168), Split.REPLICATED),
    "model.layers.92.mlp_res_norm.weight": ((7168,), Split.REPLICATED),
    "model.layers.0.self_attention_res_proj.weight": ((1, 7168), Split.REPLICATED),
    "model.layers.0.self_attn.g_proj.weight": ((12288, 7168), Split.ROWS),
    "model.layers.0.self_attn.k_conv1d.weight": ((12288, 1, 4), Split.ROWS),
    "model.layers.0.self_attn.f_a_proj.weight": ((128, 7168), Split.REPLICATED),
    "model.layers.0.self_attn.f_b_proj.weight": ((12288, 128), Split.ROWS),
    "model.layers.0.self_attn.b_proj.weight": ((96, 7168), Split.ROWS),
    "model.layers.0.self_attn.A_log": ((96,), Split.ROWS),
    "model.layers.0.self_attn.dt_bias": ((12288,), Split.ROWS),
    "model.layers.0.self_attn.o_norm.weight": ((128,), Split.REPLICATED),
    "model.layers.0.self_attn.o_proj.weight": ((7168, 12288), Split.COLUMNS),
    "model.layers.0.mlp.down_proj.weight": ((7168, 33792), Split.COLUMNS),
    "model.layers.92.self_attn.q_a_proj.weight": ((1536, 7168), Split.REPLICATED),
    "model.layers.92.self_attn.q_a_layernorm.weight": ((1536,), Split.REPLICATED),
    "model.layers.92.self_attn.q_b_proj.weight": ((18432, 1536), Split.ROWS),
    "model.layers.92.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), Split.REPLICATED),
    "model.layers.92.self_attn.kv_b_proj.weight": ((24576, 512), Split.ROWS),
    "model.layers.92.self_attn.g_proj.weight": ((12288, 7168), Split.ROWS),
    f"{MOE}gate.weight": ((896, 7168), Split.ROWS),
    f"{MOE}gate.e_score_correction_bias": ((896,), Split.REPLICATED),
    f"{MOE}routed_expert_down_proj.weight": ((3584, 7168), Split.ROWS),
    f"{MOE}routed_expert_norm.weight": ((3584,), Split.REPLICATED),
    f"{MOE}routed_expert_up_proj.weight": ((7168, 3584), Split.ROWS),
    f"{MOE}shared_experts.up_proj.weight": ((6144, 7168), Split.ROWS),
    f"{MOE}shared_experts.down_proj.weight": ((7168, 6144), Split.COLUMNS),
    f"{MOE}experts.895.w1.weight_packed": ((3072, 1792), Split.ROWS),
    f"{MOE}experts.0.w3.weight_scale": ((3072, 112), Split.ROWS),
    f"{MOE}experts.0.w2.weight_packed": ((3584, 1536), Split.COLUMNS),
    f"{MOE}experts.0.w2.weight_scale": ((3584, 96), Split.COLUMNS),
}
KIMI_LINEAR = {
    "model.layers.0.self_attn.g_a_proj.weight": ((128, 2304), Split.REPLICATED),
    "model.layers.0.self_attn.g_b_proj.weight": ((4096, 128), Split.ROWS),
    "model.layers.26.self_attn.q_proj.weight": ((6144, 2304), Split.ROWS),
    "model.layers.26.self_attn.kv_b_proj.weight": ((8192, 512), Split.ROWS),
    f"{MOE}experts.255.w1.weight": ((1024, 2304), Split.ROWS),
    f"{MOE}experts.0.w2.weight": ((2304, 1024), Split.COLUMNS),
}


@pytest.mark.parametrize(("name", "tensors"), [("kimi-k3", KIMI_K3), ("kimi-linear-48b-a3b", KIMI_LINEAR)])
def test_published_shapes(name: str, tensors: dict[str, tuple[tuple[int, ...], Split]]) -> None:
    table = tensor_table(preset(name))
    found = {tensor: table.find(tensor) for tensor in tensors}
    assert {key: spec and (spec.shape, spec.split) for key, spec in found.items()} == tensors


def test_absent_tensors() -> None:
    k3, linear = tensor_table(preset("kimi-k3")), tensor_table(preset("kimi-linear-48b-a3b"))
    for name in (
        f"{MOE}experts.896.w1.weight_packed",
        f"{MOE}experts.01.w1.weight_packed",
        f"{MOE}experts.-1.w1.weight_packed",
        f"{MOE}experts.0.w1.weight",
        f"{MOE}experts.0.w4.weight_packed",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight_packed",
        "model.layers.93.input_layernorm.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.3.self_attn.A_log",
        "",
    ):
        assert k3.find(name) is None
    assert linear.find("model.layers.3.self_attn.g_proj.weight") is None
    assert linear.find("model.output_attn_res_norm.weight") is None


def test_tensor_count_and_bytes_of_kimi_k3() -> None:
    table = tensor_table(preset("kimi-k3"))
    assert len(table) == pytest.approx(497_000, rel=2e-3)
    expert = [spec.num_elements for (prefix, _), spec in table.experts.items() if ".layers.1." in prefix]
    assert sum(expert) == 17_547_264


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_names_are_unique_and_found(name: str) -> None:
    table = tensor_table(preset(name))
    names = list(table.names())
    assert len(set(names)) == len(names) == len(table)
    assert all(table.find(tensor) is not None for tensor in names)


def test_expert_of() -> None:
    assert expert_of(f"{MOE}experts.12.w2.weight_scale") == (f"{MOE}experts.", 12)
    assert expert_of(f"{MOE}shared_experts.up_proj.weight") is None
