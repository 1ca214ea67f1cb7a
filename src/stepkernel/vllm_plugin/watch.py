"""Bounded waits where vLLM has none: its collectives on CPUs spin for ever if a rank died or stands still."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil

from stepkernel.cpu.failure import GroupError

logger = logging.getLogger("vllm.stepkernel")  # which vLLM configures

TICK = 0.25  # seconds between two looks at the other ranks
# Once the group is broken, this rank lets rank 0 tell the engine why before it ends as well.
GRACE = 3.0


class Watch:
    """A thread that looks after the other ranks of a tensor-parallel group.

    processes  process of each other rank
    timeout    seconds that a collective may wait; only time in which this process ran counts
    on_death   called once, from the thread, with the rank whose process has ended

    A thread in a collective cannot be interrupted, so where one must end, the process does: vLLM's engine sees it and
    ends the others.
    """

    def __init__(
        self, processes: Mapping[int, int], timeout: float, on_death: Callable[[int], None] = lambda rank: None
    ) -> None:
        self.timeout = timeout
        self._processes = {rank: psutil.Process(process) for rank, process in processes.items()}
        self._on_death = on_death
        self._dead: int | None = None
        self._waiting: tuple[int, str] | None = None
        self._waits = 0
        self._broken = False
        threading.Thread(target=self._look, daemon=True, name="stepkernel-watch").start()

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Around a collective. Raises GroupError if it fails or a rank is already gone."""
        if self._dead is not None:
            raise GroupError(_message(self._death(self._dead)))
        self._waits += 1
        self._waiting = (self._waits, where)
        try:
            yield
        except RuntimeError as error:
            # Gloo notices a closed connection at once; whose it was is known a moment later.
            self._waiting = None
            time.sleep(2 * TICK)
            what = f"{where}: {error}" if self._dead is None else self._death(self._dead)
            raise GroupError(_message(what)) from error
        finally:
            self._waiting = None

    def broken(self) -> None:
        """The group cannot go on: this process ends a little later, whatever it waits for."""
        self._broken = True

    def _look(self) -> None:
        seen, waited, over = None, 0.0, 0.0
        last = time.monotonic()
        while True:
            time.sleep(TICK)
            now = time.monotonic()
            passed, last = min(now - last, 2 * TICK), now  # a pause of the whole machine is nobody's fault
            waiting = self._waiting
            waited = waited + passed if waiting is not None and waiting == seen else 0.0
            seen = waiting
            if self._dead is None:
                self._find_dead()
            if self._broken:
                over += passed
                if over > GRACE:
                    os._exit(1)
            elif waiting is not None and waited > 0 and self._dead is not None:
                self._end(self._death(self._dead))
            elif waiting is not None and waited > self.timeout:
                self._end(f"a rank did not answer within {self.timeout:g} s in {waiting[1]}")

    def _find_dead(self) -> None:
        for rank, process in self._processes.items():
            if not _runs(process):
                self._dead = rank
                self._on_death(rank)
                return

    def _death(self, rank: int) -> str:
        return f"rank {rank}, process {self._processes[rank].pid}, has ended"

    def _end(self, what: str) -> None:
        logger.error("%s", _message(what))
        os._exit(1)


def _message(what: str) -> str:
    return f"tensor-parallel group: {what}; all ranks stop, restart them together"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
