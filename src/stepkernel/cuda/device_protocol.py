"""What an executor needs of a device, and of the other ranks' devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray


class Device(Protocol):
    """Memory and launches. Addresses are plain numbers."""

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int: ...

    def write(self, address: int, values: NDArray[Any]) -> None: ...

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]: ...

    def launch(self, arguments: list[int]) -> None:
        """Runs the kernel of the plan and waits for it."""
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
