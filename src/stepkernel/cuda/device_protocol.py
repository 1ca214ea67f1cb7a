"""What an executor needs of a device, and of the other ranks' devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from stepkernel.cuda.spec import KernelSpec


class Device(Protocol):
    """Memory and launches. Addresses are plain numbers."""

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int: ...

    def zeros(self, name: str, size: int) -> int: ...

    def clear(self, address: int, size: int) -> None:
        """Zeros to `size` bytes from an address on."""
        ...

    def write(self, address: int, values: NDArray[Any]) -> None: ...

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]: ...

    def launch(self, arguments: list[int]) -> None:
        """Runs the kernel of the plan and waits for it."""
        ...

    def close(self) -> None:
        """Gives back what this kernel took of the device's memory."""
        ...


class Target(Protocol):
    """What kernels are chosen by.

    arch  that they must be built for
    name  of the GPU
    fits  CTAs that can run at a time
    """

    @property
    def arch(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def fits(self) -> int: ...


class Machine(Target, Protocol):
    """A GPU or the emulator: several kernels over one memory."""

    def load(self, directory: Path, spec: KernelSpec) -> Device:
        """Raises ValueError if it cannot run the kernel."""
        ...

    def copy_gbps(self) -> float:
        """Bandwidth of a large copy within the memory, bytes read and written, as measured now."""
        ...


@dataclass(frozen=True)
class Mailboxes:
    """Addresses of all ranks' mailboxes in rank order, as one rank's device sees them; `multicast`: the address through
    which a store reaches all of them, 0 if there is none."""

    addresses: Sequence[int]
    multicast: int = 0


class Peers(Protocol):
    """A rank's way to the devices of its group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def mailboxes(self, size: int, multicast: bool) -> Mailboxes:
        """`size` zeroed bytes on each rank's device, written by all ranks; every rank must call it, and gets its
        addresses when all have. Raises ValueError if there is no multicast and it is wanted."""
        ...
