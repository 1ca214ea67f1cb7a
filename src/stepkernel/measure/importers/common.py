"""What importers share: facts that the source does not hold, checked access to fields, records from traces."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import (
    Acceptance,
    AggregateRecord,
    AggregateRow,
    Client,
    Environment,
    Protocol,
    ServeRecord,
)
from stepkernel.measure.serve import serve_points
from stepkernel.measure.summary import common, measured, token_counts
from stepkernel.measure.trace import Block, Request, check_trace

STATISTICS = ("mean", "p50", "p75", "p90", "p95", "p99")


@dataclass(frozen=True)
class Given:
    """What the user says of a file that does not say it itself."""

    machine: str = ""
    chips: int = 1
    acceptance: Acceptance = "unknown"
    acceptance_length: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Imported:
    """A record, and the fields of the source that have no counterpart in it."""

    record: ServeRecord | AggregateRecord
    left_out: tuple[str, ...] = field(default=())


def number(value: Any, name: str, place: str, low: float = 0.0) -> float:
    """A finite number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
        raise MeasureError(f"{name}: {place} is {value!r}; expected a number of at least {low:g}")
    return float(value)


def whole(value: Any, name: str, place: str) -> int:
    found = number(value, name, place)
    if found != int(found):
        raise MeasureError(f"{name}: {place} is {value!r}; expected a whole number")
    return int(found)


def mapping(value: Any, name: str, place: str) -> dict[str, Any]:
    """An object; nothing (null) is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MeasureError(f"{name}: {place} is {value!r:.80}; expected an object")
    return value


def wanted(content: Any, key: str, name: str, place: str = "") -> Any:
    """A field that must be there."""
    if not isinstance(content, Mapping) or key not in content:
        raise MeasureError(f"{name}: {place + '.' if place else ''}{key} is missing; is this a file of that tool?")
    return content[key]


def trace_record(
    source: str,
    name: str,
    model: str,
    blocks: Sequence[tuple[int, Iterable[Request]]],
    given: Given,
    dataset: str,
    description: str,
    versions: dict[str, str] | None = None,
) -> ServeRecord:
    """A load sweep from traces of (concurrency, requests)."""
    found = []
    for concurrency, requests in blocks:
        kept = tuple(requests)
        try:
            check_trace(kept)
        except ValueError as error:
            raise MeasureError(f"{name}: {error}") from None
        found.append(Block("A", concurrency, 0, "measured", kept))
    done = measured(found)
    protocol = Protocol(
        "serve",
        description,
        "figures are computed here from the source's raw times, by the formulas of docs/measuring.md",
        common(r.input_tokens for r in done),
        common(r.output_tokens for r in done),
        dataset,
        "not told",
        given.acceptance,
        given.acceptance_length,
        token_counts=token_counts(done),
    )
    environment = given_environment(model, given, versions or {})
    points = serve_points(found, given.chips, {})
    return ServeRecord(environment, protocol, Client(source), points, tuple(found), source=source)


def aggregate_record(
    source: str,
    environment: Environment,
    given: Given,
    rows: Sequence[AggregateRow],
    lengths: tuple[int | None, int | None],
    dataset: str,
    formula: str,
) -> AggregateRecord:
    protocol = Protocol(
        "serve",
        "figures as the source computed them; it keeps no raw samples",
        formula,
        *lengths,
        dataset,
        "not told",
        given.acceptance,
        given.acceptance_length,
        token_counts="none",
    )
    return AggregateRecord(environment, protocol, source, tuple(rows))


def given_environment(model: str, given: Given, versions: dict[str, str]) -> Environment:
    machine: dict[str, str | int | float] = {"processor": given.machine} if given.machine else {}
    return Environment(model, machine, versions, chips=given.chips, label=given.label)
