"""Mailboxes on the GPUs of other processes of one machine, by CUDA IPC. Has not run on a GPU yet."""

from collections.abc import Callable, Sequence

import numpy as np

from stepkernel.cuda.device_protocol import Mailboxes
from stepkernel.cuda.gpu import GpuDevice


class IpcPeers:
    """A rank's way to the other ranks' GPUs (`device_protocol.Peers`); a process and a GPU for each rank.

    gather  hands out some bytes of this rank and returns those of all ranks in their order, when all have come, such as
            `torch.distributed.all_gather_object` does

    Memory of GPUs of other machines (NVLink between nodes) and multicast addresses need shared fabric handles, which
    are not supported yet.
    """

    def __init__(self, device: GpuDevice, rank: int, size: int, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: expected 0 <= rank < size")
        self.rank, self.size = rank, size
        self._device, self._gather = device, gather
        self._opened: list[int] = []

    def mailboxes(self, size: int, multicast: bool) -> Mailboxes:
        """Raises ValueError for multicast; GpuMissing if a GPU cannot reach another one's memory."""
        if multicast:
            raise ValueError("exchanges by NVLink multicast: mailboxes with a multicast address are not supported yet")
        own = self._device.put("mailbox", np.zeros(size, np.uint8))
        handles = self._gather(self._device.share(own))
        if len(handles) != self.size:
            raise ValueError(f"mailboxes of {len(handles)} ranks were gathered, the group has {self.size}")
        addresses = [own if rank == self.rank else self._open(handle) for rank, handle in enumerate(handles)]
        return Mailboxes(addresses)

    def close(self) -> None:
        """After the last step of all ranks."""
        for address in self._opened:
            self._device.close_shared(address)
        self._opened.clear()

    def _open(self, handle: bytes) -> int:
        self._opened.append(self._device.open_shared(handle))
        return self._opened[-1]
