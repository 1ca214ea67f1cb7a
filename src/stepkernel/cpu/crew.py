"""The threads that run the steps of one or several executors, one step at a time."""

import os
import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import interpreter, team
from stepkernel.cpu.arena import LINE, address

MAX_THREADS = 64


class Prepared:
    """A table of records and its scratch, uint8 [at least as many as run it, bytes of each thread].

    Their addresses are asked for once: behind a step NumPy takes 5 us for each.
    """

    def __init__(self, table: NDArray[np.int64], scratch: NDArray[np.uint8]) -> None:
        self._alive = (table, scratch)
        self.at, self.scratch_at = address(table), address(scratch)
        self.scratch_bytes = scratch.strides[0]


class Crew:
    """A team of threads (team.py) and the calls that enter it.

    threads  team size at most; default: the processors this process may use.

    Programs that take turns in one session share a crew: idle workers of two crews would take each other's processors.
    Not thread-safe. `close` ends the threads; they also end when the crew is collected or the process exits.
    """

    def __init__(self, threads: int | None = None) -> None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        count = available if threads is None else threads
        if not 1 <= count <= MAX_THREADS:
            raise ValueError(f"threads {count}: supported are 1 to {MAX_THREADS}")
        self.threads = count
        self._process = os.getpid()
        raw = np.zeros(team.CONTROL_BYTES + LINE, np.uint8)
        start = -address(raw) % LINE
        self._control = raw[start : start + team.CONTROL_BYTES].view(np.int32)
        self._at = address(self._control)
        interpreter.enter.prepare_apart()
        workers = [
            threading.Thread(target=_work, args=(self._control, i), daemon=True, name=f"stepkernel-{i}")
            for i in range(1, count)
        ]
        for worker in workers:
            worker.start()
        self._stop = weakref.finalize(self, _stop, self._control, workers)

    def call(self, prepared: Prepared, block: int, threads: int) -> int:
        """Runs the step that `block` (an address) describes, and those chained to it; returns nanoseconds."""
        if not self._stop.alive:
            raise ValueError("the executor is closed")
        if os.getpid() != self._process:
            raise ValueError("this process was forked from the executor's and has none of its threads; fork first")
        start = time.perf_counter_ns()
        interpreter.enter(prepared.at, block, self._at, threads, 0, prepared.scratch_at, prepared.scratch_bytes)
        return time.perf_counter_ns() - start

    def close(self) -> None:
        self._stop()


def _work(control: NDArray[np.int32], thread: int) -> None:
    interpreter.enter(0, 0, address(control), 0, thread, 0, 0)


def _stop(control: NDArray[np.int32], workers: list[threading.Thread]) -> None:
    control[team.QUIT // 4] = 1
    interpreter.enter(0, 0, address(control), 0, 0, 0, 0)
    for worker in workers:
        worker.join()
