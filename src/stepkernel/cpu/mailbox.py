"""Shared memory through which the ranks of a tensor-parallel group exchange rows inside their native steps.

Every exchange has one slot for each rank, written by that rank alone and read by all (`stages/exchange.py`). This file
owns the memory: a header with an alarm, a few words of each rank, and COPIES slots for each rank, used in turn.
"""

import fcntl
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu.arena import LINE, address
from stepkernel.cpu.atomics import NAP
from stepkernel.cpu.failure import Failure, GroupError
from stepkernel.model.shard import Shard

COPIES = 4  # stages/exchange.py says why
PAGE = 4096

# Byte offsets in the shared header. ALARM: 0, or 1 + the rank that stopped the group.
MAGIC, SIZE, SLOT, ALARM, RANKS = 0, 8, 16, LINE, 2 * LINE
# Of each rank: how often it posted, how many sleep until it does, why it stopped the group, its process.
RANK_BYTES, POSTED, WAITERS, REPORT = 3 * LINE, 0, LINE, 2 * LINE
KIND, ABOUT, STAGE, PROCESS, READY = (REPORT + 4 * i for i in range(5))
_WRITTEN = 0x53544B4D424F5831

# Byte offsets of int64 words in a rank's private block. SENT: words of each copy of its slot that hold values.
BASE, SLOT_BYTES, GROUP_SIZE, RANK, HEADER, EXCHANGE, FACTS, LIMIT, BROKEN = (8 * i for i in range(9))
SENT, NAP_TIME = 8 * 9, 8 * 13
BLOCK_WORDS = 16


def new_path() -> Path:
    """A name for the memory of a new group, to be handed to all of its ranks."""
    shared = Path("/dev/shm")
    directory = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return directory / f"stepkernel-{os.getpid()}-{os.urandom(6).hex()}"


class Mailbox:
    """One rank's end of the exchanges of a group.

    path           file in memory, the same for all ranks (`new_path`); the first rank to come makes it, the last one
                   removes its name, so that nothing is left behind however the processes end
    slot_bytes     `exchange.slot_bytes` of the largest program that will use it; the same for all ranks
    timeout        seconds that a rank waits inside a step for another one before it stops the group
    start_timeout  seconds that the first step waits for ranks that are not ready yet

    Executors of one rank may share a mailbox if they do not run at the same time. Raises GroupError if the file belongs
    to another kind of group or the rank is already there.
    """

    def __init__(
        self, path: Path | str, shard: Shard, slot_bytes: int, timeout: float = 5.0, start_timeout: float = 120.0
    ) -> None:
        if timeout <= 0 or start_timeout <= 0:
            raise ValueError(f"timeout {timeout} s, start timeout {start_timeout} s: both must be positive")
        self.shard, self.slot_bytes, self.timeout = shard, slot_bytes, timeout
        self._start_timeout = start_timeout
        self._start = -(-(RANKS + shard.size * RANK_BYTES) // PAGE) * PAGE
        self._bytes = _attach(Path(path), shard, slot_bytes, self._start)
        self._words = self._bytes[: self._start].view(np.int32)
        self.block = np.zeros(BLOCK_WORDS, np.int64)
        base = address(self._bytes)
        self.block[: BROKEN // 8 + 1] = (
            base + self._start,
            slot_bytes,
            shard.size,
            shard.rank,
            base,
            0,
            0,
            int(timeout * 1e9),
            0,
        )
        self.block[NAP_TIME // 8 + 1] = NAP
        self._stages: Sequence[str] = ()
        self._count = 0
        self._complete = False
        self._leave = weakref.finalize(self, _leave, self._words, shard.rank, Path(path))

    @property
    def slots(self) -> NDArray[np.int32]:
        """All slots as words [copies, ranks, words]; a word that is zero has not been written."""
        return self._bytes[self._start :].view(np.int32).reshape(COPIES, self.shard.size, -1)

    @property
    def exchanges(self) -> int:
        """Exchanges so far."""
        return self._count

    def begin(self, first: int, facts: int, stages: Sequence[str]) -> None:
        """Before a step whose first exchange is number `first` of its program. `facts` must be the same on all ranks
        and positive; `stages` are names for messages."""
        self._stages = stages
        self._check(Failure.NONE)
        if not self._complete:
            self._await_all()
        self.block[EXCHANGE // 8] = self._count - first
        self.block[FACTS // 8] = facts

    def end(self, exchanges: int) -> None:
        """After a step of so many exchanges: raises GroupError if its results cannot be trusted."""
        self._count += exchanges
        # A rank that leaves in good order has posted all that this step needs, unless the step noticed.
        self._check(Failure.NONE if self.block[BROKEN // 8] else Failure.LEFT)

    def stop(self, kind: Failure, about: int) -> None:
        """Ends the group from outside of a step: every rank that waits, or will, raises GroupError at once."""
        if not self._words[ALARM // 4]:
            report = (RANKS + self.shard.rank * RANK_BYTES) // 4
            self._words[[report + ABOUT // 4, report + STAGE // 4]] = about, -1
            self._words[report + KIND // 4] = kind
            self._words[ALARM // 4] = self.shard.rank + 1

    def close(self) -> None:
        """Leaves the group: other ranks that still want something from this one stop at once."""
        self._leave()

    def _word(self, offset: int, rank: int) -> int:
        return int(self._words[(RANKS + rank * RANK_BYTES + offset) // 4])

    def _check(self, tolerated: Failure) -> None:
        if not self._leave.alive:
            raise GroupError(f"tensor-parallel rank {self.shard.rank} has left its group")
        by = int(self._words[ALARM // 4]) - 1
        if by < 0:
            return
        kind, about, stage = (self._word(word, by) for word in (KIND, ABOUT, STAGE))
        if kind == tolerated:
            return
        size = self.shard.size
        where = self._stages[stage] if 0 <= stage < len(self._stages) else f"stage {stage}"
        if kind == Failure.TIMEOUT:
            what = f"rank {about} did not answer rank {by} within {self.timeout:g} s in {where}"
        elif kind == Failure.MISMATCH:
            what = f"rank {about} runs another step than rank {by}: other tokens, lengths or stages"
        elif kind == Failure.DIED:
            what = f"rank {about}, process {self._word(PROCESS, about)}, has ended"
        else:
            what = f"rank {by} has left"
        raise GroupError(f"tensor-parallel group of {size}: {what}; all ranks stop, restart them together")

    def _await_all(self) -> None:
        """A rank that still loads or compiles is no failure; from the first step on all are expected to answer."""
        self._words[(RANKS + self.shard.rank * RANK_BYTES + READY) // 4] = 1
        waited, nap = 0.0, 0.001
        while True:
            late = [rank for rank in range(self.shard.size) if not self._word(READY, rank)]
            if not late:
                self._complete = True
                return
            self._check(Failure.NONE)
            if waited >= self._start_timeout:
                raise GroupError(
                    f"tensor-parallel group of {self.shard.size}: ranks {late} did not start within "
                    f"{self._start_timeout:g} s of rank {self.shard.rank}"
                )
            time.sleep(nap)
            waited += nap


def _attach(path: Path, shard: Shard, slot_bytes: int, start: int) -> NDArray[np.uint8]:
    """Maps the file, which is made and filled under its lock by whoever comes first."""
    if slot_bytes % PAGE or slot_bytes < PAGE:
        raise ValueError(f"slots of {slot_bytes} bytes: expected a multiple of {PAGE}")
    total = start + COPIES * shard.size * slot_bytes
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        fresh = os.fstat(file).st_size == 0
        if fresh:
            _check_room(file, path, total)
            os.ftruncate(file, total)
        elif os.fstat(file).st_size != total:
            raise GroupError(f"{path}: {os.fstat(file).st_size} bytes, a group of {shard.size} needs {total}")
        memory = np.frombuffer(mmap.mmap(file, total), np.uint8)
        head = memory[:start].view(np.int64)
        if fresh:
            head[[MAGIC // 8, SIZE // 8, SLOT // 8]] = _WRITTEN, shard.size, slot_bytes
        found = head[[MAGIC // 8, SIZE // 8, SLOT // 8]].tolist()
        if found != [_WRITTEN, shard.size, slot_bytes]:
            raise GroupError(f"{path}: not the mailbox of {shard.size} ranks with slots of {slot_bytes} bytes")
        words = memory[:start].view(np.int32)
        places = (RANKS + PROCESS + np.arange(shard.size) * RANK_BYTES) // 4
        if words[places[shard.rank]]:
            raise GroupError(f"{path}: rank {shard.rank} is already there, process {words[places[shard.rank]]}")
        words[places[shard.rank]] = os.getpid()
        if words[places].all():
            path.unlink(missing_ok=True)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open, and with it the lock
        os.close(file)
    return memory


def _check_room(file: int, path: Path, total: int) -> None:
    """The file takes memory as it is used; where the file system has less, using it would kill the process."""
    system = os.fstatvfs(file)
    free = system.f_bavail * system.f_frsize
    if free < total:
        path.unlink()
        raise GroupError(
            f"{path.parent}: {free >> 20} MiB free, the exchanges between ranks take up to {-(-total >> 20)} MiB; "
            "enlarge it (for containers: --shm-size) or run steps of fewer requests"
        )


def _leave(words: NDArray[Any], rank: int, path: Path) -> None:
    if not words[ALARM // 4]:
        words[(RANKS + rank * RANK_BYTES + ABOUT) // 4] = rank
        words[(RANKS + rank * RANK_BYTES + KIND) // 4] = Failure.LEFT
        words[ALARM // 4] = rank + 1
    path.unlink(missing_ok=True)  # still there only if some rank never came
