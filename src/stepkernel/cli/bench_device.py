"""`stepkernel bench step --device cuda`: steps of a model that lives on a GPU."""

import json
from pathlib import Path

from rich.table import Table

from stepkernel.cli.common import messages, notes, results


def on_device(
    directory: Path,
    device: str,
    kernels: Path | None,
    loads: list[int],
    context: int,
    steps: int,
    fp8_latents: bool,
    file: Path | None,
) -> None:
    """Prints the table, and writes everything to `file`. Raises ValueError as opening a session does."""
    from stepkernel.cuda.bench import FORMULA, PROTOCOL, as_dict, run_device_bench

    given = (directory, device, kernels, loads, context, steps, notes(), fp8_latents)
    found = run_device_bench(*given)  # type: ignore[arg-type]
    out = results()
    kept = f"context {context}, {found.latents} latents"
    out.print(f"[bold]{found.model}[/]  decode step on {found.device} ({found.arch}), {kept}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("requests", "step ms", "p90", "floor ms", "of floor", "MB/step", "GB/s copy", "kernel"):
        table.add_column(heading, justify="right")
    for timing in found.timings:
        samples = sorted(timing.samples)
        table.add_row(
            str(timing.running_requests),
            f"{timing.step_ms:.3f}",
            f"{samples[int(0.9 * (len(samples) - 1))]:.3f}",
            f"{timing.floor_ms:.3f}",
            f"{100 * timing.floor_ms / timing.step_ms:.0f} %",
            f"{timing.bytes_per_step / 1e6:.1f}",
            f"{timing.copy_gbps:.0f}",
            timing.kernel,
        )
    out.print(table)
    for line in (PROTOCOL, FORMULA):
        out.print(f"[dim]{line}.[/]", soft_wrap=True)
    if file is not None:
        file.write_text(json.dumps(as_dict(found), indent=1) + "\n")
        messages().print(f"written to {file}", style="dim")
