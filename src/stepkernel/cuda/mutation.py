"""How many single mistakes in the kernels' PTX do the emulated comparisons notice?"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ptxcheck import LaunchError, PtxError
from ptxcheck.mutate import Mutant, mutants
from stepkernel.cuda.bound_step import StepFailed
from stepkernel.cuda.cases import Case, StageCase
from stepkernel.cuda.check import Emulated, Spread, exceeding, live_contexts
from stepkernel.cuda.emulate import EmulatedDevice
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.spec import PATIENCE
from stepkernel.cuda.step_block import FAILURE
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import StepInputs

LEAST = 0.9  # of the mutants must be noticed; the score that is kept may be higher and may not fall
SLOWER = 20  # times the instructions of the kernel itself: a mutant that runs longer hangs
DRAW = 0  # seed of the draw of mutants, the same for every kernel
LONG_CONTEXTS = (300, 5, 130)  # several blocks of the attention, a page that begins, pages that are full
SHORT_PATIENCE = 320  # questions of a CTA that waits, where one is missing; the last one asks for the failure word too
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


@dataclass(frozen=True)
class Trial:
    """One comparison of a stage's kernel with the reference. grid: CTAs, if not as planned; sectors: whether weights
    are counted as they are read."""

    emulated: Emulated
    inputs: StepInputs
    seed: int | None = None
    grid: int | None = None
    spread: Spread | None = None
    sectors: bool = False


@dataclass(frozen=True)
class Run:
    """What came of a trial. noticed: what is wrong, if something is; sectors of weights read, 0 if not counted."""

    noticed: str
    instructions: int
    sectors: int = 0
    fetched: int = 0  # sectors brought to L2 ahead


@dataclass(frozen=True)
class Trials:
    """What a mutant must pass to survive."""

    emulated: Emulated
    stages: tuple[Trial, ...]


def trials(case: Case, weights: Weights) -> Trials:
    """Of a stage's kernel:

    * as planned, warps in a fixed order, short contexts, one request of padding; no weight may be read
      twice (a test holds the kernels themselves to that);
    * one CTA does all pieces one after another, warps in a random order, every request is live and continues from any
      of its slots, long contexts, wide inputs;
    * two CTAs more than planned, another random order, inputs of about 1.
    """
    short = Emulated(case, weights, live_contexts(case))
    long = Emulated(case, weights, LONG_CONTEXTS[: case.requests], seed=1)
    later = long.later(2)
    stages = (
        Trial(short, short.inputs(), sectors=True),
        Trial(long, later, seed=1, grid=1, spread=Spread(3, 6.0)),
        Trial(long, later, seed=2, grid=case.grid + 2, spread=Spread(6, 1.0)),
    )
    return Trials(short, stages)


def study(
    item: Case | StageCase, ptx: str, tried: Trials, count: int, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Runs up to `count` mutants of one kernel. Those of a whole step are in the walk over the table and its barrier,
    those of a stage in the code behind them. Mutants that are no valid PTX do not count."""
    end = last_line_of_walk(ptx)
    lines = range(end + 1, ptx.count("\n") + 2) if isinstance(item, StageCase) else range(1, end + 1)
    own = list(_runs(item, ptx, tried))
    if any(run.noticed for run in own):
        raise ValueError(f"{item.name}: the kernel itself is wrong: {[run.noticed for run in own]}")
    outcomes = []
    for mutant in mutants(ptx, count, seed=DRAW, lines=lines):
        noticed = _notice(item, mutant, tried, own)
        if noticed is None:
            continue
        outcome = Outcome(item.name, mutant.kind, mutant.line, mutant.before, mutant.after, noticed)
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


def without_a_cta(ptx: str, grid: int, patience: int = SHORT_PATIENCE) -> str:
    """A kernel that waits for a CTA that is not there, with little patience."""
    short = ptx.replace(str(PATIENCE - 1), str(patience - 1)).replace(str(PATIENCE), str(patience))
    return short.replace("%nctaid.x", str(grid + 1))


def _notice(item: Case | StageCase, mutant: Mutant, tried: Trials, own: list[Run]) -> str | None:
    """How a mutant is noticed, "" if it is not, None if it is no PTX. own: what the kernel itself does."""
    limits = [SLOWER * run.instructions for run in own]
    try:
        for run, usual in zip(_runs(item, mutant.text, tried, limits), own, strict=True):
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


def _runs(item: Case | StageCase, ptx: str, tried: Trials, limits: list[int] | None = None) -> Iterator[Run]:
    calls: list[Callable[[int], Run]]
    if isinstance(item, StageCase):
        calls = [partial(_compare, item, ptx, trial) for trial in tried.stages]
    else:
        calls = [partial(call, item, ptx, tried.emulated) for call in (_step, _step_after_days, _lose, _hear_of_a_loss)]
    for call, limit in zip(calls, limits or [UNLIMITED] * len(calls), strict=True):
        yield call(limit)


def _compare(item: StageCase, ptx: str, trial: Trial, limit: int) -> Run:
    model = trial.emulated
    found = model.stages(
        ptx, item.plan(), item.stages(), trial.seed, trial.inputs, limit, trial.grid, trial.spread, trial.sectors
    )
    noticed = "wrong result" if exceeding(found) else ""
    return Run(noticed, model.instructions, model.weight_sectors, model.fetched_sectors)


def _step(item: Case, ptx: str, model: Emulated, limit: int) -> Run:
    step = model.step(ptx, count=True, instruction_limit=limit)
    return Run("wrong result" if step.wrong else "", step.result.instructions, fetched=step.result.fetched)


def _step_after_days(item: Case, ptx: str, model: Emulated, limit: int) -> Run:
    """In a random order; the arrivals have more than 32 bits, and the lower 32 are no multiple of the grid."""
    step = model.step(ptx, seed=1, instruction_limit=limit, barriers_before=(1 << 33) // item.grid + 1)
    return Run("wrong result" if step.wrong else "", step.result.instructions)


def _lose(item: Case, ptx: str, model: Emulated, limit: int) -> Run:
    """The kernel believes in one CTA more than there are; it must give up and say so."""
    _, executor, device = model.executors(without_a_cta(ptx, item.grid), instruction_limit=limit)
    return _must_fail(executor, device, model.inputs(), "a lost CTA is not reported")


def _hear_of_a_loss(item: Case, ptx: str, model: Emulated, limit: int) -> Run:
    """Another CTA has given up: this must end the wait long before the CTA's own patience does."""
    _, executor, device = model.executors(without_a_cta(ptx, item.grid, PATIENCE), instruction_limit=limit)
    device.write(executor.sync + FAILURE, np.ones(1, np.int32))
    return _must_fail(executor, device, model.inputs(), "a loss elsewhere is not heard of")


def _must_fail(executor: CudaExecutor, device: EmulatedDevice, inputs: StepInputs, otherwise: str) -> Run:
    try:
        executor.run(inputs)
    except StepFailed:
        return Run("", device.results[-1].instructions)
    return Run(otherwise, device.results[-1].instructions)
