"""`stepkernel demo`: the trained small model on both paths, with step times and the memory floor."""

import statistics
from typing import Annotated

import typer

from stepkernel.cli.common import messages, model_directory, notes, numpy_threads, one_line_errors, results

PROMPT = "In the beginning"
MODEL = "tiny-k3"
DIFFERENT = 1


@one_line_errors
def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 48,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
) -> None:
    """Generate with both paths, compare them, and print step times next to the floor."""
    numpy_threads(1)  # products this small lose by being shared
    from stepkernel.cli.bench_table import print_timings
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.measure.step import run_bench
    from stepkernel.program.routing import BACKENDS, Kind
    from stepkernel.runtime.sequence import Result, StopRules
    from stepkernel.runtime.session import Session

    directory = model_directory(MODEL)
    log, out = messages(), results()
    out.print(
        f"[bold]{MODEL}[/]: a trained Kimi K3 architecture of 12.7 million parameters. Prompt: {PROMPT!r}",
        soft_wrap=True,
    )
    found: dict[str, Result] = {}
    for backend in BACKENDS:
        with progress_bar(log, *opening(log, backend)) as report:
            session = Session.open(directory, backend, threads, 1, max_tokens + 16, progress=report)
        with session:
            rules = StopRules(max_tokens)
            result = session.generate([PROMPT], rules=rules)[0]
            kind: Kind = "specialized" if backend == "latency_specialized" else "standard"
            step = 1e3 * statistics.median(session.engine.decode_seconds(kind))
            routes = session.engine.routes.as_dict()[kind]
        found[backend] = result
        taken = ", ".join(f"{count} steps: {reason}" for reason, count in routes.items())
        out.print(f"\n[bold]{backend}[/]  {step:.2f} ms per step ({taken})", soft_wrap=True)
        out.print(f"{PROMPT}{result.text}", markup=False, soft_wrap=True)
    fast, plain = (found[backend] for backend in BACKENDS)
    same = fast.token_ids == plain.token_ids
    out.print(f"\nboth paths chose the same {len(fast.token_ids)} tokens: [bold]{'yes' if same else 'NO'}[/]\n")
    print_timings(run_bench(directory, [1, 2, 4, 8], 16, 60, 2, threads, 15, notes()), out)
    out.print(
        "\nnext: stepkernel explain kimi-k3 --tp 16; stepkernel synthesize k3-mini DIR, then bench step DIR",
        soft_wrap=True,
    )
    if not same:
        raise typer.Exit(DIFFERENT)
