"""A device that is the emulator: memory and launches of `ptxcheck`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck import Memory, Result, launch
from stepkernel.cuda.spec import KernelSpec


class EmulatedDevice:
    """Runs `ptx` on the CPU. Findings of the checker raise `ptxcheck.LaunchError`; `results` keeps every launch.

    seed: random interleaving of warps, another one in each launch; None runs a fixed order. grid: if not the spec's.
    """

    def __init__(
        self,
        ptx: str,
        spec: KernelSpec,
        seed: int | None = None,
        check_races: bool = True,
        count: bool = False,
        instruction_limit: int = 20_000_000_000,
        grid: int | None = None,
    ) -> None:
        self.ptx, self.spec, self.seed = ptx, spec, seed
        self.grid = spec.grid if grid is None else grid
        self.check_races, self.count, self.instruction_limit = check_races, count, instruction_limit
        self.memory = Memory()
        self.results: list[Result] = []

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int:
        return self.memory.put(name, values, constant)

    def write(self, address: int, values: NDArray[Any]) -> None:
        self.memory.set(address, values)

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return np.asarray(self.memory.get(address, shape, dtype))

    def launch(self, arguments: list[int]) -> None:
        seed = None if self.seed is None else self.seed + len(self.results)
        result = launch(
            self.ptx,
            self.grid,
            self.spec.threads,
            arguments,
            self.memory,
            check_races=self.check_races,
            count=self.count,
            seed=seed,
            instruction_limit=self.instruction_limit,
        )
        self.results.append(result)
