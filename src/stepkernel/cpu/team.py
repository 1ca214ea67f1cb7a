"""A persistent team of threads that stays inside one native function.

Between steps a worker spins for about half a millisecond, then sleeps on a futex (waking takes 33-45 us, spinning 0.1
us). Inside a step everyone meets at a barrier that spins about 50 us and then sleeps, so that a busy neighbour costs
one time slice and not all of them (`sched_yield` was measured worse). Every control word has its own 128 bytes.
"""

from typing import Any

import numpy as np

from stepkernel.cpu.atomics import (
    fetch_add,
    futex_wait,
    futex_wake,
    load_acquire,
    load_sequential,
    pause,
    store_release,
    store_sequential,
)
from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import out_of_line

LINE = 128
EPOCH, QUIT, SLEEPERS, GENERATION, ARRIVED, WAITERS, DONE, CALL = (LINE * i for i in range(8))
# Words of CALL, written before a step starts and read by the workers in it.
CALL_TABLE, CALL_STEP, CALL_SCRATCH, CALL_SCRATCH_BYTES = (CALL + 8 * i for i in range(4))
CONTROL_BYTES = LINE * 8
BARRIER_SPINS = 1200  # about 50 us of `pause`
IDLE_SPINS = 12000  # about 500 us


@inner
def barrier(control: int, threads: int) -> None:
    """Returns when all `threads` have called it."""
    out_of_line()
    if threads == 1:
        return
    generation = load_acquire(control + GENERATION)
    if fetch_add(control + ARRIVED, np.int32(1)) == threads - 1:
        store_release(control + ARRIVED, np.int32(0))
        store_sequential(control + GENERATION, np.int32(generation + 1))
        if load_sequential(control + WAITERS) != 0:
            futex_wake(control + GENERATION, threads)
        return
    spins = 0
    while load_acquire(control + GENERATION) == generation:
        spins += 1
        if spins <= BARRIER_SPINS:
            pause()
        else:
            fetch_add(control + WAITERS, np.int32(1))
            futex_wait(control + GENERATION, generation)
            fetch_add(control + WAITERS, np.int32(-1))


@inner
def await_step(control: int, epoch: Any) -> Any:
    """A worker's rest between steps: returns the new epoch."""
    spins = 0
    while load_acquire(control + EPOCH) == epoch:
        spins += 1
        if spins <= IDLE_SPINS:
            pause()
        else:
            fetch_add(control + SLEEPERS, np.int32(1))
            futex_wait(control + EPOCH, epoch)
            fetch_add(control + SLEEPERS, np.int32(-1))
    return load_acquire(control + EPOCH)


@inner
def start_step(control: int, threads: int) -> None:
    """Wakes the workers for one step of `threads` threads (0: only wakes them); the caller takes part as thread 0.

    The epoch word carries the number of threads in its low byte: a worker that sits a step out reads both at once and
    cannot join the next step twice.
    """
    if threads == 1:
        return
    store_release(control + DONE, np.int32(0))
    count = (load_acquire(control + EPOCH) >> 8) + 1
    store_sequential(control + EPOCH, np.int32((count & 0x7FFFFF) << 8 | threads))
    if load_sequential(control + SLEEPERS) != 0:
        futex_wake(control + EPOCH, 1 << 20)


@inner
def finish_step(control: int, workers: int) -> None:
    """Returns when `workers` workers have left the step, so that the next one cannot overtake it."""
    spins = 0
    while True:
        done = load_acquire(control + DONE)
        if done >= workers:
            return
        spins += 1
        if spins <= BARRIER_SPINS:
            pause()
        else:
            fetch_add(control + WAITERS, np.int32(1))
            futex_wait(control + DONE, done)
            fetch_add(control + WAITERS, np.int32(-1))


@inner
def leave_step(control: int) -> None:
    """A worker's last act in a step."""
    fetch_add(control + DONE, np.int32(1))
    if load_sequential(control + WAITERS) != 0:
        futex_wake(control + DONE, 1)
