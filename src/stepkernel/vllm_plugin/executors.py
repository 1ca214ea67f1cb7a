"""Where native steps are executed: the one thing that differs between the CPU and a GPU."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import Program
from stepkernel.vllm_plugin.layers import KdaLayer, MlaLayer


class StepExecutor(Protocol):
    """A program over vLLM's caches; results are on the host."""

    @property
    def program(self) -> Program: ...

    @property
    def caches(self) -> Caches: ...

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        """At least `hidden` and `logits`."""
        ...

    def run(self, inputs: StepInputs) -> StepOutputs: ...

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        """A stage that reads `hidden` and writes `logits`."""
        ...

    def close(self) -> None: ...


class Executors(Protocol):
    """Makes an executor whenever vLLM has bound other caches."""

    def prepare(self, program: Program) -> None:
        """Before the first `make`, by all ranks."""
        ...

    def make(
        self, program: Program, kda: Sequence[KdaLayer], mla: Sequence[MlaLayer], groups: Sequence[int]
    ) -> StepExecutor:
        """`groups`: the table of state slots that each KDA layer goes by."""
        ...

    def close(self) -> None: ...
