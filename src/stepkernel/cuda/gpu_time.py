"""Times whole steps of the published models on a GPU, by events and by graph replay, next to their bytes and to the
same stages in torch."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from stepkernel.cuda.bound_step import BoundStep
from stepkernel.cuda.cache_map import allocate
from stepkernel.cuda.cases import Case, published
from stepkernel.cuda.gpu import Gpu, GpuDevice
from stepkernel.cuda.loopback import Loopback, spaced
from stepkernel.cuda.plan import Plan
from stepkernel.cuda.random_weights import RandomOnDevice, weight_sizes
from stepkernel.cuda.torch_time import described, time_torch
from stepkernel.model.shard import Shard
from stepkernel.program.cost import Load, floor_ms, step_cost
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.runtime.caches import allocate_caches, cache_bytes

CONTEXT = 1024
WARM_UP, TIMES = 20, 200
ROOM = 6 << 30  # of the GPU's memory for the copies that are timed, the mailbox, buffers and the driver
ASSUMED_GBPS = 4800.0  # an H200's memory, for the dry run alone
FILL_GBPS = 1000.0


@dataclass(frozen=True)
class Timing:
    """What will be timed, known without a GPU. `floor_ms` at ASSUMED_GBPS."""

    case: str
    rows: int
    ranks: int
    weight_bytes: int
    cache_bytes: int
    step_bytes: float
    floor_ms: float


def models() -> list[list[Case]]:
    """Published steps, those of one model together: they share its weights."""
    return [list(cases) for _, cases in groupby(published(), key=lambda case: (case.config, case.ranks))]


def plan_of(case: Case) -> Plan:
    return case.plan() if case.ranks == 1 else spaced(case.plan())


def caches_of(cases: Sequence[Case], context: int = CONTEXT) -> Caches:
    """Shapes of caches in which all of the steps find their contexts."""
    case = cases[0]
    pages = max(c.requests * _pages(c, context) for c in cases) + 1
    slots = max(c.requests * c.queries for c in cases) + 1
    drafts = max(c.queries for c in cases) - 1
    return allocate_caches(case.config, pages, slots, case.page_tokens, "bf16", drafts, Shard(0, case.ranks))


def expected(cases: Sequence[Case], context: int = CONTEXT) -> list[Timing]:
    """Memory and bytes of the steps of one model."""
    caches = cache_bytes(caches_of(cases, context))
    found = []
    for case in cases:
        plan = plan_of(case)
        moved = step_cost(plan.program, Load(case.requests, case.queries, context)).bytes
        weights = sum(weight_sizes(plan).values())
        floor = floor_ms(moved, ASSUMED_GBPS)
        found.append(Timing(case.name, case.requests * case.queries, case.ranks, weights, caches, moved, floor))
    return found


def seconds(timings: Sequence[Timing]) -> float:
    """How long one model takes: weights made, then steps twice as slow as their floor, by events and by replay."""
    steps = sum(2 * (WARM_UP + TIMES) * 2 * t.floor_ms / 1e3 for t in timings)
    return timings[0].weight_bytes / FILL_GBPS / 1e9 + steps + 2.0


def time_model(
    cases: Sequence[Case],
    directory: Path,
    gpu: Gpu,
    say: Callable[[str], None],
    with_torch: bool = True,
    context: int = CONTEXT,
) -> Iterator[dict[str, Any]]:
    """Steps of one model, all over one copy of its weights. A model that does not fit is told of, not timed."""
    plans = [plan_of(case) for case in cases]
    known = expected(cases, context)
    need, free = known[0].weight_bytes + known[0].cache_bytes + ROOM, gpu.memory()[0]
    if need > free:
        reason = f"not timed: needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        say(f"{cases[0].name}: {reason}")
        yield from ({**asdict(timing), "reason": reason} for timing in known)
        return
    bandwidth = gpu.copy_gbps()
    devices: list[GpuDevice] = []
    try:
        devices += [gpu.load(directory, case.spec()) for case in cases]
        sizes = {key: size for plan in plans for key, size in weight_sizes(plan).items()}
        weights = RandomOnDevice(sizes, devices[0])
        caches = allocate(caches_of(cases, context), devices[0])
        for case, plan, device, timing in zip(cases, plans, devices, known, strict=True):
            peers = None if case.ranks == 1 else Loopback(plan, device)
            # How long the windows are is known to the caches alone; no kernel depends on it.
            geometry = replace(plan.geometry, window=caches.shapes.conv[0].shape[1])
            step = BoundStep(replace(plan, geometry=geometry), weights, caches, device, peers)
            inputs = inputs_of(case, context)
            row = {**asdict(timing), **_time(case, step, device, inputs)}
            floor = floor_ms(timing.step_bytes, bandwidth)
            row |= {"context": context, "copy_gbps": bandwidth, "floor_ms": floor, "of_floor": floor / row["ms_median"]}
            say(
                f"{case.name}: {row['ms_median']:.3f} ms by events, {row['ms_replay']:.3f} ms by graph replay, floor "
                f"{row['floor_ms']:.3f} ms at {bandwidth:.0f} GB/s measured copy bandwidth"
            )
            if with_torch:
                row["torch"] = time_torch(step, inputs, weights, gpu, row["ms_replay"])
                say(f"{case.name}: {described(row['torch'])}")
            yield row
    finally:
        for device in devices:
            device.close()


def _time(case: Case, step: BoundStep, device: GpuDevice, inputs: StepInputs) -> dict[str, Any]:
    step.set_inputs(inputs)
    step.launch()  # raises if it fails
    arguments = step.start()
    # A launch may be repeated as it is: the exchanges of a rank that is alone wait for nobody else.
    events = device.gpu.milliseconds(lambda: device.start(arguments), WARM_UP + TIMES)[WARM_UP:]
    replay = device.gpu.milliseconds(device.recorded(arguments), WARM_UP + TIMES)[WARM_UP:]
    step.finish()
    found = {
        "gpu": device.gpu.name,
        "ms_median": statistics.median(events),
        "ms_best": min(events),
        "ms_replay": statistics.median(replay),
        "exchanges": "to itself: without a link, and without a wait for others" if case.ranks > 1 else "none",
    }
    ids = step.read_buffer("expert_ids", case.requests * case.queries)
    return {**found, "distinct_experts_of_the_last_layer": len(np.unique(ids))}


def inputs_of(case: Case, context: int = CONTEXT) -> StepInputs:
    """A step of all requests with `context` tokens each, on pages and slots in order."""
    each = _pages(case, context)
    table = 1 + np.arange(case.requests * each, dtype=np.int32).reshape(case.requests, each)
    positions = context + np.arange(case.queries)
    mapping = table[:, positions // case.page_tokens].astype(np.int64) * case.page_tokens + positions % case.page_tokens
    slots = 1 + np.arange(case.requests * case.queries, dtype=np.int32).reshape(case.requests, case.queries)
    return StepInputs(
        queries=case.queries,
        token_ids=np.arange(case.requests * case.queries, dtype=np.int32),
        lengths=np.full(case.requests, context + case.queries, np.int32),
        page_table=table,
        slot_mapping=mapping.ravel(),
        state_slots=slots,
        accepted=np.ones(case.requests, np.int32),
    )


def _pages(case: Case, context: int) -> int:
    """Of a request."""
    return -(-(context + case.queries) // case.page_tokens)
