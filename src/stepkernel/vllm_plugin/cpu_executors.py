"""Native calls of the CPU over vLLM's caches."""

from collections.abc import Sequence

import torch

from stepkernel.cpu.block import Activations
from stepkernel.cpu.crew import Crew
from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.mailbox import Mailbox
from stepkernel.cpu.stages.exchange import slot_bytes
from stepkernel.cpu.weights import CpuWeights
from stepkernel.program.inputs import Caches
from stepkernel.program.program import Program
from stepkernel.vllm_plugin.arrays import array_of
from stepkernel.vllm_plugin.executors import StepExecutor
from stepkernel.vllm_plugin.layers import KdaLayer, MlaLayer
from stepkernel.vllm_plugin.ranks import Ranks


def activations(dtype: torch.dtype) -> Activations:
    """How steps round where the model has this dtype."""
    return "bf16" if dtype == torch.bfloat16 else "float32"


class CpuExecutors:
    """`executors.Executors` over packed weights, all on one crew of threads."""

    def __init__(self, packed: CpuWeights, activations: Activations, ranks: Ranks, threads: int | None) -> None:
        self.crew = Crew(threads or ranks.threads)
        self._packed, self._activations, self._ranks = packed, activations, ranks
        self._mailbox: Mailbox | None = None

    def prepare(self, program: Program) -> None:
        self._mailbox = self._ranks.mailbox(slot_bytes(program))

    def make(
        self, program: Program, kda: Sequence[KdaLayer], mla: Sequence[MlaLayer], groups: Sequence[int]
    ) -> StepExecutor:
        caches = Caches(
            latent=[array_of(layer.kv_cache) for layer in mla],
            conv=[array_of(layer.kv_cache[0]) for layer in kda],
            recurrent=[array_of(layer.kv_cache[1]) for layer in kda],
        )
        return CpuExecutor(
            program,
            self._packed,
            caches,
            crew=self.crew,
            activations=self._activations,
            mailbox=self._mailbox,
            state_groups=groups,
        )

    def close(self) -> None:
        self.crew.close()
