"""What a mutant of a kernel must pass to survive: comparisons of a stage and of a whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from stepkernel.cuda.bound_step import StepFailed
from stepkernel.cuda.cases import Case, StageCase
from stepkernel.cuda.check import Emulated, live_contexts
from stepkernel.cuda.emulate import EmulatedDevice
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.limits import exceeding
from stepkernel.cuda.spec import PATIENCE
from stepkernel.cuda.spread import Spread
from stepkernel.cuda.step_block import FAILURE
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import StepInputs
from stepkernel.program.stages import Argmax, KdaCore
from stepkernel.runtime.scenario import without_state_table

LONG_CONTEXTS = (300, 5, 130)  # several blocks of the attention, a page that begins, pages that are full
MANY_CTAS = 14  # more than the small stages have pieces
PEAKS = 16  # trials of argmax: of 3 rows of 1536, every run of 32 logits has the largest at one of its ends
SHORT_PATIENCE = 320  # questions of a CTA that waits, where one is missing; the last one asks for the failure word too


@dataclass(frozen=True)
class Run:
    """What came of a trial. noticed: what is wrong, if something is; sectors of weights read, 0 if not counted."""

    noticed: str
    instructions: int
    sectors: int = 0
    fetched: int = 0  # sectors brought to L2 ahead


Trial = Callable[[str, int], Run]  # PTX, limit of instructions


@dataclass(frozen=True)
class Model:
    """A case with short contexts, one request of padding; and with long ones, every request live and going on from any
    of its slots."""

    short: Emulated
    long: Emulated
    later: StepInputs


def model_of(case: Case, weights: Weights) -> Model:
    long = Emulated(case, weights, LONG_CONTEXTS[: case.requests], seed=1)
    return Model(Emulated(case, weights, live_contexts(case)), long, long.later(2))


def of_stage(item: StageCase, model: Model) -> list[Trial]:
    """A stage's kernel:

    * as planned, warps in a fixed order, short contexts, one request of padding; no weight may be read
      twice (a test holds the kernels themselves to that);
    * one CTA does all pieces one after another, warps in a random order, every request is live and continues from any
      of its slots, long contexts, wide inputs;
    * many CTAs, another random order, inputs of about 1;
    * the KDA core with one slot for each request too, unless it recovers states; argmax with its largest logits all
      over the vocabulary.
    """
    short, long, later = model.short, model.long, model.later
    stages: list[Trial] = [
        partial(_compare, item, short, short.inputs(), sectors=True),
        partial(_compare, item, long, later, seed=1, grid=1, spread=Spread(3, 6.0)),
        partial(_compare, item, long, later, seed=2, grid=MANY_CTAS, spread=Spread(6, 1.0)),
    ]
    stage = long.plan.program.stages[item.stage]
    if isinstance(stage, KdaCore) and not later.recovers:
        stages.append(partial(_compare, item, short, without_state_table(short.inputs())))
    if isinstance(stage, Argmax):
        spreads = [Spread(6, 1.0, peaks=(number, PEAKS)) for number in range(PEAKS)]
        stages += [partial(_compare, item, long, later, spread=spread) for spread in spreads]
    return stages


def of_step(item: Case, model: Model) -> list[Trial]:
    """A whole step: in two orders, after 2^33 arrivals, without one of its CTAs, and after a failure elsewhere."""
    return [partial(call, item, model.short) for call in (_step, _step_after_days, _lose, _hear_of_a_loss)]


def without_a_cta(ptx: str, grid: int, patience: int = SHORT_PATIENCE) -> str:
    """A kernel that waits for a CTA that is not there, with little patience."""
    return impatient(ptx, patience).replace("%nctaid.x", str(grid + 1))


def impatient(ptx: str, patience: int = SHORT_PATIENCE) -> str:
    for factor in (4, 1):  # the barrier of several ranks has more patience than an exchange
        for less in (1, 0):
            ptx = ptx.replace(str(factor * PATIENCE - less), str(factor * patience - less))
    return ptx


def _compare(
    item: StageCase,
    model: Emulated,
    inputs: StepInputs,
    ptx: str,
    limit: int,
    seed: int | None = None,
    grid: int | None = None,
    spread: Spread | None = None,
    sectors: bool = False,
) -> Run:
    """One comparison of a stage's kernel with the reference. grid: CTAs, if not as planned; sectors: whether weights
    are counted as they are read."""
    found = model.stages(ptx, item.plan(), item.stages(), seed, inputs, limit, grid, spread, sectors)
    noticed = "wrong result" if exceeding(found) else ""
    return Run(noticed, model.instructions, model.weight_sectors, model.fetched_sectors)


def _step(item: Case, model: Emulated, ptx: str, limit: int) -> Run:
    step = model.step(ptx, count=True, instruction_limit=limit)
    return Run("wrong result" if step.wrong else "", step.result.instructions, fetched=step.result.fetched)


def _step_after_days(item: Case, model: Emulated, ptx: str, limit: int) -> Run:
    """In a random order; the arrivals have more than 32 bits, and the lower 32 are no multiple of the grid."""
    step = model.step(ptx, seed=1, instruction_limit=limit, barriers_before=(1 << 33) // item.grid + 1)
    return Run("wrong result" if step.wrong else "", step.result.instructions)


def _lose(item: Case, model: Emulated, ptx: str, limit: int) -> Run:
    """The kernel believes in one CTA more than there are; it must give up and say so."""
    _, executor, device = model.executors(without_a_cta(ptx, item.grid), instruction_limit=limit)
    return _must_fail(executor, device, model.inputs(), "a lost CTA is not reported")


def _hear_of_a_loss(item: Case, model: Emulated, ptx: str, limit: int) -> Run:
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
