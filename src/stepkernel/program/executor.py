"""What every executor offers: whole steps for engines, single stages for comparison."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import Program


class Executor(Protocol):
    """A program bound to weights and caches.

    `buffers` maps each buffer name to an array [rows, width] ([copies, rows, width] for blocks), float32 or int32,
    which `run_stage` reads and writes, so that two executors can be driven stage by stage from the same values.
    """

    program: Program
    caches: Caches

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]: ...

    def run(self, inputs: StepInputs) -> StepOutputs: ...

    def run_stage(self, index: int, inputs: StepInputs) -> None: ...
