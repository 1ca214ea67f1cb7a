"""Memory that kernels address by number: owned by one object for as long as a program may run."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HUGE_PAGE = 2 << 20
LINE = 128  # two cache lines: a line and its prefetched neighbour


class Arena:
    """Zeroed, 128-byte aligned arrays in anonymous memory on huge pages.

    Addresses are int64 and hide ownership: keep the arena alive as long as anything that holds an address.
    """

    def __init__(self, block_bytes: int = 32 << 20) -> None:
        self._blocks: list[NDArray[np.uint8]] = []
        self._block_bytes = block_bytes
        self._used = 0
        self.bytes = 0

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A zeroed array."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        room = -(-max(size, 1) // LINE) * LINE
        if not self._blocks or self._used + room > self._blocks[-1].nbytes:
            self._blocks.append(_map(max(room, self._block_bytes)))
            self._used = 0
        start = self._used
        self._used += room
        self.bytes += room
        return self._blocks[-1][start : start + size].view(kind).reshape(shape)


def _map(size: int) -> NDArray[np.uint8]:
    # Private: a shared mapping (the default of the module) is shmem, which gets no huge pages; 4 KiB pages stop the
    # hardware prefetcher and halve the bandwidth of kernels that also compute.
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def address(array: NDArray[Any]) -> int:
    """Address of an array's first element."""
    return int(array.__array_interface__["data"][0])
