"""How many single mistakes in the kernels' PTX do the emulated tests notice?"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxcheck import LaunchError, PtxError
from ptxcheck.mutate import Mutant, mutants
from stepkernel.cuda.cases import Case, StageCase
from stepkernel.cuda.check import Emulated, exceeding
from stepkernel.cuda.executor import StepFailed
from stepkernel.cuda.spec import PATIENCE

# Seed and CTAs of a stage's runs: as planned in a fixed order of warps, then all pieces one after another in one CTA in
# a random order, so that memory is used again.
RUNS: tuple[tuple[int | None, int | None], ...] = ((None, None), (1, 1))
LEAST = 0.8  # of the mutants must be noticed; the score that is kept may be higher and may not fall
SLOWER = 20  # times the instructions of the kernel itself: a mutant that runs longer hangs


@dataclass(frozen=True)
class Outcome:
    """`noticed`: how; empty if the mutant survived."""

    kernel: str
    kind: str
    line: int
    before: str
    after: str
    noticed: str


def study(
    item: Case | StageCase, ptx: str, emulated: Emulated, count: int, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Runs up to `count` mutants of one kernel. Those of a whole step are in the walk over the table and its barrier,
    those of a stage in the code behind them. Mutants that are no valid PTX do not count."""
    end = last_line_of_walk(ptx)
    part = range(end + 1, ptx.count("\n") + 2) if isinstance(item, StageCase) else range(1, end + 1)
    lines = set(part) - _for_negative_numbers(ptx)
    limit = 0
    for run in RUNS:
        if _run(item, ptx, emulated, *run, 20_000_000_000):
            raise ValueError(f"{item.name}: the kernel itself is wrong")
        limit = max(limit, SLOWER * emulated.instructions)
    outcomes = []
    for mutant in mutants(ptx, count, seed=len(ptx), lines=lines):
        noticed = _notice(item, mutant, emulated, limit)
        if noticed is None:
            continue
        outcome = Outcome(item.name, mutant.kind, mutant.line, mutant.before, mutant.after, noticed)
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def _for_negative_numbers(ptx: str) -> set[int]:
    """Lines that matter for negative numbers only: the compiler makes them for every division that rounds down. Rows,
    tiles and their like are never negative, so no test can notice a change there."""
    sign = re.compile(r"setp\.lt\.s(32|64)\s+%p\d+, %rd?\d+, 0;|shr\.s32\s+%r\d+, %r\d+, 31;")
    return {number for number, row in enumerate(ptx.split("\n"), 1) if sign.search(row)}


def last_line_of_walk(ptx: str) -> int:
    """Up to the last CTA barrier of the barrier between stages; the stages' code follows."""
    rows = ptx.split("\n")
    arrival = next(k for k, row in enumerate(rows) if "global.add.u64" in row)
    after = [k for k in range(arrival, len(rows)) if "bar.sync" in rows[k]]
    return after[1] + 1


def summary(outcomes: list[Outcome], source_hash: str) -> dict[str, Any]:
    """What the repository keeps."""
    kinds: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.kind, Counter())["noticed" if outcome.noticed else "survived"] += 1
    noticed = sum(bool(outcome.noticed) for outcome in outcomes)
    survivors = [
        {"kernel": o.kernel, "kind": o.kind, "line": o.line, "before": o.before, "after": o.after}
        for o in outcomes
        if not o.noticed
    ]
    return {
        "source_hash": source_hash,
        "mutants": len(outcomes),
        "noticed": noticed,
        "rate": round(noticed / max(1, len(outcomes)), 4),
        "how": dict(Counter(outcome.noticed for outcome in outcomes if outcome.noticed).most_common()),
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "survivors": survivors,
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """Raises ValueError, and writes nothing, if fewer are noticed than required or than the file there says."""
    floor = LEAST
    if path.exists():
        floor = max(floor, json.loads(path.read_text())["rate"])
    if found["rate"] < floor:
        raise ValueError(f"{path}: {found['rate']:.1%} of the mutants were noticed, at least {floor:.1%} must be")
    path.write_text(json.dumps(found, indent=1) + "\n")


def _run(item: Case | StageCase, ptx: str, emulated: Emulated, seed: int | None, grid: int | None, limit: int) -> str:
    """Runs a kernel; says how its result is wrong, if it is."""
    if isinstance(item, StageCase):
        found = emulated.stages(ptx, item.plan(), item.stages(), seed, None, limit, grid)
        return "wrong result" if exceeding(found) else ""
    if grid is not None:
        return _lose_a_cta(item, ptx, emulated, limit)
    step = emulated.step(ptx, seed, instruction_limit=limit)
    emulated.instructions = step.result.instructions
    return "wrong result" if step.wrong else ""


def _lose_a_cta(item: Case, ptx: str, emulated: Emulated, limit: int) -> str:
    """The kernel believes in one CTA more than there are; it must give up and say so."""
    _, executor, device = emulated.executors(without_a_cta(ptx, item.grid), instruction_limit=limit)
    try:
        executor.run(emulated.inputs())
    except StepFailed:
        emulated.instructions = device.results[-1].instructions
        return ""
    return "a lost CTA is not reported"


def without_a_cta(ptx: str, grid: int) -> str:
    """A kernel that waits for a CTA that is not there, with little patience."""
    short = ptx.replace(str(PATIENCE - 1), "299").replace(str(PATIENCE), "300")
    return short.replace("%nctaid.x", str(grid + 1))


def _notice(item: Case | StageCase, mutant: Mutant, emulated: Emulated, limit: int) -> str | None:
    """How a mutant is noticed, "" if it is not, None if it is no PTX."""
    for run in RUNS:
        try:
            noticed = _run(item, mutant.text, emulated, *run, limit)
        except PtxError:
            return None
        except LaunchError as error:
            return error.result.findings[0].title.split(":")[0]
        except StepFailed:
            return "the kernel gave up"
        if noticed:
            return noticed
    return ""
