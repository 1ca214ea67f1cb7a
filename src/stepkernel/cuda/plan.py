"""What the kernel needs of a program: the codes it is compiled with, and the records it walks.

Records name what they point to; the executor knows the addresses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepkernel.cuda.dims import Dims
from stepkernel.cuda.planner import plan_stage
from stepkernel.cuda.planner.ahead import fetched
from stepkernel.cuda.planner.builder import Builder
from stepkernel.cuda.records import SIZES, At, Geometry, Place, Record, Word
from stepkernel.program.program import Program, reads, waits, writes

__all__ = ["SIZES", "At", "Geometry", "Place", "Plan", "Record", "Word", "codes_of", "make_plan", "only"]


@dataclass(frozen=True)
class Plan:
    """codes: what the kernel is compiled with; ranges: the records of each stage; scratch: bytes by name, names that
    start with "counters" must hold zeros before the first launch; slot_bytes: of a mailbox, 0 for a single rank."""

    program: Program
    geometry: Geometry
    codes: tuple[Dims, ...]
    records: tuple[Record, ...]
    ranges: tuple[tuple[int, int], ...]
    scratch: Mapping[str, int]
    slot_bytes: int = 0


def make_plan(program: Program, geometry: Geometry) -> Plan:
    """Raises ValueError for dims that the stages cannot do."""
    builder = Builder(program, geometry)
    ranges, touched, posts, takes = [], [], [], []
    for stage in program.stages:
        start, before = len(builder.records), builder.exchanges
        builder.claimed.clear()
        plan_stage(builder, stage)
        ranges.append((start, len(builder.records)))
        # What a stage takes from mailboxes itself is not read from memory.
        touched.append((reads(stage) - builder.claimed, writes(stage)))
        posts.append(builder.exchanges > before)
        takes.append(posts[-1] or bool(builder.claimed))
    # No barrier since an exchange was taken: the next one may not be posted before all CTAs have taken it.
    exchanging = False
    for (start, _), wait, post, take in zip(ranges, waits(touched), posts, takes, strict=True):
        first = builder.records[start]
        builder.records[start] = replace(first, wait=wait or first.wait or (post and exchanging))
        exchanging = take or (exchanging and not builder.records[start].wait)
    kinds = [builder.codes[record.code].kind for record in builder.records]
    return Plan(
        program,
        geometry,
        tuple(builder.codes),
        tuple(fetched(builder.records, kinds, geometry.grid)),
        tuple(ranges),
        builder.scratch,
        builder.slot_bytes,
    )


def codes_of(plan: Plan, stage: int) -> set[int]:
    first, last = plan.ranges[stage]
    return {record.code for record in plan.records[first:last]}


def only(plan: Plan, codes: set[int]) -> Plan:
    """The plan of a kernel that holds some codes; stages that need others have no records."""
    used = sorted(codes)
    records: list[Record] = []
    ranges = []
    for stage, (first, last) in enumerate(plan.ranges):
        start = len(records)
        if codes_of(plan, stage) <= codes:
            records += [replace(r, code=used.index(r.code)) for r in plan.records[first:last]]
        ranges.append((start, len(records)))
    kept = tuple(plan.codes[code] for code in used)
    kinds = [kept[record.code].kind for record in records]
    return replace(plan, codes=kept, records=tuple(fetched(records, kinds, plan.geometry.grid)), ranges=tuple(ranges))
