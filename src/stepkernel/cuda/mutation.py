"""How many single mistakes in the kernels' PTX do the emulated comparisons notice?"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptxcheck import LaunchError, PtxError
from ptxcheck.mutate import Mutant, mutants
from stepkernel.cuda.bound_step import StepFailed
from stepkernel.cuda.mutation_trials import Run, Trial

LEAST = 0.9  # of the mutants must be noticed; the score that is kept may be higher and may not fall
SLOWER = 20  # times the instructions of the kernel itself: a mutant that runs longer hangs
DRAW = 0  # seed of the draw of mutants, the same for every kernel
UNLIMITED = 20_000_000_000  # instructions


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
    name: str, ptx: str, trials: Sequence[Trial], count: int, report: Callable[[Outcome], None], walk: bool = False
) -> list[Outcome]:
    """Runs up to `count` mutants of one kernel, each through `trials` until one notices it. Those with `walk` are in
    the walk over the table and its barrier, others in the code behind them. Mutants that are no valid PTX do not
    count."""
    end = last_line_of_walk(ptx)
    lines = range(1, end + 1) if walk else range(end + 1, ptx.count("\n") + 2)
    own = [trial(ptx, UNLIMITED) for trial in trials]
    if any(run.noticed for run in own):
        raise ValueError(f"{name}: the kernel itself is wrong: {[run.noticed for run in own]}")
    outcomes = []
    for mutant in mutants(ptx, count, seed=DRAW, lines=lines):
        noticed = _notice(mutant, trials, own)
        if noticed is None:
            continue
        outcome = Outcome(name, mutant.kind, mutant.line, mutant.before, mutant.after, noticed)
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def last_line_of_walk(ptx: str) -> int:
    """Up to the last CTA barrier of the barrier between stages; the stages' code follows."""
    rows = ptx.split("\n")
    arrival = next(k for k, row in enumerate(rows) if "global.add.u64" in row)
    after = [k for k in range(arrival, len(rows)) if "bar.sync" in rows[k]]
    return after[1] + 1


def summary(outcomes: list[Outcome], source_hash: str, reasons: dict[str, str] | None = None) -> dict[str, Any]:
    """What the repository keeps. reasons: why a mutant cannot or need not be noticed, by `key`."""
    kinds: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.kind, Counter())["noticed" if outcome.noticed else "survived"] += 1
    noticed = sum(bool(outcome.noticed) for outcome in outcomes)
    survivors = [_survivor(outcome, reasons or {}) for outcome in outcomes if not outcome.noticed]
    return {
        "source_hash": source_hash,
        "mutants": len(outcomes),
        "noticed": noticed,
        "rate": round(noticed / max(1, len(outcomes)), 4),
        "how": dict(Counter(outcome.noticed for outcome in outcomes if outcome.noticed).most_common()),
        "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
        "survivors": survivors,
    }


def _survivor(outcome: Outcome, reasons: dict[str, str]) -> dict[str, Any]:
    found = {name: value for name, value in asdict(outcome).items() if name != "noticed"}
    return {**found, "why": reasons.get(key(found), "")}


def key(survivor: dict[str, Any]) -> str:
    return f"{survivor['kernel']}: {survivor['kind']}: {survivor['before']} -> {survivor['after']}"


def known_reasons(path: Path) -> dict[str, str]:
    """Those written into a file of earlier survivors."""
    if not path.exists():
        return {}
    return {key(survivor): survivor.get("why", "") for survivor in json.loads(path.read_text())["survivors"]}


def write(path: Path, found: dict[str, Any]) -> None:
    """Raises ValueError, and writes nothing, if fewer are noticed than required or than the file there says."""
    floor = LEAST
    if path.exists():
        floor = max(floor, json.loads(path.read_text())["rate"])
    if found["rate"] < floor:
        raise ValueError(f"{path}: {found['rate']:.1%} of the mutants were noticed, at least {floor:.1%} must be")
    path.write_text(json.dumps(found, indent=1) + "\n")


def _notice(mutant: Mutant, trials: Sequence[Trial], own: Sequence[Run]) -> str | None:
    """How a mutant is noticed, "" if it is not, None if it is no PTX. own: what the kernel itself does."""
    try:
        for trial, usual in zip(trials, own, strict=True):
            run = trial(mutant.text, SLOWER * usual.instructions)
            if run.noticed:
                return run.noticed
            if run.sectors > usual.sectors:
                return "weights are read twice"
            if run.fetched != usual.fetched:
                return "weights are not fetched ahead as planned"
    except PtxError:
        return None
    except LaunchError as error:
        return error.result.findings[0].title.split(":")[0]
    except StepFailed:
        return "the kernel gave up"
    return ""
