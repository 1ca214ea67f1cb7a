"""The machine's own read roof: bytes per second that its threads can load, measured in the same run as a step."""

import threading
import time
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.jit import entry
from stepkernel.cpu.simd import binary, i32x8, load_i32, sum_i32, zero_i32

STREAMS = 4  # one stream reaches about 75 % of what a core can pull
BUFFER_BYTES = 512 << 20  # far beyond any last-level cache a core could keep to itself
SLICE_BYTES = 16 << 20

_add = binary(i32x8, "add")


@entry("int64(int64, int64)")
def _read(start: int, size: int) -> int:
    """Sums `size` bytes (a multiple of 256) as four far-apart streams; the sum keeps the loads alive."""
    quarter = size // 4
    a, b, c, d = zero_i32(), zero_i32(), zero_i32(), zero_i32()
    for i in range(start, start + quarter, 64):
        a = _add(_add(a, load_i32(i)), load_i32(i + 32))
        b = _add(_add(b, load_i32(i + quarter)), load_i32(i + quarter + 32))
        c = _add(_add(c, load_i32(i + 2 * quarter)), load_i32(i + 2 * quarter + 32))
        d = _add(_add(d, load_i32(i + 3 * quarter)), load_i32(i + 3 * quarter + 32))
    return np.int64(sum_i32(_add(_add(a, b), _add(c, d))))  # type: ignore[return-value]


@cache
def _buffer() -> tuple[Arena, NDArray[np.uint8]]:
    arena = Arena(block_bytes=1 << 20)
    memory = arena.array((BUFFER_BYTES,), np.uint8)
    memory[::4096] = 1  # touch every page
    return arena, memory


def read_roof(threads: int, seconds: float = 0.5) -> float:
    """Median read bandwidth in GB/s (1e9 bytes) of `threads` threads that read side by side.

    A round is one 16 MiB slice for each thread, as four streams, and lasts until the slowest has finished; the slices
    move through 512 MiB, so that no cache holds them.
    """
    _, memory = _buffer()
    part = BUFFER_BYTES // threads // SLICE_BYTES * SLICE_BYTES
    slices = part // SLICE_BYTES
    _read.prepare()
    begin, end = threading.Barrier(threads), threading.Barrier(threads)
    rates: list[float] = []
    deadline = time.perf_counter() + seconds
    running = True

    def work(thread: int) -> None:
        nonlocal running
        base = address(memory) + thread * part
        index = 0
        while True:
            if thread == 0:
                running = index == 0 or time.perf_counter() < deadline
            begin.wait()
            if not running:
                return
            before = time.perf_counter()
            _read(base + index % slices * SLICE_BYTES, SLICE_BYTES)
            end.wait()
            if thread == 0:
                rates.append(threads * SLICE_BYTES / (time.perf_counter() - before) / 1e9)
            index += 1

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return float(np.median(rates))
