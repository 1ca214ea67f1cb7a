"""What each stage of a step should take on a GPU, before anybody measured it: its bytes, and what waiting adds."""

from dataclasses import dataclass

from stepkernel.cuda.cases import Case
from stepkernel.cuda.dims import posting_of, sharing
from stepkernel.cuda.plan import Plan
from stepkernel.program.cost import Load, cost


@dataclass(frozen=True)
class Gpu:
    """Data sheet: read bandwidth in GB/s, and the multiprocessors, which is the number of CTAs."""

    bandwidth: float
    multiprocessors: int


GPUS = {"h200": Gpu(4800.0, 132), "gb300": Gpu(8000.0, 148)}


@dataclass(frozen=True)
class Assumptions:
    """None of these is measured.

    share      of the data sheet's bandwidth that a stage reads with
    barrier    microseconds: an atomic addition in L2, then the word read by those who wait, each about 0.7
    last       microseconds: the atomic addition by which CTAs that share a row or a head find out who comes last
    exchange   microseconds: a store into a peer's memory over NVLink, 1 to 2, then the own mailbox read
    """

    share: float = 0.85
    barrier: float = 1.5
    exchange: float = 2.5
    last: float = 0.7


@dataclass(frozen=True)
class Expected:
    """A stage, summed over the layers that have it. Milliseconds."""

    stage: str
    count: int
    floor: float
    barriers: int
    lasts: int
    exchanges: int
    time: float


def expected(case: Case, gpu: Gpu, context: int, assumptions: Assumptions) -> list[Expected]:
    """time = bytes / (share x bandwidth) + barriers x barrier + lasts x last + exchanges x exchange. Nothing overlaps
    in it, so weights fetched while a barrier is waited for make it less, and stages too small to fill the GPU make it
    more.

    Raises ValueError for a step that the kernel cannot do.
    """
    plan = case.plan()
    load = Load(case.requests, case.queries, context)
    stages: dict[str, list[tuple[float, int, int, int]]] = {}
    for index, stage in enumerate(plan.program.stages):
        inner = stage.name.partition(".")[2] if stage.name.startswith("L") else stage.name
        stages.setdefault(inner, []).append((cost(stage, load).bytes, *_waits(plan, index)))
    found = []
    for name, layers in stages.items():
        size, barriers, lasts, exchanges = (sum(column) for column in zip(*layers, strict=True))
        floor = size / gpu.bandwidth / 1e6
        waiting = barriers * assumptions.barrier + lasts * assumptions.last + exchanges * assumptions.exchange
        time = floor / assumptions.share + waiting / 1e3
        found.append(Expected(name, len(layers), floor, barriers, lasts, exchanges, time))
    return found


def _waits(plan: Plan, stage: int) -> tuple[int, int, int]:
    """(barriers, CTAs that come last, exchanges) of a stage's records."""
    first, last = plan.ranges[stage]
    records = plan.records[first:last]
    posted = {record.words["number"] for record in records if posting_of(plan.codes[record.code])}
    shared = sum(sharing(plan.codes[record.code]) > 1 for record in records)
    return sum(record.wait for record in records), shared, len(posted)
