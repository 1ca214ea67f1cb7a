"""Tensor parallelism: which part of every width one rank owns."""

from __future__ import annotations

from dataclasses import dataclass

from stepkernel.model.config import ConfigError, ModelConfig
from stepkernel.model.quantization import GROUP_SIZE


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of a tensor-parallel group of `size` ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank {self.rank} of {self.size}; supported: 0 <= rank < size")

    def part(self, width: int) -> slice:
        """This rank's contiguous part of `width` items; the width must be a multiple of the size."""
        step = width // self.size
        return slice(self.rank * step, (self.rank + 1) * step)


@dataclass(frozen=True)
class ShardSizes:
    """Widths of one rank, equal on every rank, without any padding.

    kda_heads, mla_heads: attention heads. kda_width, mla_width: their output widths. vocab: rows of the
    embedding and of the head. dense_, shared_, expert_intermediate: inner widths of the three kinds of MLP
    (all routed experts are on every rank). router_rows, latent_down_rows, latent_up_rows: output rows of the
    router and of the latent projections, which the specialised step splits (the last two are 0 without
    latent experts).
    """

    kda_heads: int
    kda_width: int
    mla_heads: int
    mla_width: int
    vocab: int
    dense_intermediate: int
    shared_intermediate: int
    expert_intermediate: int
    router_rows: int
    latent_down_rows: int
    latent_up_rows: int


def shard_sizes(config: ModelConfig, size: int) -> ShardSizes:
    """Sizes of one of `size` ranks; ConfigError naming the first width that does not divide."""
    fault = _fault(config, size)
    if fault is not None:
        possible = ", ".join(map(str, possible_sizes(config)))
        raise ConfigError(f"tensor-parallel size {size}: {fault}; supported for this model: {possible}")
    latent = config.routed_hidden_size
    return ShardSizes(
        kda_heads=config.linear_attention.num_heads // size,
        kda_width=config.kda_width // size,
        mla_heads=config.num_heads // size,
        mla_width=config.mla_width // size,
        vocab=config.vocab_size // size,
        dense_intermediate=config.intermediate_size // size,
        shared_intermediate=config.shared_intermediate_size // size,
        expert_intermediate=config.moe_intermediate_size // size,
        router_rows=config.num_experts // size,
        latent_down_rows=0 if latent is None else latent // size,
        latent_up_rows=0 if latent is None else config.hidden_size // size,
    )


def possible_sizes(config: ModelConfig) -> tuple[int, ...]:
    """All tensor-parallel sizes that divide the model."""
    return tuple(size for size in range(1, config.num_heads + 1) if _fault(config, size) is None)


def _fault(config: ModelConfig, size: int) -> str | None:
    """Why the model cannot be split into `size` ranks, or None."""
    if size < 1:
        return "is not a positive number"
    split = {
        "KDA heads": config.linear_attention.num_heads,
        "MLA heads": config.num_heads,
        "vocabulary rows": config.vocab_size,
        "dense MLP columns": config.intermediate_size,
        "shared expert columns": config.shared_intermediate_size,
        "routed expert columns": config.moe_intermediate_size,
        "routed experts": config.num_experts,
    }
    if config.routed_hidden_size is not None:
        split["latent rows"] = config.routed_hidden_size
        split["hidden rows"] = config.hidden_size
    for what, width in split.items():
        if width % size:
            return f"{width} {what} do not divide by {size}"
    columns = config.moe_intermediate_size // size
    if config.expert_format == "mxfp4" and columns % GROUP_SIZE:
        return f"{columns} routed expert columns per rank are no multiple of the MXFP4 group of {GROUP_SIZE}"
    return None
