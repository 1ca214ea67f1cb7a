"""What a launch tells: findings in words, and counters."""

from dataclasses import dataclass

from ptxcheck.machine import state

TITLES = {
    state.F_UNSET_READ: "read of uninitialised memory",
    state.F_RACE_WRITE_READ: "race: read of what another wrote, unordered",
    state.F_RACE_READ_WRITE: "race: write to what another read, unordered",
    state.F_RACE_WRITE_WRITE: "race: two writes, unordered",
    state.F_RACE_SAME_INSTRUCTION: "race: lanes of one instruction store different values to one address",
    state.F_RACE_LANES: "race: lanes of one warp without bar.warp.sync between them",
    state.F_MEMBER_MASK: "a lane is not in the member mask that it names",
    state.F_INACTIVE_LANE: "shuffle from a lane that takes no part",
    state.F_BARRIER_COUNT: "barrier: counts differ or are no multiple of 32",
    state.F_BARRIER_LEFT: "barrier: arrivals are left when the kernel ends",
    state.F_COPY_UNFINISHED: "a thread exits before its bulk store has been waited for",
    state.F_TRANSACTION_LEFT: "mbarrier: a phase is left unfinished when the kernel ends",
    state.F_STORES_UNORDERED: "strong stores of different values, unordered: which of them stays is not known",
    state.F_OUT_OF_BOUNDS: "address out of bounds",
    state.F_MISALIGNED: "misaligned address",
    state.F_BARRIER_OVERFLOW: "barrier: more arrivals than threads",
    state.F_NO_MBARRIER: "no initialised mbarrier at this address",
    state.F_MBARRIER_OVERFLOW: "mbarrier: more arrivals than its count in one phase",
    state.F_TRAP: "trap",
    state.F_PARTIAL_WARP: "a matrix instruction of a warp that is not complete",
    state.F_COPY_SIZE: "bulk copy: size is 0 or no multiple of 16",
    state.F_WRITE_CONSTANT: "write to constant memory",
    state.F_TABLE_FULL: "the checker's own tables are full; use a smaller launch",
    state.F_BARRIER_ID: "barrier: number outside of 0..15",
    state.F_NO_MULTICAST: "multimem: no multicast address",
}


@dataclass(frozen=True)
class Finding:
    """One kind of mistake at one instruction; the first occurrence is described."""

    title: str
    line: int
    instruction: str
    where: str

    def __str__(self) -> str:
        return f"{self.title}: {self.where}, line {self.line} [{self.instruction}]"


@dataclass(frozen=True)
class Traffic:
    """Counters of one memory instruction. `transfers` are 32-byte sectors, or passes over the shared banks. space:
    "global", "shared", or "prefetch" for what is only brought to L2."""

    line: int
    instruction: str
    space: str
    warps: int
    transfers: int
    ideal: int


@dataclass(frozen=True)
class Result:
    """`findings` is empty for a clean launch. `instructions` counts threads times instructions."""

    findings: tuple[Finding, ...]
    instructions: int
    seconds: float
    traffic: tuple[Traffic, ...]

    @property
    def sectors(self) -> int:
        """32-byte sectors of global memory touched, counted per instruction of a warp."""
        return sum(t.transfers for t in self.traffic if t.space == "global")

    @property
    def fetched(self) -> int:
        """32-byte sectors that prefetches named, counted as `sectors` are."""
        return sum(t.transfers for t in self.traffic if t.space == "prefetch")

    @property
    def bank_conflicts(self) -> int:
        """Passes over the shared-memory banks beyond the least possible."""
        return sum(t.transfers - t.ideal for t in self.traffic if t.space == "shared")


class LaunchError(Exception):
    """A launch with findings; `result` holds them all."""

    def __init__(self, result: Result) -> None:
        super().__init__("\n".join(map(str, result.findings)))
        self.result = result
