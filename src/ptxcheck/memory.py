"""Global memory of a launch: named allocations of all ranks in one address space."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ptxcheck.machine import state

GUARD = 256  # bytes between allocations that nobody may touch


@dataclass(frozen=True)
class Allocation:
    """`address` is what a kernel gets as its pointer."""

    name: str
    address: int
    size: int
    constant: bool


@dataclass(frozen=True)
class Multicast:
    """Addresses from `address` on stand for as many bytes behind each of `places`."""

    name: str
    address: int
    size: int
    places: tuple[int, ...]


class Memory:
    """Allocations; their contents stay between launches.

    Bytes of `empty` count as uninitialised until a kernel writes them. `constant` data may not be written; it costs no
    race checking, which suits weights.
    """

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.multicasts: list[Multicast] = []
        self._parts: dict[bool, list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = {False: [], True: []}
        self._of_kind: dict[bool, list[Allocation]] = {False: [], True: []}
        self._starts: dict[bool, list[int]] = {False: [], True: []}
        self._top = {False: 0, True: 0}

    def put(self, name: str, values: NDArray[Any], constant: bool = False) -> int:
        """Copies an array in; returns its address, aligned to 256 bytes."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self._add(name, data.copy(), state.SET, constant)

    def empty(self, name: str, size: int) -> int:
        """`size` uninitialised bytes; reading them is reported, and finds 0xFF (NaN in every floating format)."""
        return self._add(name, np.full(size, 0xFF, np.uint8), state.UNSET, False)

    def multicast(self, name: str, addresses: Sequence[int]) -> int:
        """An address for `multimem.st`: what is stored there goes to the same place behind each of `addresses`, which
        are whole allocations of one size."""
        found = [self._find(address)[0] for address in addresses]
        if len({a.size for a in found}) != 1 or [a.address for a in found] != list(addresses):
            raise ValueError(f"{name}: expected whole allocations of one size, got {[a.name for a in found]}")
        start = state.MULTICAST_BASE + sum(-(-m.size // 256) * 256 + 256 for m in self.multicasts)
        self.multicasts.append(Multicast(name, start, found[0].size, tuple(addresses)))
        return start

    def get(self, address: int, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A copy of what lies at an address, which is one returned by `put` or `empty`, or lies behind it."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        data, _ = self._piece(address, count)
        return data.copy().view(dtype).reshape(shape)

    def set(self, address: int, values: NDArray[Any]) -> None:
        """Overwrites what lies at an address, as `get` finds it; its bytes then count as initialised."""
        new = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        data, status = self._piece(address, len(new))
        data[:] = new
        status[:] = state.SET

    def written(self, address: int) -> NDArray[np.bool_]:
        """Which bytes of an allocation hold a value."""
        allocation, _, status = self._find(address)
        return np.asarray(status[: allocation.size] == state.SET)

    def _add(self, name: str, data: NDArray[np.uint8], status: int, constant: bool) -> int:
        if not len(data):
            raise ValueError(f"{name}: an allocation of no bytes")
        base = state.CONSTANT_BASE if constant else state.GLOBAL_BASE
        address = base + self._top[constant]
        room = -(-(len(data) + GUARD) // 256) * 256
        padded = np.full(room, 0xFF, np.uint8)
        padded[: len(data)] = data
        marks = np.full(room, state.OUTSIDE, np.uint8)
        marks[: len(data)] = status
        self._parts[constant].append((padded, marks))
        self._top[constant] += room
        allocation = Allocation(name, address, len(data), constant)
        self.allocations.append(allocation)
        self._of_kind[constant].append(allocation)
        self._starts[constant].append(address)
        return address

    def _find(self, address: int) -> tuple[Allocation, NDArray[np.uint8], NDArray[np.uint8]]:
        """The allocation that an address lies in, with its contents and status."""
        constant = address < state.GLOBAL_BASE
        starts = self._starts[constant]
        index = bisect_right(starts, address) - 1
        if index >= 0:
            allocation = self._of_kind[constant][index]
            if address < allocation.address + allocation.size:
                return allocation, *self._parts[constant][index]
        raise ValueError(f"no allocation holds {address:#x}")

    def _piece(self, address: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Contents and status of `count` bytes."""
        allocation, data, status = self._find(address)
        start = address - allocation.address
        if start + count > allocation.size:
            raise ValueError(f"{allocation.name}: {count} bytes from byte {start} on, it has {allocation.size}")
        return data[start : start + count], status[start : start + count]

    def joined(self, constant: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Contents and status of all allocations of a kind, one after the other."""
        parts = self._parts[constant]
        if not parts:
            return np.zeros(0, np.uint8), np.zeros(0, np.uint8)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def take_back(self, memory: NDArray[np.uint8], status: NDArray[np.uint8]) -> None:
        """Stores what a launch left in writable memory."""
        start = 0
        for data, marks in self._parts[False]:
            data[:] = memory[start : start + len(data)]
            marks[:] = status[start : start + len(data)]
            start += len(data)

    def describe(self, address: int) -> str:
        """The allocation next to an address, in words."""
        if not self.allocations:
            return f"address {address:#x}, nothing is allocated"
        nearest = min(self.allocations, key=lambda a: max(a.address - address, address - a.address - a.size + 1, 0))
        return f"byte {address - nearest.address} of {nearest.name!r} ({nearest.size} bytes)"
