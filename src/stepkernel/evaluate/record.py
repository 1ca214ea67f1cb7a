"""The record of an evaluation: the envelope of measuring records (format, version, environment), kind "accuracy"."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import read_text, validated, write_whole
from stepkernel.measure.record import Envelope, Environment
from stepkernel.measure.strict import STRICT

Subject = Literal["numerics", "invariance", "long_context", "tasks"]
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Limit:
    """A figure of the summary and what it must be, said before the run."""

    __pydantic_config__ = STRICT
    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, summary: Mapping[str, float]) -> bool:
        value = summary[self.figure]
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        parts = [("at most", self.at_most), ("at least", self.at_least)]
        return f"{self.figure} " + " and ".join(f"{word} {value:g}" for word, value in parts if value is not None)


@dataclass(frozen=True)
class AccuracyRecord(Envelope):
    """summary: the figures by name; tables: more figures by row and column; series: raw samples, such as KL by row."""

    subject: Subject
    environment: Environment
    description: str
    formula: str
    limits: tuple[Limit, ...]
    summary: dict[str, float]
    passed: bool
    tables: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kind: Literal["accuracy"] = field(default="accuracy", kw_only=True)


_ADAPTER: TypeAdapter[AccuracyRecord] = TypeAdapter(AccuracyRecord)


def broken_limits(limits: tuple[Limit, ...], summary: Mapping[str, float]) -> list[Limit]:
    return [limit for limit in limits if not limit.holds(summary)]


def write_record(record: AccuracyRecord, file: Path) -> None:
    write_whole(_ADAPTER.dump_json(record, indent=1), file)


def read_record(file: Path) -> AccuracyRecord:
    """Reads, validates, and checks that the verdict and the mean follow. MeasureError names the file and the field."""
    record = validated(_ADAPTER, read_text(file), str(file))
    missing = [limit.figure for limit in record.limits if limit.figure not in record.summary]
    if missing:
        raise MeasureError(f"{file}: limits on {', '.join(missing)}, which the summary lacks")
    if record.passed != (not broken_limits(record.limits, record.summary)):
        raise MeasureError(f"{file}: passed is {record.passed}, its limits and summary say the opposite")
    samples, mean = record.series.get("kl"), record.summary.get("mean_kl")
    if samples and mean is not None and abs(sum(samples) / len(samples) - mean) > TOLERANCE + 1e-6 * mean:
        raise MeasureError(f"{file}: mean_kl is {mean:g}, its samples give {sum(samples) / len(samples):g}")
    return record
