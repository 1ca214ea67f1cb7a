"""Steps of several ranks that tests execute."""

from dataclasses import dataclass, replace

from stepkernel.cuda.cases import Case, StageCase, micro_k3, micro_linear
from stepkernel.cuda.dims import Dims, PostDims, Posting, TakeDims
from stepkernel.cuda.spec import KernelSpec
from stepkernel.model.config import ModelConfig
from stepkernel.model.presets import preset
from stepkernel.program.builder import Taps


def shared(config: ModelConfig) -> ModelConfig:
    """A micro model that 1, 2 and 4 ranks can share: four heads of each kind, and wider MLPs."""
    return replace(
        config,
        num_heads=4,
        intermediate_size=128,
        num_experts=16,
        moe_intermediate_size=128,
        linear_attention=replace(config.linear_attention, num_heads=4),
    )


def four_heads(config: ModelConfig) -> ModelConfig:
    """A tiny model that 4 ranks can share: as published it has 2 heads of each kind, so that 2 are the most; and the
    router of Kimi Linear's has 8 experts, 8 bytes of logits for each of 4 ranks where exchanges move 16."""
    return replace(config, num_heads=4, num_experts=16, linear_attention=replace(config.linear_attention, num_heads=4))


def ranks() -> tuple[Case, ...]:
    """Tensor parallelism over 2 and 4 ranks, with the latent rows on all of them or shared out."""
    return (*_micro_ranks(), *_tiny_ranks())


def _micro_ranks() -> tuple[Case, ...]:
    k3, linear = shared(micro_k3()), shared(micro_linear())
    taps = Taps((1,), "attn_res_stream")
    return (
        Case("micro_k3_2x2_tp2", k3, 2, 2, grid=4, ranks=2, taps=taps),
        Case("micro_linear_1x1_tp2", linear, 1, 1, grid=2, ranks=2),
        Case("micro_k3_1x1_tp4", k3, 1, 1, grid=2, ranks=4),
        Case("micro_k3_2x2_tp2_multicast", k3, 2, 2, grid=4, ranks=2, multicast=True),
        Case("micro_k3_2x2_dcp2", k3, 2, 2, grid=4, ranks=2, interleave=1),
        Case("micro_linear_1x1_dcp4", linear, 1, 1, grid=2, ranks=4, interleave=4),
        Case("micro_k3_2x2_dcp2_fp8", k3, 2, 2, grid=4, ranks=2, interleave=1, latents="fp8"),
        Case("micro_k3_2x2_tp2_recovering", k3, 2, 2, grid=4, ranks=2, recovers=True),
        Case(
            "micro_linear_2x2_tp2_fp8_recovering_bf16",
            linear,
            2,
            2,
            grid=4,
            ranks=2,
            latents="fp8",
            recovers=True,
            states="bfloat16",
        ),
    )


def _tiny_ranks() -> tuple[Case, ...]:
    """Both tiny models over 2 ranks, plain and with 4 queries, latent rows on both or shared out; and with four heads
    over 4."""
    found = []
    for name in ("tiny-k3", "tiny-kimi-linear"):
        config, prefix = preset(name), name.replace("-", "_")
        for requests, queries in ((8, 1), (2, 4)):
            shape = f"{prefix}_{requests}x{queries}"
            found += [
                Case(f"{shape}_tp2", config, requests, queries, grid=4, ranks=2),
                Case(f"{shape}_dcp2", config, requests, queries, grid=4, ranks=2, interleave=queries),
            ]
        wider = four_heads(config)
        found += [
            Case(f"{prefix}_3x1_tp4", wider, 3, 1, grid=2, ranks=4),
            Case(f"{prefix}_2x4_tp4", wider, 2, 4, grid=2, ranks=4),
        ]
    return tuple(found)


ROWS = 3


@dataclass(frozen=True)
class ExchangeCase:
    """Exchanges alone, of rows of several widths: sums of float32 and of BF16, parts side by side, parts for each."""

    name: str
    ranks: int
    grid: int = 2
    multicast: bool = False

    def spec(self) -> KernelSpec:
        codes: tuple[Dims, ...] = (
            PostDims(ROWS, Posting(self.ranks, self.multicast)),
            PostDims(ROWS, Posting(self.ranks), scatter=True),
            TakeDims("reduce", self.ranks, ROWS, floats=True),
            TakeDims("reduce", self.ranks, ROWS),
            TakeDims("gather", self.ranks, ROWS),
        )
        return KernelSpec(self.name, codes, self.grid)


Item = Case | StageCase | ExchangeCase


def exchanges() -> tuple[ExchangeCase, ...]:
    return (
        ExchangeCase("exchange_2", 2),
        ExchangeCase("exchange_4", 4),
        ExchangeCase("exchange_4_multicast", 4, multicast=True),
        ExchangeCase("exchange_16", 16),
    )
