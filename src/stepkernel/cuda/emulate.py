"""A device that is the emulator: memory and launches of `ptxcheck`, of one rank or of all ranks of a group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck import Memory, Result, launch
from stepkernel.cuda.device_protocol import Mailboxes
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.manifest import recorded
from stepkernel.cuda.spec import KernelSpec
from stepkernel.program.inputs import StepInputs


class EmulatedDevice:
    """Runs `ptx` on the CPU. Findings of the checker raise `ptxcheck.LaunchError`; `results` keeps every launch.

    seed: random interleaving of warps, another one in each launch; None runs a fixed order. grid: if not the spec's.
    memory: if it is shared with other ranks, whose names begin with `label`. ordered_stores: as for `ptxcheck.launch`.
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
        memory: Memory | None = None,
        label: str = "",
        ordered_stores: bool = False,
    ) -> None:
        self.ptx, self.spec, self.seed = ptx, spec, seed
        self.grid = spec.grid if grid is None else grid
        self.check_races, self.count, self.instruction_limit = check_races, count, instruction_limit
        self.memory = Memory() if memory is None else memory
        self._label, self._ordered = label, ordered_stores
        self.results: list[Result] = []

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int:
        return self.memory.put(self._label + name, values, constant)

    def zeros(self, name: str, size: int) -> int:
        return self.put(name, np.zeros(size, np.uint8))

    def clear(self, address: int, size: int) -> None:
        self.memory.set(address, np.zeros(size, np.uint8))

    def write(self, address: int, values: NDArray[Any]) -> None:
        self.memory.set(address, values)

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        return np.asarray(self.memory.get(address, shape, dtype))

    def launch(self, arguments: list[int]) -> None:
        self.launch_ranks([arguments])

    def close(self) -> None:
        """Memory goes with the object."""

    def launch_ranks(self, arguments: Sequence[list[int]]) -> None:
        """One launch on each rank's device, all at the same time."""
        seed = None if self.seed is None else self.seed + len(self.results)
        result = launch(
            self.ptx,
            self.grid,
            self.spec.threads,
            arguments,
            self.memory,
            check_races=self.check_races,
            ordered_stores=self._ordered,
            count=self.count,
            seed=seed,
            instruction_limit=self.instruction_limit,
        )
        self.results.append(result)


class Emulator:
    """A machine (`device_protocol.Machine`) that executes PTX on the CPU, with all checks: slow, and right for trying
    kernels without a GPU. arch: that of the PTX to take; seed: as for `EmulatedDevice`."""

    name = "the emulator"
    fits = 1 << 20

    def __init__(self, arch: str = "sm_90a", seed: int | None = None) -> None:
        self.arch, self._seed = arch, seed
        self._memory = Memory()

    def load(self, directory: Path, spec: KernelSpec) -> EmulatedDevice:
        label = f"{spec.name}: "
        return EmulatedDevice(recorded(directory, spec, self.arch), spec, self._seed, memory=self._memory, label=label)

    def copy_gbps(self) -> float:
        raise ValueError("the emulator's memory has no bandwidth that says anything of a GPU")


class EmulatedPeers:
    """The way of one rank to the mailboxes of a group (`device_protocol.Peers`)."""

    def __init__(self, rank: int, group: "EmulatedGroup") -> None:
        self.rank, self.size, self._group = rank, group.size, group

    def mailboxes(self, size: int, multicast: bool) -> Mailboxes:
        return self._group.mailboxes(size, multicast)


class EmulatedGroup:
    """The devices of `size` ranks in one memory; options as for `EmulatedDevice`."""

    def __init__(self, size: int, ptx: str, spec: KernelSpec, **options: Any) -> None:
        self.size, self.memory = size, Memory()
        self.devices = [
            EmulatedDevice(ptx, spec, memory=self.memory, label=f"rank {rank}: ", **options) for rank in range(size)
        ]
        self.peers = [EmulatedPeers(rank, self) for rank in range(size)]
        self._mailboxes: Mailboxes | None = None

    def mailboxes(self, size: int, multicast: bool) -> Mailboxes:
        if self._mailboxes is None:
            boxes = [device.put("mailbox", np.zeros(size, np.uint8)) for device in self.devices]
            self._mailboxes = Mailboxes(boxes, self.memory.multicast("mailboxes", boxes) if multicast else 0)
        return self._mailboxes

    @property
    def results(self) -> list[Result]:
        return self.devices[0].results

    def run(
        self, executors: Sequence[CudaExecutor], inputs: Sequence[StepInputs], first: int = 0, last: int | None = None
    ) -> None:
        """Records first .. last - 1 on the devices of `executors`, together, as `CudaExecutor.run` does it for one;
        ranks that are left out do not answer. Raises what the first rank with an error raises."""
        arguments = []
        for executor, own in zip(executors, inputs, strict=True):
            executor.set_inputs(own)
            executor.upload()
            arguments.append(executor.start(first, last))
        self.devices[0].launch_ranks(arguments)
        errors = []
        for executor in executors:
            try:
                executor.finish(first)
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        for executor in executors:
            executor.download()
