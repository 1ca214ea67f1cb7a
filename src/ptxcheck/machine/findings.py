"""Notes of what went wrong, at most one per kind and instruction."""

from typing import Any

from ptxcheck.machine import at, state
from ptxcheck.machine.jit import Int, apart, inner


@inner
def report(m: Any, kind: Int, instruction: Int, warp: Int, lane: Int, offset: Int, other: Int) -> None:
    """Adds a finding unless one of the same kind and instruction is there; a fatal kind stops the launch."""
    apart()
    scalars, findings = at.scalars(m), at.findings(m)
    count = scalars[state.FINDINGS]
    if kind >= state.FIRST_FATAL and scalars[state.FATAL] == 0:
        scalars[state.FATAL] = kind
    for i in range(count):
        if findings[i, 0] == kind and findings[i, 1] == instruction:
            return
    if count == len(findings):
        return
    findings[count, 0] = kind
    findings[count, 1] = instruction
    findings[count, 2] = warp
    findings[count, 3] = lane
    findings[count, 4] = offset
    findings[count, 5] = other
    scalars[state.FINDINGS] = count + 1
