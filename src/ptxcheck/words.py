"""Turns the machine's numbers into text."""

import numpy as np
from numpy.typing import NDArray

from ptxcheck.lower import Code
from ptxcheck.machine import state
from ptxcheck.machine.interpreter import DEADLOCK, LIVELOCK
from ptxcheck.memory import Memory
from ptxcheck.report import TITLES, Finding, Traffic


class Words:
    """Findings and traffic of one launch, after it."""

    def __init__(self, code: Code, machine: state.Machine, memory: Memory) -> None:
        self.code, self.m, self.memory = code, machine, memory

    def entity(self, number: int) -> str:
        s = self.m.scalars
        warps, per_cta, per_rank = int(s[state.WARPS]), int(s[state.WARPS_PER_CTA]), int(s[state.CTAS_PER_RANK])
        cta = number // per_cta if number < warps else number - warps
        rank = f"rank {cta // per_rank} " if warps > per_cta * per_rank else ""
        what = f"warp {number % per_cta}" if number < warps else "asynchronous copies"
        return f"{rank}CTA {cta % per_rank} {what}"

    def place(self, flat: int) -> str:
        s = self.m.scalars
        if flat >= s[state.CONSTANT_START]:
            return self.memory.describe(state.CONSTANT_BASE + flat - int(s[state.CONSTANT_START]))
        if flat >= s[state.SHARED_START]:
            return f"shared byte {(flat - int(s[state.SHARED_START])) % int(s[state.SHARED_STRIDE])}"
        return self.memory.describe(state.GLOBAL_BASE + flat)

    def address(self, address: int) -> str:
        if address < state.SHARED_BASE:
            limit = int(self.m.scalars[state.SHARED_BYTES])
            return f"address {address:#x} (shared memory has {limit} bytes)"
        return self.memory.describe(address)

    def finding(self, row: NDArray[np.int64]) -> Finding:
        kind, pc, warp, lane, value, other = (int(x) for x in row)
        i = self.code.origin[pc]
        where = f"{self.entity(warp)} lane {lane}"
        address_kinds = (state.F_UNSET_READ, state.F_OUT_OF_BOUNDS, state.F_MISALIGNED, state.F_WRITE_CONSTANT)
        if kind in (*address_kinds, state.F_NO_MULTICAST):
            where += f", {self.address(value)}"
        elif state.F_RACE_WRITE_READ <= kind <= state.F_RACE_LANES:
            where += f", {self.place(value << int(self.m.scalars[state.CELL_SHIFT]))}, with {self.entity(other)}"
        elif kind == state.F_BARRIER_COUNT:
            where += f", {value} threads"
        elif kind == state.F_BARRIER_OVERFLOW:
            where += f", {value} arrivals for {other}"
        return Finding(TITLES[kind], i.line, " ".join(i.text.split()), where)

    def stuck(self, outcome: int) -> Finding:
        """Where everybody waits."""
        titles = {DEADLOCK: "deadlock", LIVELOCK: "livelock: everybody waits and nothing changes"}
        title = titles.get(outcome, "the limit of instructions is reached")
        places: dict[int, list[str]] = {}
        for warp in range(int(self.m.scalars[state.WARPS])):
            alive = int(self.m.masks[warp, state.M_ALIVE])
            lanes = [lane for lane in range(32) if alive >> lane & 1]
            for pc in sorted({int(self.m.lanes[warp, state.L_PC, lane]) for lane in lanes}):
                here = [lane for lane in lanes if self.m.lanes[warp, state.L_PC, lane] == pc]
                at_barrier = self.m.lanes[warp, state.L_BARRIER, here].any()
                places.setdefault(pc - int(at_barrier), []).append(self.entity(warp))
        first = min(places) if places else 0
        texts = []
        for pc, who in sorted(places.items())[:4]:
            i = self.code.origin[pc]
            texts.append(f"{len(who)} warps ({who[0]}) at line {i.line} [{' '.join(i.text.split())}]")
        i = self.code.origin[first]
        return Finding(title, i.line, " ".join(i.text.split()), "; ".join(texts))

    def leftovers(self) -> list[Finding]:
        """Barriers and mbarriers that somebody arrived at in vain."""
        found = []
        for number in np.flatnonzero(self.m.barriers[:, 0]):
            where = f"barrier {number % 16} of CTA {number // 16}, {int(self.m.barriers[number, 0])} threads"
            found.append(Finding(TITLES[state.F_BARRIER_LEFT], 0, "end of the kernel", where))
        for row in self.m.objects:
            if row[state.O_KIND] == state.MBARRIER and row[state.O_BYTES] != 0:
                where = f"{self.place(int(row[state.O_KEY]) - 1)}, {int(row[state.O_BYTES])} bytes are missing"
                found.append(Finding(TITLES[state.F_TRANSACTION_LEFT], 0, "end of the kernel", where))
        return found

    def traffic(self) -> tuple[Traffic, ...]:
        rows = []
        for pc in np.flatnonzero(self.m.counters[:, state.N_WARPS]):
            i, n = self.code.origin[pc], self.m.counters[pc]
            space = "prefetch" if ".prefetch" in i.opcode else "shared" if ".shared" in i.opcode else "global"
            counts = (int(n[c]) for c in (state.N_WARPS, state.N_TRANSFERS, state.N_IDEAL))
            rows.append(Traffic(i.line, " ".join(i.text.split()), space, *counts))
        return tuple(rows)
