"""The printed form of a load sweep."""

from rich.console import Console
from rich.table import Table

from stepkernel.measure.digits import digits
from stepkernel.measure.record import ServeRecord
from stepkernel.measure.serve import Percentiles, ServePoint

FORMULA = (
    "TTFT = first chunk - sent; TPOT = (last - first) / (output tokens - 1); gap = time between chunks, pooled; "
    "latency = last chunk - sent; interactivity = 1 / TPOT at the percentile of TPOT; end to end = 1 / (latency / "
    "output tokens) at its percentile; rates: tokens of requests that ended well / time from first sent to last "
    "chunk / chips"
)
FIGURES = (
    ("TTFT ms", "ttft_ms"),
    ("TPOT ms", "tpot_ms"),
    ("gap ms", "gap_ms"),
    ("latency ms", "latency_ms"),
    ("interactivity, tokens/s per user", "interactivity"),
    ("end to end, tokens/s per user", "latency_interactivity"),
)
RATES = ("at a time", "done", "failed", "out/s", "in/s", "total/s", "tokens/chunk", "good/s")


def print_serve(record: ServeRecord, console: Console) -> None:
    protocol = record.protocol
    where = record.environment.server or record.source
    console.print(
        f"[bold]{record.environment.model}[/]  load sweep, {protocol.dataset}, input {_length(protocol.input_len)}, "
        f"output {_length(protocol.output_len)}, {protocol.sampling}, drafts: {protocol.acceptance}; {where}; "
        f"{record.environment.hardware or 'machine not known'}",
        soft_wrap=True,
    )
    console.print(_percentiles(record.points))
    console.print(_rates(record.points))
    if record.limits_ms:
        kept = ", ".join(f"{name} <= {limit:g} ms" for name, limit in record.limits_ms.items())
        console.print(f"good: requests per second that keep {kept}", soft_wrap=True)
    for block in record.blocks:
        failed = [r.error for r in block.requests if r.status == "error"]
        if failed:
            console.print(
                f"{block.running_requests} at a time: {len(failed)} failed, first: {failed[0]}",
                soft_wrap=True,
                markup=False,
            )
    for line in (protocol.description, protocol.formula):
        console.print(f"[dim]{line}.[/]", soft_wrap=True)


def _percentiles(points: tuple[ServePoint, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("at a time", "figure", "P50", "P90", "P99"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for point in points:
        for index, (name, attribute) in enumerate(FIGURES):
            found: Percentiles | None = getattr(point, attribute)
            values = ("-",) * 3 if found is None else (digits(x, 4) for x in (found.p50, found.p90, found.p99))
            table.add_row("" if index else str(point.concurrency), name, *values)
    return table


def _rates(points: tuple[ServePoint, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in RATES:
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            str(point.concurrency),
            str(point.requests),
            str(point.failed + point.cancelled),
            *(_one(x) for x in (point.output_rate_per_chip, point.input_rate_per_chip, point.total_rate_per_chip)),
            _one(point.tokens_per_chunk, 2),
            _one(point.goodput, 2),
        )
    return table


def _one(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _length(value: int | None) -> str:
    return "mixed" if value is None else str(value)
