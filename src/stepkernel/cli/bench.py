"""`stepkernel bench step`: times the prepared step by direct replay, next to the machine's read roof."""

from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import (
    check_writable,
    integers,
    messages,
    model_directory,
    notes,
    numpy_threads,
    one_line_errors,
    results,
)

bench = typer.Typer(help="Measurements.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measurements."""


@bench.command("step")
@one_line_errors
def step(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3 or tiny-kimi-linear.")],
    running_requests: Annotated[str, typer.Option(help="Loads to time: 1,2,4,8.")] = "1,2,4,8",
    context: Annotated[int, typer.Option(help="Tokens that each request already holds.", min=0)] = 16,
    steps: Annotated[int, typer.Option(help="Specialised steps in each of the two blocks.", min=1)] = 100,
    standard_steps: Annotated[int, typer.Option(help="Standard steps in each block.", min=1)] = 2,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Time the prepared step: specialised and standard paired, floor, fraction of the read roof, path counts."""
    numpy_threads(threads)
    from stepkernel.cli.bench_table import print_timings
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.measure.files import write_record
    from stepkernel.measure.step import as_record, run_bench

    loads = integers(running_requests, "--running-requests", low=1)
    if json_file is not None:
        check_writable(json_file, "--json")
    directory, log = model_directory(model), messages()
    found = run_bench(
        directory,
        loads,
        context,
        steps,
        min(standard_steps, steps),
        threads,
        activation_bits,
        notes(),
        progress_bar(log, *opening(log, "latency_specialized")),
    )
    print_timings(found, results())
    if json_file is not None:
        write_record(as_record(found), json_file)
        messages().print(f"written to {json_file}", style="dim")
