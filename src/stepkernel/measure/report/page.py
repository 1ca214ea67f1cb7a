"""The page: one self-contained HTML file, light or dark as the reader's system wishes, and the pictures as PNG."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from stepkernel.measure.claim import claim
from stepkernel.measure.cost import Tier
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import DecodeRecord, Record
from stepkernel.measure.report.groups import Group, Named, groups, kept_apart
from stepkernel.measure.report.steps import gap_picture, step_picture
from stepkernel.measure.report.sweeps import latency_picture, sweep_pictures
from stepkernel.measure.report.theme import THEMES, Picture


@dataclass(frozen=True)
class Report:
    pictures: tuple[Picture, ...]
    html: str


def build_report(records: list[Named], tiers: Sequence[Tier], reference: bool = True) -> Report:
    """Pictures and page of records. Their order is that of the records."""
    found = groups(records)
    pictures: list[Picture] = []
    for index, group in enumerate(found, 1):
        pictures += _pictures(group, records, tiers, f"{index:02d}")
    said = [_claims(named) for named in records]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        files("stepkernel.measure.report").joinpath("page.html.j2").read_text()
    )
    html = template.render(
        pictures=pictures,
        themes=THEMES,
        speedups=[row for named in records for row in _speedups(named)],
        apart=kept_apart(found),
        refusals=[line for _, refused in said for line in refused],
        claims=[line for claimed, _ in said for line in claimed],
        records=[(named.name, _facts(named.record)) for named in records],
        reference=published() if reference else None,
    )
    return Report(tuple(pictures), html)


def write_report(report: Report, directory: Path) -> list[Path]:
    """index.html and two PNGs per picture."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for picture in report.pictures:
        for theme, data in picture.png.items():
            file = directory / f"{picture.slug}-{theme}.png"
            file.write_bytes(data)
            written.append(file)
    page = directory / "index.html"
    page.write_text(report.html, encoding="utf-8")
    return [page, *written]


def published() -> dict[str, Any]:
    """Reference data with its conditions. It is shown on its own and enters no figure."""
    found: dict[str, Any] = json.loads(files("stepkernel.measure").joinpath("data/published.json").read_text())
    return found


def _pictures(group: Group, records: list[Named], tiers: Sequence[Tier], slug: str) -> list[Picture]:
    found: list[Picture | None] = []
    if group.conditions.figure == "step time":
        found.append(step_picture(group, records, f"{slug}-steps"))
        found += [gap_picture(member, f"{slug}-gaps-{i}") for i, member in enumerate(group.members, 1)]
    else:
        found += sweep_pictures(group, tiers, f"{slug}-interactivity")
        found += [latency_picture(member, f"{slug}-ttft-{i}") for i, member in enumerate(group.members, 1)]
    return [picture for picture in found if picture is not None]


def _speedups(named: Named) -> list[list[str]]:
    record = named.record
    if not isinstance(record, DecodeRecord) or record.baseline is None:
        return []
    rows = []
    for result in record.results:
        if result.measured and result.baseline and result.step_ratio:
            rows.append(
                [
                    named.name,
                    record.protocol.phase,
                    str(result.running_requests),
                    f"{result.measured.step_ms:.3f}",
                    f"{result.baseline.step_ms:.3f}",
                    f"{result.step_ratio.value:.3f}x",
                    f"{result.step_ratio.low:.3f} to {result.step_ratio.high:.3f}",
                    "-" if result.throughput_ratio is None else f"{result.throughput_ratio:.3f}x",
                    "-" if result.ttft_ratio is None else f"{result.ttft_ratio:.3f}x",
                ]
            )
    return rows


def _claims(named: Named) -> tuple[list[str], list[str]]:
    """One sentence for each load that can be claimed, and one for each that cannot."""
    record = named.record
    if record.kind == "aggregate":
        return [], []
    if record.kind == "serve":
        loads = [point.concurrency for point in record.points]
    else:
        loads = [result.running_requests for result in record.results]
    claimed, refused = [], []
    for load in loads:
        try:
            claimed.append(claim(record, load))
        except MeasureError as error:
            refused.append(f"{named.name}, {load} requests: {error}")
    return claimed, refused


def _facts(record: Record) -> list[tuple[str, str]]:
    environment = asdict(record.environment)
    shown = [(key, _text(value)) for key, value in environment.items() if value not in (None, "", (), {}, [])]
    return [*shown, ("phase", record.protocol.phase), ("protocol", record.protocol.description)]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
