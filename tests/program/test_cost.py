"""The cost model against the published arithmetic of the two large models (spec 7)."""

from functools import cache

import pytest

from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.cost import Cost, Load, cost, expected_experts, floor_ms, step_cost
from stepkernel.program.program import Program
from stepkernel.program.stages import Attend, ExpertsDown, ExpertsUp, KdaCore, LatentInsert


@cache
def program(name: str, size: int = 1, requests: int = 1, queries: int = 1) -> Program:
    return build_program(preset(name), Shard(0, size), requests, queries)


def layer_cost(step: Program, layer: int, kinds: tuple[str, ...], load: Load) -> Cost:
    chosen = [s for s in step.stages if s.layer == layer and s.name.split(".")[1] in kinds]
    return sum((cost(s, load) for s in chosen), Cost())


@pytest.mark.parametrize(
    ("size", "requests", "total_gb", "gb300_ms", "h200_ms"),
    [
        (8, 1, 17.99, 2.25, 3.75),
        (8, 2, 21.27, 2.66, 4.43),
        (8, 4, 27.67, 3.46, 5.76),
        (8, 8, 39.82, 4.98, 8.30),
        (16, 1, 9.44, 1.18, 1.97),
        (16, 2, 11.08, 1.39, 2.31),
        (16, 4, 14.28, 1.79, 2.98),
        (16, 8, 20.35, 2.54, 4.24),
    ],
)
def test_kimi_k3_totals(size: int, requests: int, total_gb: float, gb300_ms: float, h200_ms: float) -> None:
    total = step_cost(program("kimi-k3", size, requests), Load(requests))
    assert total.bytes / 1e9 == pytest.approx(total_gb, rel=0.02)
    assert floor_ms(total.bytes, 8000) == pytest.approx(gb300_ms, rel=0.02)
    assert floor_ms(total.bytes, 4800) == pytest.approx(h200_ms, rel=0.02)


@pytest.mark.parametrize(("size", "kda_mb", "mla_mb", "moe_mb"), [(8, 112.64, 84.55, 47.49), (16, 57.35, 57.41, 23.87)])
def test_kimi_k3_layers(size: int, kda_mb: float, mla_mb: float, moe_mb: float) -> None:
    step, load = program("kimi-k3", size), Load(1)
    fixed = Cost()
    for stage in step.stages:
        if stage.layer == 1 and ".moe." in stage.name and not isinstance(stage, ExpertsUp | ExpertsDown):
            fixed += cost(stage, load)
    # The published figures count zero rows (10 of the input, 8 of the router at 16 ranks).
    assert layer_cost(step, 1, ("kda",), load).weight_bytes / 1e6 == pytest.approx(kda_mb, rel=3e-3)
    assert layer_cost(step, 3, ("mla",), load).weight_bytes / 1e6 == pytest.approx(mla_mb, rel=2e-3)
    assert fixed.weight_bytes / 1e6 == pytest.approx(moe_mb, rel=6e-3)


@pytest.mark.parametrize(("size", "expert_mb"), [(8, 2.1934), (16, 1.0967)])
def test_one_expert(size: int, expert_mb: float) -> None:
    experts = [s for s in program("kimi-k3", size).stages if isinstance(s, ExpertsUp | ExpertsDown) and s.layer == 1]
    one = sum((cost(s, Load(1), {1: 1.0}) for s in experts), Cost())
    assert one.weight_bytes / 1e6 == pytest.approx(expert_mb, rel=1e-4)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("requests", [1, 2, 4, 8])
def test_kda_state(size: int, requests: int) -> None:
    published = {8: 1.573e6 + 0.055e6, 16: 0.786e6 + 0.028e6}[size]
    step = program("kimi-k3", size, requests)
    total = step_cost(step, Load(requests))
    assert total.state_bytes == pytest.approx(69 * requests * published, rel=2e-3)


def test_verification_writes_one_state_per_query() -> None:
    core = next(s for s in program("kimi-k3", 8, 1, 8).stages if isinstance(s, KdaCore))
    recurrent = core.heads * 65536
    conv_column = 3 * core.heads * core.head_dim * 2
    assert cost(core, Load(1, 8)).state_bytes == 9 * recurrent + (3 + 10) * conv_column
    assert cost(core, Load(1, 1)).state_bytes == 2 * recurrent + 6 * conv_column


def test_flops_per_token() -> None:
    """208 GFLOP per token (spec 7.2), 0.76 of them in the recurrence, and 5.0 MFLOP per token of context."""
    step = program("kimi-k3")
    at = {context: step_cost(step, Load(1, context=context)).flops for context in (0, 8192)}
    assert at[0] == pytest.approx(208e9, rel=0.01)
    assert (at[8192] - at[0]) / 8192 == pytest.approx(5.0e6, rel=0.01)
    recurrence = sum(cost(s, Load(1)).flops for s in step.stages if isinstance(s, KdaCore))
    assert recurrence == pytest.approx(0.78e9, rel=0.03)


@pytest.mark.parametrize(("kv_bytes", "per_token"), [(1, 13824), (2, 27648)])
def test_latent_cache(kv_bytes: int, per_token: int) -> None:
    step = program("kimi-k3", 16, 4)
    read = step_cost(step, Load(4, context=1000, kv_bytes=kv_bytes)).cache_bytes
    assert read == 4 * 1001 * per_token  # 1000 rows read, one written
    attend = next(s for s in step.stages if isinstance(s, Attend))
    insert = next(s for s in step.stages if isinstance(s, LatentInsert))
    assert cost(attend, Load(4)).cache_bytes == 0
    assert cost(insert, Load(4)).cache_bytes == 4 * 1152


def test_kimi_linear() -> None:
    """6.2 GB of weights, 84 MB of recurrent state (spec 7.4)."""
    total = step_cost(program("kimi-linear-48b-a3b"), Load(1))
    assert total.weight_bytes / 1e9 == pytest.approx(6.2, rel=0.02)
    conv = 20 * 6 * 3 * 4096 * 2
    assert total.state_bytes - conv == pytest.approx(84e6, rel=0.01)
    assert floor_ms(total.bytes, 4800) == pytest.approx(1.29, rel=0.02)
    assert floor_ms(total.bytes, 8000) == pytest.approx(0.78, rel=0.02)


@pytest.mark.parametrize(
    ("experts", "top_k", "rows", "expected"),
    [
        *(
            (896, 16, n, e)
            for n, e in zip((1, 2, 4, 8, 16, 32, 64), (16.0, 31.7, 62.3, 120.3, 224.4, 392.6, 613.2), strict=True)
        ),
        *((256, 8, n, e) for n, e in zip((1, 2, 4, 8), (8, 15.75, 30.5, 57.4), strict=True)),
    ],
)
def test_expected_experts(experts: int, top_k: int, rows: int, expected: float) -> None:
    assert expected_experts(experts, top_k, rows) == pytest.approx(expected, abs=0.06)


def test_counted_experts_replace_expected_ones() -> None:
    step, load = program("tiny-k3", 1, 4), Load(4)
    layers = preset("tiny-k3").moe_layers
    one = step_cost(step, load, dict.fromkeys(layers, 1.0))
    two = step_cost(step, load, dict.fromkeys(layers, 2.0))
    expert = 3 * 128 * 128 * 4.25 / 8
    assert two.weight_bytes - one.weight_bytes == pytest.approx(len(layers) * expert)
    assert two.flops == one.flops  # every row still computes its own experts


def test_embedding_counts_rows_only() -> None:
    few, many = (step_cost(program("kimi-k3", 16, n), Load(n)).weight_bytes for n in (1, 2))
    assert cost(program("kimi-k3").stages[0], Load(3)).weight_bytes == 3 * 7168 * 2
    assert many > few


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Load(0)
    with pytest.raises(ValueError, match="prepared for up to 1 x 1"):
        step_cost(program("tiny-k3"), Load(2))
    with pytest.raises(ValueError, match="above 0"):
        floor_ms(1.0, 0.0)
