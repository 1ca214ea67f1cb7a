"""`stepkernel bench speculation` and `bench acceptance`: what drafts cost, and how often they are right."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from stepkernel.cli.common import (
    assets,
    check_writable,
    integers,
    model_directory,
    notes,
    numpy_threads,
    one_line_errors,
    results,
)

if TYPE_CHECKING:
    from stepkernel.measure.adaptive import AdaptiveTiming

COLUMNS = (
    "reqs = running requests, K = drafts; plain round, verification step, draft and whole round in ms; ratio = verify "
    "/ plain; even = tokens per round from which K drafts pay; tokens = per request and round; gain = speed-up"
)
CACHE = typer.Option(help="Latent rows of model and draft: bfloat16 or fp8.")
STATES = typer.Option(help="KDA states: per-position, or recovering (one and records).")
DTYPE = typer.Option(help="KDA states: float32 or bfloat16.")
DRAFT = typer.Option(help="Directory of a DSpark draft, or tiny-k3-dspark.")


@one_line_errors
def speculation(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3.")],
    draft: Annotated[str, DRAFT],
    num_speculative_tokens: Annotated[str, typer.Option(help="Numbers of drafts to time: 1,3,7.")] = "1,3,7",
    running_requests: Annotated[str, typer.Option(help="Loads to time: 1,2,4,8.")] = "1,4",
    context: Annotated[int, typer.Option(help="Tokens that each request already holds.", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds in each of the two blocks; with --adaptive, all.", min=1)] = 30,
    synthetic_acceptance_length: Annotated[
        float | None, typer.Option(help="Accept by rate, so many tokens per round.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Time decode with an adapting number of drafts, up to the largest.")
    ] = False,
    kv_cache_dtype: Annotated[str, CACHE] = "bfloat16",
    recurrent_states: Annotated[str, STATES] = "per-position",
    recurrent_dtype: Annotated[str, DTYPE] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Time rounds of drafting and verification against plain decode of the same session."""
    numpy_threads(threads)
    from stepkernel.cli.speculating import NOTE, draft_directory
    from stepkernel.measure.adaptive import time_adaptive
    from stepkernel.measure.speculation import FORMULA, PROTOCOL, CacheOptions, time_rounds
    from stepkernel.runtime import provenance

    caches = CacheOptions(kv_cache_dtype, recurrent_states, recurrent_dtype)  # type: ignore[arg-type]

    loads = integers(running_requests, "--running-requests", low=1)
    drafts = integers(num_speculative_tokens, "--num-speculative-tokens", low=1)
    if json_file is not None:
        check_writable(json_file, "--json")
    directory = model_directory(model)
    if adaptive:
        given = (context, rounds, threads, activation_bits, synthetic_acceptance_length, notes(), caches)
        if json_file is not None:
            raise ValueError("--json does not go with --adaptive; drop one of them")
        print_adaptive(time_adaptive(directory, draft_directory(draft), loads, max(drafts), *given))
        return
    found = time_rounds(
        directory,
        draft_directory(draft),
        loads,
        drafts,
        context,
        rounds,
        threads,
        activation_bits,
        synthetic_acceptance_length,
        notes(),
        caches,
    )
    natural = synthetic_acceptance_length is None
    kind = "natural" if natural else f"SYNTHETIC, {synthetic_acceptance_length:g} tokens per round"
    console = results()
    used = threads or provenance.processors()
    console.print(
        f"[bold]{directory.resolve().name}[/]  rounds of drafts, {used} threads, context {context}; acceptance: {kind}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("reqs", "K", "plain", "verify", "ratio", "draft", "round", "even", "tokens", "tok/s", "gain"):
        table.add_column(heading, justify="right")
    for t in found:
        table.add_row(
            str(t.running_requests),
            str(t.drafts),
            *(f"{ms:.2f}" for ms in (t.plain_ms, t.verify_ms)),
            f"{t.verify_ratio:.2f}",
            *(f"{ms:.2f}" for ms in (t.draft_ms, t.round_ms)),
            *(f"{value:.2f}" for value in (t.break_even, t.tokens_per_round)),
            f"{t.tokens_per_second:.0f}",
            f"{t.speed_up:.2f}",
        )
    console.print(table)
    for line in (COLUMNS, PROTOCOL, FORMULA, "" if natural else NOTE):
        if line:
            console.print(f"[dim]{line}.[/]", soft_wrap=True)
    if json_file is not None:
        record = {
            "kind": "speculation",
            "model": directory.resolve().name,
            "weights_hash": provenance.weights_hash(directory),
            "draft_hash": provenance.weights_hash(draft_directory(draft)),
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "threads": used,
            "context": context,
            "caches": asdict(caches),
            "acceptance": "natural" if natural else "synthetic",
            "synthetic_acceptance_length": synthetic_acceptance_length,
            "protocol": PROTOCOL,
            "formula": FORMULA,
            "results": [
                {**asdict(t), "break_even": t.break_even, "speed_up": t.speed_up, "verify_ratio": t.verify_ratio}
                for t in found
            ],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def print_adaptive(found: "list[AdaptiveTiming]") -> None:
    from stepkernel.measure.adaptive import PROTOCOL

    console = results()
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = ("reqs", "turns", "plain", "adaptive", "ratio", "again", "excess", "tokens", "rounds by drafts")
    for heading in headings:
        table.add_column(heading, justify="right")
    for t in found:
        used = ", ".join(f"{n} x {k}" for k, n in enumerate(t.rounds_by_drafts) if n)
        times = (f"{t.plain_ms:.3f}", f"{t.adaptive_ms:.3f}", f"{t.ratio:.3f}", f"{t.again:.3f}")
        counts = (f"{100 * t.excess:+.2f} %", f"{t.tokens_per_round:.2f}", used)
        table.add_row(str(t.running_requests), str(t.turns), *times, *counts)
    console.print(table)
    console.print(
        "[dim]plain, adaptive = ms per token of a request; ratio = adaptive / plain; again = another session without a "
        "draft / plain, which is the machine's own doing; excess = what rounds with drafts took beyond the median "
        "plain round for each of their tokens, as a share of all at that pace (negative: they gained); tokens = per "
        f"request and round. {PROTOCOL}.[/]",
        soft_wrap=True,
    )


@one_line_errors
def acceptance(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3.")],
    draft: Annotated[str, DRAFT],
    text: Annotated[
        Path | None, typer.Option(help="Documents separated by empty lines. Default: the held-out text of tiny-k3.")
    ] = None,
    num_speculative_tokens: Annotated[str, typer.Option(help="Numbers of drafts: 1,3,7.")] = "1,2,3,4,5,6,7",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each document that are the prompt.", min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate behind each.", min=1)] = 96,
    documents: Annotated[int, typer.Option(help="Documents to use.", min=1)] = 16,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    kv_cache_dtype: Annotated[str, CACHE] = "bfloat16",
    recurrent_states: Annotated[str, STATES] = "per-position",
    recurrent_dtype: Annotated[str, DTYPE] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Natural acceptance of a draft on text, greedy: tokens per verification, and by position."""
    numpy_threads(threads)
    from stepkernel.cli.speculating import draft_directory
    from stepkernel.measure.speculation import CacheOptions, natural_acceptance

    drafts = integers(num_speculative_tokens, "--num-speculative-tokens", low=1)
    source = assets() / "kjv-heldout.txt" if text is None else text
    try:
        content = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not content.strip():
        raise ValueError(f"{source}: holds no text")
    found = natural_acceptance(
        model_directory(model),
        draft_directory(draft),
        content,
        drafts,
        prompt_tokens,
        max_tokens,
        documents,
        threads,
        notes(),
        CacheOptions(kv_cache_dtype, recurrent_states, recurrent_dtype),  # type: ignore[arg-type]
    )
    if as_json:
        print(json.dumps({"acceptance": "natural", "text": source.name, "results": [asdict(a) for a in found]}))
        return
    console = results()
    console.print(
        f"natural acceptance, greedy, {source.name}: {documents} documents, {prompt_tokens} prompt tokens, "
        f"{max_tokens} generated",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("drafts", "steps", "tokens each", *(f">={i}" for i in range(1, max(drafts) + 1))):
        table.add_column(heading, justify="right")
    for a in found:
        shares = [f"{share:.3f}" for share in a.at_least] + [""] * (max(drafts) - a.drafts)
        table.add_row(str(a.drafts), str(a.verifications), f"{a.length:.2f}", *shares)
    console.print(table)
    console.print(
        "[dim]steps = verifications; tokens each = accepted drafts + 1 per step; >=i = share of steps that accepted at "
        "least i drafts.[/]",
        soft_wrap=True,
    )
