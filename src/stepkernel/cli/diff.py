"""`stepkernel diff`: the specialised step against the reference, stage by stage."""

from typing import Annotated

import typer

from stepkernel.cli.common import messages, model_directory, one_line_errors, results

DIFFERENT = 1
# Above the rounding of BF16 (0.004) and of the activations of MXFP4 experts (8 bits: 0.009).
LIMITS = {15: 0.01, 8: 0.03}


@one_line_errors
def diff(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3 or tiny-kimi-linear.")],
    rows: Annotated[int, typer.Option(help="Tokens in the step; a multiple of --queries.", min=1)] = 4,
    queries: Annotated[int, typer.Option(help="Tokens per request.", min=1)] = 1,
    context: Annotated[int, typer.Option(help="Most tokens that a request already holds.", min=0)] = 40,
    limit: Annotated[
        float | None,
        typer.Option(help="Largest relative L2 difference of a row. Default: 0.01, with 8 bits 0.03.", min=0),
    ] = None,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and lengths.", min=0)] = 0,
) -> None:
    """Run both executors on the same poisoned buffers and print the first stage that differs, and by how much."""
    from stepkernel.cli.comparing import compare_executors, print_comparison
    from stepkernel.program.program import MAX_ROWS
    from stepkernel.runtime.engine import EngineOptions

    if rows % queries or rows > MAX_ROWS:
        raise ValueError(f"--rows {rows} --queries {queries}: rows must be a multiple of queries, at most {MAX_ROWS}")
    options = EngineOptions(threads=threads, activation_bits=activation_bits, max_requests=rows // queries)
    found = compare_executors(model_directory(model), options, queries, context, seed, messages())
    if limit is None:
        limit = LIMITS[activation_bits]
    if not print_comparison(found, limit, results()):
        raise typer.Exit(DIFFERENT)
