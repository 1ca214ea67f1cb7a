"""`stepkernel bench serve`: a load sweep against a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stepkernel.cli.bench_decode import id_range, one_endpoint, parse_acceptance
from stepkernel.cli.common import check_writable, integers, messages, notes, one_line_errors, results

FAILED = 1


@one_line_errors
def bench_serve(
    target: Annotated[str, typer.Argument(help="http://HOST:PORT of an OpenAI-compatible server.")],
    concurrency: Annotated[str, typer.Option(help="Requests in flight at a time: 1,2,4,8.")] = "1,2,4,8",
    dataset: Annotated[
        str, typer.Option(help="random, or a file: lines of text, JSON lines of requests, or a trace with timestamps.")
    ] = "random",
    input_len: Annotated[int, typer.Option(help="Prompt tokens of random requests.", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 128,
    requests_per_slot: Annotated[int, typer.Option(help="Requests of a block for each one in flight.", min=1)] = 4,
    warm_up: Annotated[int, typer.Option(help="Requests per slot before each block.", min=0)] = 1,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limit of a good request, ttft:MS, tpot:MS or latency:MS; repeatable.")
    ] = None,
    acceptance: Annotated[str, typer.Option(help="Drafts: none, natural, or synthetic:LENGTH.")] = "none",
    greedy: Annotated[bool, typer.Option("--greedy/--sample", help="Temperature 0, or 1.")] = True,
    model: Annotated[str, typer.Option(help="Model name, if the server has several.")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    machine: Annotated[str, typer.Option(help="The server's hardware, if it is not this machine.")] = "",
    chips: Annotated[int, typer.Option(help="Accelerators of the server: tp * pp * pcp.", min=1)] = 1,
    server_version: Annotated[str, typer.Option(help="The server's version, if it does not tell it itself.")] = "",
    token_range: Annotated[str, typer.Option(help="Ids that random prompts are drawn from, LOW:HIGH.")] = "256:1024",
    seed: Annotated[int, typer.Option(help="Of random prompts.")] = 0,
    label: Annotated[str, typer.Option(help="A name for what is measured.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer token.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file.")] = None,
) -> None:
    """TTFT, TPOT, chunk gaps, latency, interactivity, tokens per second per chip, errors and goodput by concurrency."""
    from stepkernel.cli.serve_table import FORMULA, print_serve
    from stepkernel.measure.decode import MOST_BUSY
    from stepkernel.measure.files import write_record
    from stepkernel.measure.load import file_dataset, random_dataset, sweep
    from stepkernel.measure.record import Client, Protocol, ServeRecord
    from stepkernel.measure.serve import serve_points
    from stepkernel.measure.simulated import chunks_per_second
    from stepkernel.measure.summary import common, measured, token_counts
    from stepkernel.measure.target import ServerTarget

    slots = list(dict.fromkeys(integers(concurrency, "--concurrency", low=1)))
    limits = parse_limits(goodput or [])
    accepted, length = parse_acceptance(acceptance)
    ids = id_range(token_range)
    if json_file is not None:
        check_writable(json_file, "--json")
    if dataset == "random":
        data = random_dataset(sum(slots) * requests_per_slot, input_len, output_len, ids, seed)
    else:
        data = file_dataset(Path(dataset), output_len, ids, seed)
    temperature = 0.0 if greedy else 1.0
    kind = one_endpoint(endpoint)
    server: Any = ServerTarget(target, model, kind, machine, chips, label, server_version, api_key, temperature)
    try:
        capacity = chunks_per_second()
        results().print(f"client: {capacity:,.0f} chunks per second on one core", soft_wrap=True)
        blocks = tuple(sweep(server, data, slots, requests_per_slot, warm_up, notes()))
    finally:
        server.close()
    requests = measured(blocks)
    record = ServeRecord(
        server.environment,
        Protocol(
            "serve",
            "requests sent at the times of the trace, at most the concurrency at a time"
            if data.timed
            else f"closed loop: {requests_per_slot} requests for each one in flight",
            FORMULA,
            common(r.input_tokens for r in requests),
            common(r.output_tokens for r in requests),
            data.name,
            "greedy" if greedy else "temperature 1",
            accepted,  # type: ignore[arg-type]
            length,
            token_counts=token_counts(requests),
        ),
        Client("httpx2", capacity),
        serve_points(blocks, chips, limits),
        blocks,
        limits,
    )
    print_serve(record, results())
    if json_file is not None:
        write_record(record, json_file)
        messages().print(f"written to {json_file}", style="dim")
    busy = max((b.client_busy or 0.0 for b in blocks), default=0.0)
    if busy > MOST_BUSY:
        results().print(f"refused client-bound: the client computed {100 * busy:.0f} % of a block's time", style="red")
    if busy > MOST_BUSY or any(point.requests == 0 for point in record.points):
        raise typer.Exit(FAILED)


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """{ttft: ms, ...} from `ttft:500` and the like."""
    from stepkernel.measure.serve import LIMITS

    found: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
        if name not in LIMITS or not 0 < value < float("inf"):
            raise ValueError(f"--goodput {text}: expected {', '.join(f'{n}:MS' for n in LIMITS)}")
        found[name] = value
    return found
