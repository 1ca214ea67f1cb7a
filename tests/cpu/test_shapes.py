"""Models of odd shapes, so that every tail of a tile, group and share is reached, stage by stage against the
reference."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkernel.cpu.weights import pack_weights
from stepkernel.model.config import ModelConfig
from stepkernel.model.presets import preset
from stepkernel.program.builder import build_program
from support.comparing import Case, compare, worst
from support.random_weights import RandomWeights

FLOAT32 = 2e-5  # as in test_stages; these shapes have fewer values to average over
MXFP4 = 2e-4
TINY = 3e-6


def shaped(base: str, **changes: Any) -> ModelConfig:
    """Two KDA layers, one MLA layer, the first of them dense; `head_dim` and `kda_heads` are those of KDA."""
    config = preset(base)
    linear = replace(
        config.linear_attention,
        num_heads=changes.pop("kda_heads", 2),
        head_dim=changes.pop("head_dim", 32),
    )
    config = replace(config, num_layers=3, kda_layers=(0, 1), mla_layers=(2,), linear_attention=linear)
    config = replace(config, bos_token_id=0, eos_token_ids=(1,), pad_token_id=2, **changes)
    if config.num_shared_experts:  # files always have some
        assert ModelConfig.from_dict(config.to_hf_dict()) == config
    return config


def check(config: ModelConfig, *cases: Case) -> None:
    weights = RandomWeights(config)
    packed = pack_weights(build_program(config), weights)
    for case in cases:
        found = compare(weights, packed, case, "float32")
        for d in found:
            if d.area in ("expert_ids", "tokens"):
                assert d.relative_l2 == 0
        values = [d for d in found if d.area not in ("expert_ids", "tokens")]
        experts = [d for d in values if config.expert_format == "mxfp4" and d.stage.endswith((".up", ".down"))]
        assert not any(d.exceeds(MXFP4) for d in experts), worst(experts)
        # A row of one or two values may cancel to nearly zero, so tiny absolute differences are fine too.
        others = [d for d in values if d not in experts and not (d.max_abs < TINY and d.stray == 0)]
        assert not any(d.exceeds(FLOAT32) for d in others), worst(others)


SHAPES = [
    shaped(
        "tiny-k3", hidden_size=72, vocab_size=1001, num_heads=1, kda_heads=3, head_dim=24, intermediate_size=520,
        num_experts=3, experts_per_token=3, routed_hidden_size=32, moe_intermediate_size=32, q_lora_rank=8,
        kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=40, attn_res_block_size=1,
        num_shared_experts=2,
    ),
    shaped(
        "tiny-kimi-linear", hidden_size=88, vocab_size=7, num_heads=3, kda_heads=1, head_dim=104, intermediate_size=8,
        num_experts=40, experts_per_token=1, moe_intermediate_size=24, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=24, v_head_dim=8, num_shared_experts=2,
    ),
    shaped(
        "tiny-kimi-linear", hidden_size=1544, vocab_size=65, num_heads=2, kda_heads=2, head_dim=16,
        intermediate_size=1160, num_experts=5, experts_per_token=4, moe_intermediate_size=40, kv_lora_rank=136,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24, num_shared_experts=0, q_lora_rank=24,
        output_gate=True,
    ),
    shaped(
        "tiny-k3", hidden_size=160, vocab_size=33, num_heads=5, kda_heads=9, head_dim=8, intermediate_size=24,
        num_experts=17, experts_per_token=5, routed_hidden_size=None, latent_moe_use_norm=False,
        moe_intermediate_size=96, q_lora_rank=None, kv_lora_rank=32, v_head_dim=16, attn_res_block_size=2,
        num_shared_experts=1, situ_linear_beta=None, output_gate=False,
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: f"h{c.hidden_size}-e{c.num_experts}-v{c.vocab_size}")
def test_odd_shapes(config: ModelConfig) -> None:
    rows = tuple(11 * i % 23 for i in range(13))
    check(config, Case((5,)), Case(rows[:3], padding=1, threads=2), Case(rows, threads=3), Case((0, 7), queries=5))


def eights(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(-(-low // 8), high // 8).map(lambda n: 8 * n)


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig:
    k3 = draw(st.booleans())
    experts = draw(st.integers(1, 40))
    latent = k3 and draw(st.booleans())
    step = 32 if k3 else 8

    def wide(low: int, high: int) -> int:
        return -(-draw(eights(low, high)) // step) * step

    return shaped(
        "tiny-k3" if k3 else "tiny-kimi-linear",
        hidden_size=wide(8, 300),
        vocab_size=draw(st.integers(3, 90)),
        num_heads=draw(st.integers(1, 3)),
        kda_heads=draw(st.integers(1, 3)),
        head_dim=draw(eights(16, 128)),
        intermediate_size=draw(eights(8, 200)),
        num_experts=experts,
        experts_per_token=draw(st.integers(1, min(experts, 9))),
        num_shared_experts=draw(st.integers(0, 2)),
        moe_intermediate_size=wide(8, 100),
        routed_hidden_size=wide(32, 128) if latent else None,
        latent_moe_use_norm=latent and draw(st.booleans()),
        renormalize=draw(st.booleans()),
        q_lora_rank=draw(st.one_of(st.none(), eights(8, 64))),
        kv_lora_rank=draw(eights(32, 160)),
        qk_nope_head_dim=draw(eights(8, 48)),
        qk_rope_head_dim=draw(eights(8, 64)),
        v_head_dim=draw(eights(8, 48)),
        output_gate=draw(st.booleans()),
        attn_res_block_size=draw(st.one_of(st.none(), st.integers(1, 3))),
    )


@settings(
    max_examples=12, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
@given(shapes(), st.integers(1, 16), st.integers(1, 3), st.integers(1, 4))
def test_random_shapes(config: ModelConfig, requests: int, queries: int, threads: int) -> None:
    check(config, Case(tuple(11 * i % 23 for i in range(requests)), queries, padding=1, threads=threads))
