"""The printed form of a load sweep."""

from rich.console import Console
from rich.table import Table

from stepkernel.measure.record import ServeRecord
from stepkernel.measure.serve import Percentiles, ServePoint

FORMULA = (
    "TTFT = first chunk - sent; TPOT = (last - first) / (output tokens - 1); gap = time between chunks, pooled; "
    "latency = last chunk - sent; interactivity = 1 / TPOT at the percentile of TPOT; end to end = 1 / (latency / "
    "output tokens) at its percentile; rates: tokens of requests that ended well / time from first sent to last "
    "chunk / chips"
)
TIMES = (("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"), ("gap ms", "gap_ms"), ("latency ms", "latency_ms"))


def print_serve(record: ServeRecord, console: Console) -> None:
    protocol = record.protocol
    where = record.environment.server or record.source
    console.print(
        f"[bold]{record.environment.model}[/]  load sweep, {protocol.dataset}, input {_length(protocol.input_len)}, "
        f"output {_length(protocol.output_len)}, {protocol.sampling}, drafts: {protocol.acceptance}; {where}; "
        f"{record.environment.hardware or 'machine not known'}",
        soft_wrap=True,
    )
    console.print(_times(record.points))
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


def _times(points: tuple[ServePoint, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("at a time", justify="right")
    for heading, _ in TIMES:
        table.add_column(f"{heading} P50 / P90 / P99", justify="right")
    for point in points:
        table.add_row(str(point.concurrency), *(_three(getattr(point, name)) for _, name in TIMES))
    return table


def _rates(points: tuple[ServePoint, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "at a time",
        "requests",
        "failed",
        "tokens/s/user P50 / P90 / P99",
        "end to end P50 / P90 / P99",
        "out/s/chip",
        "in/s/chip",
        "total/s/chip",
        "tokens/chunk",
        "good/s",
    ):
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            str(point.concurrency),
            str(point.requests),
            str(point.failed + point.cancelled),
            _three(point.interactivity),
            _three(point.latency_interactivity),
            *(_one(x) for x in (point.output_rate_per_chip, point.input_rate_per_chip, point.total_rate_per_chip)),
            _one(point.tokens_per_chunk, 2),
            _one(point.goodput, 2),
        )
    return table


def _three(found: Percentiles | None) -> str:
    return (
        "-"
        if found is None
        else " / ".join(f"{x:.3g}" if x < 100 else f"{x:.0f}" for x in (found.p50, found.p90, found.p99))
    )


def _one(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _length(value: int | None) -> str:
    return "mixed" if value is None else str(value)
