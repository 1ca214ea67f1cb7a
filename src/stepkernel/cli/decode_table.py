"""The printed form of a decode record."""

from rich.console import Console
from rich.table import Table

from stepkernel.measure.decode import DecodeResult, Side
from stepkernel.measure.digits import digits
from stepkernel.measure.record import DecodeRecord, Environment

HEADINGS = ("requests", "side", "step ms", "p90", "ms/token", "tokens/step", "runs from to", "samples")


def print_decode(record: DecodeRecord, console: Console) -> None:
    protocol = record.protocol
    console.print(
        f"[bold]{record.environment.model}[/]  {protocol.phase}, input {_length(protocol.input_len)}, output "
        f"{_length(protocol.output_len)}, {protocol.sampling}, drafts: {protocol.acceptance}; order {protocol.order}",
        soft_wrap=True,
    )
    for letter, environment in (("A", record.environment), ("B", record.baseline)):
        if environment is not None:
            console.print(f"{letter}: {_describe(environment)}", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for result in record.results:
        for name, side in (("A", result.measured), ("B", result.baseline)):
            if side is not None:
                table.add_row(*_row(result, name, side))
    if table.row_count:
        console.print(table)
    print_ratios(record, console)
    for check in record.replay:
        console.print(
            f"direct replay, {check.running_requests} requests, contexts {check.contexts[0]} to {check.contexts[1]}: "
            f"{check.replay_ms:.3f} ms; here {check.step_ms:.3f} ms, {check.difference_ms:+.3f} ms "
            f"({100 * check.difference_ms / check.replay_ms:+.1f} %): sampling, Python, other load of the machine",
            soft_wrap=True,
        )
    _print_routes(record, console)
    for line in (protocol.description, protocol.formula, *_remarks(record)):
        console.print(f"[dim]{line}.[/]", soft_wrap=True)
    for refusal in (r for result in record.results for r in result.refusals):
        console.print(f"[bold red]refused[/] {refusal}", soft_wrap=True)


def print_ratios(record: DecodeRecord, console: Console) -> None:
    """One line per load; under mixed load three ratios side by side, because a faster step moves them differently."""
    for result in record.results:
        if result.step_ratio is None:
            continue
        line = f"{result.running_requests} requests: decode-only step time {result.step_ratio}"
        if result.throughput_ratio is not None:
            line += f", output throughput {result.throughput_ratio:.3f}x"
        if result.ttft_ratio is not None:
            line += f", time to first token {result.ttft_ratio:.3f}x"
        console.print(line, soft_wrap=True, markup=False)


def _row(result: DecodeResult, name: str, side: Side) -> list[str]:
    return [
        str(result.running_requests),
        name,
        f"{side.step_ms:.3f}",
        "-" if side.p90_ms is None else f"{side.p90_ms:.3f}",
        "-" if side.per_token_ms is None else f"{side.per_token_ms:.3f}",
        "-" if side.tokens_per_step is None else f"{side.tokens_per_step:.2f}",
        f"{digits(min(side.runs), 4)} {digits(max(side.runs), 4)}",
        str(side.samples),
    ]


def _print_routes(record: DecodeRecord, console: Console) -> None:
    totals: dict[str, int] = {}
    for block in record.blocks:
        if block.side == "A" and block.load == "measured":
            for kind, reasons in (block.routes or {}).items():
                for reason, count in reasons.items():
                    totals[f"{kind}, {reason}"] = totals.get(f"{kind}, {reason}", 0) + count
    found = "; ".join(f"{count} {route}" for route, count in totals.items() if count)
    console.print(f"steps of A by path: {found or 'the server does not tell'}", soft_wrap=True, markup=False)


def _remarks(record: DecodeRecord) -> list[str]:
    found = []
    if any(side and side.estimate == "means" for r in record.results for side in (r.measured, r.baseline)):
        found.append("chunks arrive in bursts: where there is no p90, a step is a request's mean time per token")
    busy = [b.client_busy for b in record.blocks if b.client_busy is not None and b.load == "measured"]
    if busy:
        found.append(f"the client computed at most {100 * max(busy):.0f} % of a run's time, so it was no bottleneck")
    if record.protocol.token_counts == "none":
        found.append("the server counts no tokens, so there is no time per token")
    elif record.protocol.token_counts == "per request":
        found.append("the server counts tokens per request only, so tokens per step is the requests' mean")
    if record.baseline is not None and "decode_backend=standard" in record.baseline.flags:
        found.append(
            "B is this engine's standard path in NumPy, which is there for prefill and checking: no competitor"
        )
    return found


def _describe(environment: Environment) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    where = environment.server or "in this process"
    threads = "" if environment.threads is None else f", {environment.threads} threads"
    label = f"{environment.label}: " if environment.label else ""
    return f"{label}{where}; {environment.hardware or 'machine not known'}{threads}; {versions}"


def _length(value: int | None) -> str:
    return "mixed" if value is None else str(value)
