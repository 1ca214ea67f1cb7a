"""`stepkernel eval kv-cache`: the error of cheaper caches on real text."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import assets, messages, model_directory, notes, numpy_threads, one_line_errors, results


@one_line_errors
def kv_cache(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3.")],
    text: Annotated[Path | None, typer.Option(help="Text. Default: the held-out text of tiny-k3.")] = None,
    windows: Annotated[int, typer.Option(help="Pieces of the text, decoded side by side.", min=1, max=64)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each.", min=2)] = 256,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """KL of the next token's distribution with FP8 latents against BF16, and BF16 states against float32."""
    numpy_threads(threads)
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.evaluate.kv_cache import compare_kv_caches
    from stepkernel.evaluate.windows import read_text, token_windows
    from stepkernel.model.checkpoint import Checkpoint
    from stepkernel.runtime.engine import EngineOptions, pack
    from stepkernel.runtime.text import TextCodec

    options = EngineOptions(threads=threads, activation_bits=activation_bits, max_requests=windows)
    directory = model_directory(model)
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    source = assets() / "kjv-heldout.txt" if text is None else text
    pieces = token_windows(config, TextCodec(directory), read_text(source), windows, tokens, str(source))
    weights, console = checkpoint.weights(), messages()
    with progress_bar(console, *opening(console, options.backend)) as report:
        packed = pack(config, weights, options, report)
    found = compare_kv_caches(config, packed, pieces, options, notes())
    if as_json:
        print(json.dumps({"model": directory.resolve().name, "text": source.name, **asdict(found)}))
        return
    out = results()
    for what, change in (
        ("FP8 latent rows and queries against BF16", found.fp8_latents),
        ("BF16 recurrent states against float32", found.bf16_states),
    ):
        figures = change.figures
        out.print(
            f"[bold]{directory.resolve().name}[/]  {what}, {source.name}, {figures.positions} positions "
            f"({figures.broken} broken)\n"
            f"KL mean {figures.mean_kl:.3g}, median {figures.median_kl:.3g}, 99.9 % {figures.p999_kl:.3g}, largest "
            f"{figures.max_kl:.3g} nats; same first token in {100 * figures.top1_agreement:.2f} %\n"
            f"perplexity {figures.perplexity:.4f} against {figures.baseline_perplexity:.4f}; "
            f"{change.bytes / 1e6:.2f} MB against {change.baseline_bytes / 1e6:.2f} MB",
            soft_wrap=True,
        )
    out.print("[dim]teacher-forced, scales 1, same kernels and weights; nothing else differs.[/]", soft_wrap=True)
