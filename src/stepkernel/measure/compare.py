"""Pairs two records load by load. Only records of the same conditions are paired."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stepkernel.measure.comparable import differences
from stepkernel.measure.decode import step_runs
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.interval import Floats, Ratio, Runs, pooled_median, ratio
from stepkernel.measure.record import AggregateRecord, DecodeRecord, Record, ServeRecord, StepRecord

STEPS_IN_CLUSTER = 8  # as many specialised steps as lie between two measurements of the roof


@dataclass(frozen=True)
class Pair:
    """One figure of both records at one load. ratio above 1: the first record is better."""

    running_requests: int
    figure: str
    first: float
    second: float
    ratio: Ratio | None
    value: float


def pairs(first: Record, second: Record) -> list[Pair]:
    """All common loads. MeasureError if the conditions differ or no load is common."""
    found = differences(first, second)
    if found:
        raise MeasureError(f"the records cannot be compared: {'; '.join(found)}")
    if isinstance(first, StepRecord | DecodeRecord) and isinstance(second, StepRecord | DecodeRecord):
        result = _steps(_runs(first), _runs(second))
    elif isinstance(first, ServeRecord | AggregateRecord) and isinstance(second, ServeRecord | AggregateRecord):
        result = _points(figures(first), figures(second))
    else:
        raise MeasureError(f"a {first.kind} record cannot be compared with a {second.kind} record")
    if not result:
        raise MeasureError("the records have no load in common whose figures were not refused")
    return result


def figures(record: ServeRecord | AggregateRecord) -> dict[int, dict[str, float]]:
    """Figures by concurrency under the names of aggregate records."""
    if isinstance(record, AggregateRecord):
        return {row.concurrency: dict(row.figures) for row in record.rows}
    found: dict[int, dict[str, float]] = {}
    for point in record.points:
        values: dict[str, float | None] = {
            "output_rate_per_chip": point.output_rate_per_chip,
            "input_rate_per_chip": point.input_rate_per_chip,
            "total_rate_per_chip": point.total_rate_per_chip,
        }
        for name, spread in (("ttft", point.ttft_ms), ("tpot", point.tpot_ms), ("gap", point.gap_ms)):
            if spread is not None:
                values |= {f"{name}_p50_ms": spread.p50, f"{name}_p90_ms": spread.p90, f"{name}_p99_ms": spread.p99}
        if point.interactivity is not None:
            values |= {f"interactivity_p{q}": getattr(point.interactivity, f"p{q}") for q in (50, 90, 99)}
        found[point.concurrency] = {name: value for name, value in values.items() if value is not None}
    return found


def _runs(record: StepRecord | DecodeRecord) -> dict[int, Runs]:
    """Step samples by load, in clusters that are resampled whole."""
    if isinstance(record, StepRecord):
        return {r.running_requests: [_clusters(r.specialized_samples)] for r in record.results}
    found: dict[int, Runs] = {}
    for result in record.results:
        if result.measured is None:
            continue
        n = result.running_requests
        blocks = [b for b in record.blocks if b.side == "A" and b.load == "measured" and b.running_requests == n]
        found[n] = step_runs(blocks, n, result.measured.estimate)
    return found


def _clusters(samples: tuple[float, ...]) -> list[Floats]:
    return [np.array(samples[i : i + STEPS_IN_CLUSTER]) for i in range(0, len(samples), STEPS_IN_CLUSTER)]


def _steps(first: Mapping[int, Runs], second: Mapping[int, Runs]) -> list[Pair]:
    found = []
    for load in sorted(first.keys() & second.keys()):
        one, other = first[load], second[load]
        count = min(len(one), len(other))
        ours, theirs = pooled_median(one), pooled_median(other)
        interval = ratio(one[:count], other[:count])
        value = theirs / ours
        found.append(Pair(load, "step ms", ours, theirs, Ratio(value, interval.low, interval.high), value))
    return found


def _points(first: dict[int, dict[str, float]], second: dict[int, dict[str, float]]) -> list[Pair]:
    found = []
    for load in sorted(first.keys() & second.keys()):
        for name in first[load]:
            one, other = first[load][name], second[load].get(name)
            if other is None or one <= 0 or other <= 0:
                continue
            value = other / one if name.endswith("_ms") else one / other
            found.append(Pair(load, name, one, other, None, value))
    return found
