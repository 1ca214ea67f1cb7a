"""Opens a device by name, for a session."""

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from stepkernel.cuda.decoder import DeviceDecoder, choose
from stepkernel.cuda.device_protocol import Machine
from stepkernel.cuda.kernel_search import Built, Formats, KernelDirectory
from stepkernel.cuda.manifest import read
from stepkernel.cuda.spec import ARCHES
from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches
from stepkernel.program.program import MAX_ROWS

DeviceName = Literal["cuda", "emulator"]
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)


@dataclass(frozen=True)
class OpenedKernels:
    """A machine and the kernels of a directory that it will run for a model."""

    machine: Machine
    directory: Path
    steps: tuple[Built, ...]

    @property
    def page_tokens(self) -> int:
        return self.steps[0].shape.page_tokens

    @property
    def shapes(self) -> list[str]:
        return [f"{b.shape.requests}x{b.shape.queries}" for b in self.steps]

    def decoder(self, weights: Weights, caches: Caches) -> DeviceDecoder:
        """Weights go to the device. `caches`: shapes of what is allocated there."""
        return DeviceDecoder(self.machine, self.directory, self.steps, weights, caches)


def open_kernels(
    device: DeviceName,
    kernels: Path | None,
    config: ModelConfig,
    requests: int,
    page_tokens: int | None = None,
    formats: Formats = Formats(),  # noqa: B008
) -> OpenedKernels:
    """Everything that can be refused before weights are read: kernels, GPU, architecture, shapes.

    Raises ValueError naming what was found and what to run.
    """
    if kernels is None:
        raise ValueError(
            f"device {device}: which kernels is missing; pass the directory that `stepkernel kernels build --out DIR` "
            "wrote (--kernels DIR)"
        )
    if requests > MAX_ROWS:
        raise ValueError(f"device {device}: {requests} requests together, a step of the GPU kernels takes {MAX_ROWS}")
    arches = {row["arch"] for row in read(kernels)["kernels"]}  # first: a wrong directory is one on any machine
    machine = _machine(device, arches)
    steps = choose(KernelDirectory(kernels, machine, config, formats=formats), requests, page_tokens)
    return OpenedKernels(machine, kernels, tuple(steps))


def _machine(device: DeviceName, arches: Container[str]) -> Machine:
    # Imported late: the one needs cuda-bindings, the other brings a compiler along.
    if device == "cuda":
        from stepkernel.cuda.gpu import Gpu

        return Gpu()
    from stepkernel.cuda.emulate import Emulator

    return Emulator(next((arch for arch in ARCHES if arch in arches), ARCHES[0]))
