"""Steps of several ranks that tests execute."""

from dataclasses import dataclass, replace

from stepkernel.cuda.cases import Case, StageCase, micro_k3, micro_linear
from stepkernel.cuda.dims import Dims, ExchangeDims
from stepkernel.cuda.spec import KernelSpec
from stepkernel.model.config import ModelConfig
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


def ranks() -> tuple[Case, ...]:
    """Tensor parallelism over 2 and 4 ranks, with the latent rows on all of them or shared out."""
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
    )


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
            ExchangeDims("reduce", self.ranks, ROWS, True, self.multicast),
            ExchangeDims("reduce", self.ranks, ROWS, False, self.multicast),
            ExchangeDims("gather", self.ranks, ROWS, False, self.multicast),
            ExchangeDims("scatter", self.ranks, ROWS),
        )
        return KernelSpec(self.name, codes, self.grid)


Item = Case | StageCase | ExchangeCase


def exchanges() -> tuple[ExchangeCase, ...]:
    return (
        ExchangeCase("exchange_2", 2),
        ExchangeCase("exchange_4", 4),
        ExchangeCase("exchange_4_multicast", 4, multicast=True),
    )
