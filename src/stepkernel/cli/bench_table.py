"""The printed form of a step benchmark."""

from rich.console import Console
from rich.table import Table

from stepkernel.measure.step import FORMULA, PROTOCOL, STANDARD, Bench


def print_timings(bench: Bench, console: Console) -> None:
    console.print(
        f"[bold]{bench.model.resolve().name}[/]  decode step, {bench.threads} threads, context "
        f"{bench.timings[0].context}, {bench.activation_bits}-bit activations for MXFP4; "
        f"read roof {bench.read_roof_gbps:.1f} GB/s",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("requests", "step ms", "p90", "floor ms", "of roof", "MB/step", "experts", "NumPy ms"):
        table.add_column(heading, justify="right")
    for timing in bench.timings:
        samples = sorted(timing.specialized_samples)
        table.add_row(
            str(timing.running_requests),
            f"{timing.specialized_ms:.3f}",
            f"{samples[int(0.9 * (len(samples) - 1))]:.3f}",
            f"{timing.floor_ms:.3f}",
            f"{100 * timing.fraction_of_roof:.0f} %",
            f"{timing.bytes_per_step / 1e6:.1f}",
            f"{timing.distinct_experts:.1f}",
            f"{timing.standard_ms:.1f}",
        )
    console.print(table)
    routes = {
        f"{kind}, {reason}": sum(t.routes[kind].get(reason, 0) for t in bench.timings)
        for timing in bench.timings
        for kind, reasons in timing.routes.items()
        for reason in reasons
    }
    console.print("steps by path: " + "; ".join(f"{count} {route}" for route, count in routes.items()), soft_wrap=True)
    for line in (PROTOCOL, FORMULA, STANDARD, bench.cache_note):
        if line:
            console.print(f"[dim]{line}.[/]", soft_wrap=True)
