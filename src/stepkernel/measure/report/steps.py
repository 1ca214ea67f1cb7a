"""Step time against running requests, with the memory floor, and the distributions of gaps."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from stepkernel.measure.claim import acceptance
from stepkernel.measure.decode import Side
from stepkernel.measure.interval import Floats
from stepkernel.measure.record import DecodeRecord, StepRecord
from stepkernel.measure.report.groups import Group, Named
from stepkernel.measure.report.theme import Picture, Theme, draw
from stepkernel.measure.windows import gaps

Line = tuple[str, list[int], list[float], list[tuple[float, float]]]


def step_picture(group: Group, records: Sequence[Named], slug: str) -> Picture | None:
    """Lines of one group; each point with the range of its runs' medians. None if every load was refused."""
    lines = [line for member in group.members for line in _lines(member) if line[1]]
    if not lines:
        return None
    floors = [floor for member in records if (floor := _floor(member, group)) is not None]

    def fill(axes: Axes, theme: Theme) -> None:
        for label, loads, steps, ranges in lines:
            below = [step - low for step, (low, _) in zip(steps, ranges, strict=True)]
            above = [high - step for step, (_, high) in zip(steps, ranges, strict=True)]
            axes.errorbar(loads, steps, yerr=[below, above], marker="o", capsize=3, label=label)
        for label, loads, floor in floors:
            axes.plot(loads, floor, linestyle="--", color=theme.text, linewidth=1.2, label=label)
        axes.set_xlabel("running requests")
        axes.set_ylabel("step time (ms)")
        axes.set_xscale("log", base=2)
        drawn = [loads for _, loads, _, _ in lines] + [loads for _, loads, _ in floors]
        ticks = sorted({load for loads in drawn for load in loads})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)

    text = f"{group.conditions.text()}. Formula: {group.members[0].record.protocol.formula}. Bars: range of the runs."
    return draw(slug, f"Step time against running requests: {group.conditions.phase}", text, fill)


def gap_picture(member: Named, slug: str) -> Picture | None:
    """Distribution of the gaps in exactly-N windows of a decode record, or of the replayed steps."""
    curves = _samples(member.record) if isinstance(member.record, StepRecord | DecodeRecord) else []
    if not curves:
        return None

    def fill(axes: Axes, theme: Theme) -> None:
        for label, samples in curves:
            ordered = np.sort(samples)
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", label=label)
        axes.set_xlabel("step (ms)")
        axes.set_ylabel("share of steps at or below")
        axes.set_ylim(0, 1)
        everything = np.concatenate([samples for _, samples in curves])
        axes.set_xlim(0, float(np.quantile(everything, 0.995)) * 1.05)

    protocol = member.record.protocol
    text = (
        f"{member.name}: {protocol.phase}, {member.record.environment.model}, {acceptance(protocol)}; every sample, up "
        "to the 99.5th percentile"
    )
    return draw(slug, f"Distribution of steps: {member.name}", text, fill)


def _lines(member: Named) -> list[Line]:
    record = member.record
    if isinstance(record, StepRecord):
        loads = [r.running_requests for r in record.results]
        halves = [_halves(r.specialized_samples) for r in record.results]
        return [(member.name, loads, [r.specialized_ms for r in record.results], halves)]
    if not isinstance(record, DecodeRecord):
        return []
    sides: list[tuple[str, list[tuple[int, Side | None]]]] = [
        (member.name, [(r.running_requests, r.measured) for r in record.results]),
        (f"{member.name}, baseline", [(r.running_requests, r.baseline) for r in record.results]),
    ]
    return [
        (
            name,
            [load for load, side in points if side is not None],
            [side.step_ms for _, side in points if side is not None],
            [(min(side.runs), max(side.runs)) for _, side in points if side is not None],
        )
        for name, points in sides
    ]


def _halves(samples: tuple[float, ...]) -> tuple[float, float]:
    """Medians of the two blocks of specialised steps, the smaller one first; both hold the overall median between."""
    middle = len(samples) // 2
    medians = sorted(float(np.median(part)) for part in (samples[:middle], samples[middle:]) if part)
    overall = float(np.median(samples))
    return min(medians[0], overall), max(medians[-1], overall)


def _floor(member: Named, group: Group) -> tuple[str, list[int], list[float]] | None:
    """The floor that a direct replay of the same model on the same machine found."""
    record = member.record
    if not isinstance(record, StepRecord):
        return None
    same = (
        record.environment.model == group.conditions.model and record.environment.hardware == group.conditions.machine
    )
    if not same:
        return None
    loads = [r.running_requests for r in record.results]
    return f"floor: bytes / read roof ({member.name})", loads, [r.floor_ms for r in record.results]


def _samples(record: StepRecord | DecodeRecord) -> list[tuple[str, Floats]]:
    if isinstance(record, StepRecord):
        return [(_load(r.running_requests), np.array(r.specialized_samples)) for r in record.results]
    found = []
    for result in record.results:
        if result.measured is None:
            continue
        n = result.running_requests
        blocks = [b for b in record.blocks if b.side == "A" and b.load == "measured" and b.running_requests == n]
        kept = [one.ms[one.kept] for one in (gaps(block.requests, n) for block in blocks)]
        found.append((_load(n), np.concatenate(kept)))
    return found


def _load(running: int) -> str:
    return f"{running} request" if running == 1 else f"{running} requests"
