"""`stepkernel bench decode`: the step protocol against a server or a model in this process."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

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

REFUSED = 1
STANDARD_BACKENDS = ("standard", "auto")


@one_line_errors
def decode(
    target: Annotated[str, typer.Argument(help="http://HOST:PORT of an OpenAI-compatible server, or a model.")],
    running_requests: Annotated[str, typer.Option(help="Requests that decode together: 1,2,4,8.")] = "1,2,4,8",
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 1,
    output_len: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 1024,
    runs: Annotated[int, typer.Option(help="Runs per load and side.")] = 3,
    prompts: Annotated[int, typer.Option(help="Waves of N requests in each run.")] = 4,
    warm_up: Annotated[int, typer.Option(help="Waves per side and load before the samples.")] = 1,
    baseline: Annotated[
        str | None, typer.Option(help="Measured in turn with it: another address; for a model: standard.")
    ] = None,
    decode_backend: Annotated[
        str, typer.Option(help="Model in this process: latency_specialized or standard.")
    ] = "latency_specialized",
    mixed: Annotated[bool, typer.Option("--mixed", help="Refill slots, so that prefill meets decode.")] = False,
    greedy: Annotated[bool, typer.Option("--greedy/--sample", help="Temperature 0, or 1.")] = True,
    acceptance: Annotated[str, typer.Option(help="Drafts of the server: none, natural, or synthetic:LENGTH.")] = "none",
    model: Annotated[str, typer.Option(help="Model name, if the server has several.")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    machine: Annotated[str, typer.Option(help="The server's hardware, if it is not this machine.")] = "",
    chips: Annotated[int, typer.Option(help="Accelerators of the server: tp * pp * pcp.", min=1)] = 1,
    server_version: Annotated[str, typer.Option(help="The server's version, if it does not tell it itself.")] = "",
    token_range: Annotated[str, typer.Option(help="Ids that random prompts are drawn from, LOW:HIGH.")] = "256:1024",
    threads: Annotated[int | None, typer.Option(help="Model in this process; default: all processors.")] = None,
    activation_bits: Annotated[int, typer.Option(help="Model in this process: 15 or 8.")] = 15,
    label: Annotated[str, typer.Option(help="A name for what is measured.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer token.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file.")] = None,
) -> None:
    """Median inter-token latency without prefill, while exactly N requests run; with a baseline: A B B A."""
    numpy_threads(threads)
    from stepkernel.cli.decode_table import print_decode
    from stepkernel.measure.decode import analyse
    from stepkernel.measure.files import write_record
    from stepkernel.measure.protocol import Plan, order, run_blocks
    from stepkernel.measure.record import Client, DecodeRecord, Protocol
    from stepkernel.measure.summary import common, measured, token_counts

    loads = tuple(dict.fromkeys(integers(running_requests, "--running-requests", low=1)))
    plan = Plan(loads, input_len, output_len, runs, prompts, warm_up, mixed, id_range(token_range))
    accepted, length = parse_acceptance(acceptance)
    if json_file is not None:
        check_writable(json_file, "--json")
    remote = target.startswith(("http://", "https://"))
    say = notes()
    with ExitStack() as stack:
        targets: dict[Any, Any] = {}
        client = Client("in process")
        if remote:
            from stepkernel.measure.simulated import chunks_per_second
            from stepkernel.measure.target import ServerTarget

            if baseline is not None and not baseline.startswith(("http://", "https://")):
                raise ValueError(f"--baseline {baseline}: a server is compared with a server; give http://HOST:PORT")
            kind, temperature = one_endpoint(endpoint), 0.0 if greedy else 1.0
            for side, address in (("A", target), ("B", baseline)):
                if address is not None:
                    name = label if side == "A" else "baseline"
                    targets[side] = ServerTarget(
                        address, model, kind, machine, chips, name, server_version, api_key, temperature
                    )
                    stack.callback(targets[side].close)
            capacity = chunks_per_second()
            client = Client("httpx2", capacity)
            results().print(f"client: {capacity:,.0f} chunks per second on one core", soft_wrap=True)
        else:
            if baseline is not None and baseline not in STANDARD_BACKENDS:
                raise ValueError(f"--baseline {baseline}: a model in this process is compared with `standard`")
            context = input_len + output_len
            for side, backend in (("A", decode_backend), ("B", baseline)):
                name = label if side == "A" else ""
                if backend is not None:
                    targets[side] = _session(
                        target,
                        backend,
                        threads,
                        max(loads),
                        context,
                        activation_bits,
                        greedy,
                        label if side == "A" else "",
                    )
                    stack.callback(targets[side].close)
        blocks = tuple(run_blocks(plan, targets, say))
    requests = measured(blocks)
    phase = "mixed" if mixed else "decode"
    protocol = Protocol(
        phase,  # type: ignore[arg-type]
        plan.description,
        FORMULA,
        common(r.input_tokens for r in requests) if not mixed else input_len,
        output_len,
        "random",
        "greedy" if greedy else "temperature 1",
        accepted,  # type: ignore[arg-type]
        length,
        runs,
        order(runs, len(targets)),
        token_counts(requests),
    )
    record = DecodeRecord(
        targets["A"].environment,
        protocol,
        client,
        analyse(blocks, mixed, accepted != "none"),
        blocks,
        targets["B"].environment if "B" in targets else None,
    )
    if not remote and decode_backend == "latency_specialized" and not mixed:
        record = replace(record, replay=_replays(record, model_directory(target), threads, activation_bits, say))
    print_decode(record, results())
    if json_file is not None:
        write_record(record, json_file)
        messages().print(f"written to {json_file}", style="dim")
    if any(result.refusals for result in record.results):
        raise typer.Exit(REFUSED)


FORMULA = (
    "step = median of the gaps between chunks in exactly-N windows; per token = sum of these gaps / sum of their "
    "tokens; ratio = baseline / measured for times, measured / baseline for throughput; interval: 95 % bootstrap over "
    "runs and waves"
)


def parse_acceptance(text: str) -> tuple[str, float | None]:
    """none, natural, or synthetic:LENGTH with the bonus token in LENGTH."""
    kind, _, length = text.partition(":")
    try:
        if kind in ("none", "natural") and not length:
            return kind, None
        if kind == "synthetic" and float(length) >= 1:
            return kind, float(length)
    except ValueError:
        pass
    raise ValueError(
        f"--acceptance {text}: expected none, natural or synthetic:LENGTH (at least 1, bonus token included)"
    )


def one_endpoint(text: str) -> Any:
    if text not in ("completions", "chat"):
        raise ValueError(f"--endpoint {text}: expected completions or chat")
    return text


def id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit()):
        raise ValueError(f"--token-range {text}: expected LOW:HIGH, two whole numbers")
    return int(low), int(high)


def _session(
    model: str, backend: str, threads: int | None, requests: int, context: int, bits: int, greedy: bool, label: str
) -> Any:
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.measure.embedded import SessionTarget

    kind: Any = "standard" if backend in STANDARD_BACKENDS else backend
    log = messages()
    with progress_bar(log, *opening(log, kind)) as report:
        return SessionTarget(
            model_directory(model), kind, threads, requests, context, bits, 0.0 if greedy else 1.0, label, report
        )


def _replays(record: Any, directory: Path, threads: int | None, bits: int, say: Callable[[str], None]) -> Any:
    from stepkernel.measure.crosscheck import replay_checks

    return replay_checks(record, directory, threads, bits, say)
