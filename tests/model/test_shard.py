from __future__ import annotations

from dataclasses import replace

import pytest

from stepkernel.model import ConfigError, Shard, possible_sizes, preset, shard_sizes

# Published per-rank sizes of Kimi K3 for 1, 2, 4, 8 and 16 ranks, experts without padding.
KIMI_K3 = {
    "kda_heads": (96, 48, 24, 12, 6),
    "kda_width": (12288, 6144, 3072, 1536, 768),
    "mla_heads": (96, 48, 24, 12, 6),
    "mla_width": (12288, 6144, 3072, 1536, 768),
    "vocab": (163840, 81920, 40960, 20480, 10240),
    "dense_intermediate": (33792, 16896, 8448, 4224, 2112),
    "shared_intermediate": (6144, 3072, 1536, 768, 384),
    "expert_intermediate": (3072, 1536, 768, 384, 192),
    "router_rows": (896, 448, 224, 112, 56),
    "latent_down_rows": (3584, 1792, 896, 448, 224),
    "latent_up_rows": (7168, 3584, 1792, 896, 448),
}


@pytest.mark.parametrize("column", range(5))
def test_kimi_k3_table(column: int) -> None:
    sizes = shard_sizes(preset("kimi-k3"), 1 << column)
    assert {name: getattr(sizes, name) for name in KIMI_K3} == {
        name: values[column] for name, values in KIMI_K3.items()
    }


def test_fused_row_counts_of_kimi_k3() -> None:
    config = preset("kimi-k3")
    for size, rows in ((4, 12440), (8, 6284), (16, 3206)):
        sizes = shard_sizes(config, size)
        assert 4 * sizes.kda_width + config.linear_attention.head_dim + sizes.kda_heads == rows
    for size, rows in ((8, 3648), (16, 2880)):
        assert config.q_lora_rank is not None
        assert config.q_lora_rank + config.latent_row + shard_sizes(config, size).mla_width == rows


def test_no_latent_rows_without_latent_experts() -> None:
    sizes = shard_sizes(preset("kimi-linear-48b-a3b"), 8)
    assert (sizes.latent_down_rows, sizes.latent_up_rows) == (0, 0)
    assert (sizes.kda_heads, sizes.router_rows, sizes.expert_intermediate) == (4, 32, 128)


def test_parts_cover_the_width_in_order() -> None:
    parts = [Shard(rank, 4).part(12) for rank in range(4)]
    assert [list(range(12))[part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2), (0, -1)])
def test_bad_ranks(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="supported: 0 <= rank < size"):
        Shard(rank, size)


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"size 4: 2 KDA heads do not divide by 4; supported for this model: 1, 2$"):
        shard_sizes(preset("tiny-k3"), 4)
    with pytest.raises(ConfigError, match="size 0: is not a positive number"):
        shard_sizes(preset("tiny-k3"), 0)
    with pytest.raises(ConfigError, match="size 64: 96 KDA heads do not divide by 64"):
        shard_sizes(preset("kimi-k3"), 64)
    odd = replace(preset("tiny-k3"), num_experts=15)
    with pytest.raises(ConfigError, match=r"15 routed experts do not divide by 2; supported for this model: 1$"):
        shard_sizes(odd, 2)


def test_packed_groups_are_not_cut() -> None:
    narrow = replace(preset("tiny-k3"), moe_intermediate_size=32, num_shared_experts=4)
    with pytest.raises(ConfigError, match="16 routed expert columns per rank are no multiple of the MXFP4 group"):
        shard_sizes(narrow, 2)


def test_possible_sizes() -> None:
    assert possible_sizes(preset("kimi-k3")) == (1, 2, 4, 8, 16, 32)
    assert possible_sizes(preset("k3-mini")) == (1, 2, 4, 8)
