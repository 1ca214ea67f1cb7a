"""`stepkernel bench step`: times the prepared step by direct replay, next to the machine's read roof."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stepkernel.cli.bench_device import on_device
from stepkernel.cli.bench_speculation import speculation
from stepkernel.cli.common import (
    KERNELS,
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
    draft: Annotated[str | None, typer.Option(help="A DSpark draft: time rounds of drafts behind the steps.")] = None,
    num_speculative_tokens: Annotated[str, typer.Option(help="With --draft, numbers of drafts to time.")] = "1,3,7",
    synthetic_acceptance_length: Annotated[
        float | None, typer.Option(help="With --draft, accept by rate, so many tokens per round.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Latent rows: bfloat16 or fp8.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kernels: Annotated[Path | None, typer.Option(help=KERNELS)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the steps to this file.")] = None,
) -> None:
    """Time the prepared step: specialised and standard paired, floor, fraction of the read roof, path counts."""
    if draft is None and synthetic_acceptance_length is not None:
        raise ValueError("--synthetic-acceptance-length has no effect without --draft; add the draft or drop it")
    numpy_threads(threads)
    from stepkernel.cli.bench_table import print_timings
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.measure.files import write_record
    from stepkernel.measure.step import as_record, run_bench
    from stepkernel.runtime.device_engine import check_device
    from stepkernel.runtime.engine import EngineOptions

    loads = integers(running_requests, "--running-requests", low=1)
    if json_file is not None:
        check_writable(json_file, "--json")
    directory, log = model_directory(model), messages()
    if device != "cpu" or kernels is not None:
        dtype: Any = kv_cache_dtype
        options = EngineOptions(threads=threads, activation_bits=activation_bits, kv_cache_dtype=dtype)
        check_device(options, device, kernels, draft)
        on_device(directory, device, kernels, loads, context, steps, kv_cache_dtype == "fp8", json_file)
        return
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
        kv_cache_dtype,  # type: ignore[arg-type]
    )
    print_timings(found, results())
    if json_file is not None:
        write_record(as_record(found), json_file)
        messages().print(f"written to {json_file}", style="dim")
    if draft is not None:
        speculation(
            model,
            draft,
            num_speculative_tokens,
            running_requests,
            max(1, context),
            synthetic_acceptance_length=synthetic_acceptance_length,
            threads=threads,
            activation_bits=activation_bits,
            kv_cache_dtype=kv_cache_dtype,
        )
