"""`stepkernel generate`: text or tokens from a prompt, streamed or as JSON."""

import json
import secrets
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from stepkernel.cli.common import DEVICE, KERNELS, integers, messages, model_directory, numpy_threads, one_line_errors

FAILED = 1


@one_line_errors
def generate(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3 or tiny-kimi-linear.")],
    prompt: Annotated[str | None, typer.Option(help="Prompt text; special tokens in it are text.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt text.")] = None,
    prompt_token_ids: Annotated[str | None, typer.Option(help="Prompt as ids: 1,2,3. Taken as is.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    decode_backend: Annotated[str, typer.Option(help="latency_specialized or standard.")] = "latency_specialized",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes drawing repeatable; default: random.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the generation; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end tokens.")] = False,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Prompts one token at a time too: no bit depends on the route.")
    ] = False,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    kv_cache_dtype: Annotated[str, typer.Option(help="Latent rows of model and draft: bfloat16 or fp8.")] = "bfloat16",
    draft: Annotated[str | None, typer.Option(help="Directory of a DSpark draft, or tiny-k3-dspark.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Most drafts of a round. Default: all that the draft was trained for.")
    ] = None,
    fixed_drafts: Annotated[
        bool, typer.Option("--fixed-drafts", help="Draft as many in every round, also where that is slower.")
    ] = False,
    block_verification: Annotated[
        bool, typer.Option("--block-verification", help="Judge drafts jointly when sampling; exact too.")
    ] = False,
    recurrent_states: Annotated[
        str, typer.Option(help="KDA states with drafts: per-position, or recovering (one and records).")
    ] = "per-position",
    recurrent_dtype: Annotated[str, typer.Option(help="KDA states: float32 or bfloat16.")] = "float32",
    synthetic_acceptance_length: Annotated[
        float | None, typer.Option(help="Accept by rate, tokens per round; for timing, the text is none.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE)] = "cpu",
    kernels: Annotated[Path | None, typer.Option(help=KERNELS)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate from a prompt with the specialised step or the standard path."""
    numpy_threads(threads)
    from stepkernel.cli import speculating
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.model.config import ModelConfig
    from stepkernel.runtime.engine import EngineOptions
    from stepkernel.runtime.invariant import BatchInvariantSession
    from stepkernel.runtime.sampling import Sampling
    from stepkernel.runtime.sequence import StopRules, check_prompt
    from stepkernel.runtime.session import Session
    from stepkernel.runtime.text import TextCodec

    options = EngineOptions(
        decode_backend,  # type: ignore[arg-type]
        threads,
        activation_bits,
        max_requests=1,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        recurrent_dtype=recurrent_dtype,  # type: ignore[arg-type]
    )
    rules = StopRules(max_tokens, tuple(stop or ()), ignore_eos=ignore_eos)
    drawn = secrets.randbits(32) if seed is None and temperature > 0 else seed or 0
    sampling = Sampling(temperature, top_k, top_p, drawn)
    if seed is not None and sampling.is_greedy:
        raise ValueError("--seed has no effect at temperature 0; set --temperature or drop it")
    draft_dir, speculation = speculating.speculation_of(
        draft, num_speculative_tokens, block_verification, synthetic_acceptance_length, fixed_drafts, recurrent_states
    )
    text = _prompt_text(prompt, prompt_file, prompt_token_ids)
    directory = model_directory(model)
    config = ModelConfig.from_file(directory)
    codec = TextCodec(directory)
    if text is not None:
        ids = [config.bos_token_id, *codec.encode(text)]
    else:
        ids = integers(prompt_token_ids or "", "--prompt-token-ids")
    context = min(config.max_positions, len(ids) + max_tokens)
    check_prompt(ids, config.vocab_size, context)
    if text is None and not as_json and not codec.available:
        raise ValueError(f"{directory}: no tokenizer.json, so there is no text to print; add --json for token ids")

    console = messages()
    started = time.perf_counter()
    with progress_bar(console, *opening(console, options.backend, device)) as report:
        session = (BatchInvariantSession if batch_invariant else Session).open(
            directory,
            options.backend,
            threads,
            1,
            context,
            activation_bits,
            draft=draft_dir,
            speculation=speculation,
            kv_cache_dtype=options.kv_cache_dtype,
            recurrent_dtype=options.recurrent_dtype,
            progress=report,
            device=device,  # type: ignore[arg-type]
            kernels=kernels,
        )
    opened = time.perf_counter()
    with session:
        session.add(ids, sampling, rules)
        arrivals, result = [], None
        for event in session.stream():
            arrivals.append(time.perf_counter())
            result = event.result
            if not as_json and event.text:
                print(event.text, end="", flush=True)
        assert result is not None  # a request that was admitted always ends
        timings = _timings(session, started, opened, arrivals)
        routes = session.engine.routes.as_dict()
    if as_json:
        found = {
            "token_ids": list(result.token_ids),
            "text": result.text,
            "prompt_token_ids": list(result.prompt_token_ids),
            "finish_reason": result.finish_reason,
            "message": result.message,
            "sampling": {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": drawn},
            "decode_backend": options.backend,
            "device": device,
            "kv_cache_dtype": options.kv_cache_dtype,
            "timings": timings,
            "routes": routes,
            "speculation": None if session.speculator is None else speculating.as_dict(session),
        }
        print(json.dumps(found))
    else:
        print()
        _report(console, timings, routes, len(result.token_ids), result.finish_reason)
        if batch_invariant:
            _report_invariance(console, session, len(result.prompt_token_ids))
        if session.speculator is not None:
            for line in speculating.lines(session):
                console.print(line, style="dim", soft_wrap=True)
        if sampling.temperature > 0:
            console.print(f"seed {drawn}", style="dim")
    if result.message:
        print(f"stepkernel: {result.message}", file=sys.stderr)
        raise typer.Exit(FAILED)


def _prompt_text(prompt: str | None, file: Path | None, ids: str | None) -> str | None:
    """Text of the prompt, None if it comes as ids; ValueError unless exactly one source is given."""
    if sum(x is not None for x in (prompt, file, ids)) != 1:
        raise ValueError("give the prompt by exactly one of --prompt, --prompt-file and --prompt-token-ids")
    if file is None:
        return prompt
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _timings(session: Any, started: float, opened: float, arrivals: list[float]) -> dict[str, Any]:
    kind = "specialized" if session.engine.options.backend == "latency_specialized" else "standard"
    steps = [1e3 * s for s in session.engine.decode_seconds(kind)]
    gaps = [1e3 * (b - a) for a, b in pairwise(arrivals)]
    return {
        "open_s": opened - started,
        "first_token_s": arrivals[0] - opened,
        "total_s": arrivals[-1] - opened,
        "decode_steps": len(steps),
        "decode_step_ms_median": statistics.median(steps),
        "token_gap_ms_median": statistics.median(gaps) if gaps else None,
    }


def _report(console: Any, timings: dict[str, Any], routes: dict[str, Any], tokens: int, reason: str) -> None:
    taken = "; ".join(f"{kind}: {count} x {why}" for kind, reasons in routes.items() for why, count in reasons.items())
    console.print(
        f"{tokens} tokens, ended by {reason}. opened in {timings['open_s']:.1f} s, first token after "
        f"{timings['first_token_s']:.2f} s, decode step {timings['decode_step_ms_median']:.2f} ms (median of "
        f"{timings['decode_steps']}, one request, executor only)\nsteps by path: {taken}",
        style="dim",
        soft_wrap=True,
    )


def _report_invariance(console: Any, session: Any, prompt: int) -> None:
    """What the prompt cost; `eval invariance` measures the same next to chunks."""
    taken = [1e3 * step.seconds for step in list(session.engine.times)[: prompt - 1]]
    each = f", {statistics.fmean(taken):.2f} ms each" if taken else ""
    console.print(
        f"batch-invariant: {prompt - 1} prompt tokens one at a time took {sum(taken):.1f} ms{each}",
        style="dim",
        soft_wrap=True,
    )
