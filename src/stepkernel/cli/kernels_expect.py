"""`stepkernel kernels expect`: what a step should take on a GPU, from bytes and stated assumptions."""

from typing import Annotated, Literal

import typer
from rich.table import Table

from stepkernel.cli.common import one_line_errors, results


@one_line_errors
def expect(
    model: Annotated[str, typer.Argument(help="A preset, a model directory or a config.json.")],
    gpu: Annotated[Literal["h200", "gb300"], typer.Option(help="Whose data sheet.")] = "gb300",
    tp: Annotated[int, typer.Option(help="Ranks that share the model; figures are those of one.", min=1)] = 1,
    running_requests: Annotated[int, typer.Option(help="Requests that decode together.", min=1)] = 1,
    queries: Annotated[int, typer.Option(help="Tokens per request in the step (1 + drafts).", min=1)] = 1,
    context: Annotated[int, typer.Option(help="Tokens that each request already holds.", min=0)] = 0,
    share: Annotated[float, typer.Option(help="Share of the bandwidth that stages read with.", min=0.01, max=1)] = 0.85,
    barrier_us: Annotated[float, typer.Option(help="A barrier of all CTAs.", min=0)] = 1.5,
    exchange_us: Annotated[float, typer.Option(help="An exchange between ranks.", min=0)] = 2.5,
    last_us: Annotated[float, typer.Option(help="CTAs that find out who of them comes last.", min=0)] = 0.7,
) -> None:
    """Print floor, barriers, exchanges and expected time of every stage of the GPU kernel. No measurement."""
    from stepkernel.cuda.cases import PAGE_TOKENS, Case
    from stepkernel.cuda.expected import GPUS, Assumptions, expected
    from stepkernel.model.presets import resolve_config

    config = resolve_config(model)
    if context + queries > config.max_positions:
        raise ValueError(f"context {context} + {queries} queries: the model has {config.max_positions} positions")
    sheet = GPUS[gpu]
    case = Case(model, config, running_requests, queries, sheet.multiprocessors, PAGE_TOKENS, ranks=tp)
    found = expected(case, sheet, context, Assumptions(share, barrier_us, exchange_us, last_us))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage")
    for heading in ("x", "floor ms", "barriers", "last CTAs", "exchanges", "expected ms"):
        table.add_column(heading, justify="right")
    for s in found:
        waits = (str(s.barriers), str(s.lasts), str(s.exchanges))
        table.add_row(s.stage, str(s.count), f"{s.floor:.4f}", *waits, f"{s.time:.4f}")
    floor, time = sum(s.floor for s in found), sum(s.time for s in found)
    totals = [str(sum(counts)) for counts in zip(*((s.barriers, s.lasts, s.exchanges) for s in found), strict=True)]
    table.add_row("[bold]step[/]", "", f"{floor:.4f}", *totals, f"{time:.4f}")
    console = results()
    console.print(
        f"[bold]{model}[/] on {gpu}, expected and not measured: one decode step, rank 0 of {tp}, {running_requests} "
        f"requests x {queries} tokens, context {context}",
        soft_wrap=True,
    )
    console.print(table)
    console.print(
        f"[dim]floor = bytes / {sheet.bandwidth:.0f} GB/s (data sheet); expected = floor / {share:g} + "
        f"barriers x {barrier_us:g} us + last CTAs x {last_us:g} us + exchanges x {exchange_us:g} us: assumptions, "
        "see docs/gpu.md.[/]",
        soft_wrap=True,
    )
