"""`stepkernel eval numerics`: does a path compute what the reference computes, over real text?"""

from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import (
    assets,
    check_writable,
    integers,
    messages,
    model_directory,
    numpy_threads,
    one_line_errors,
    results,
)

FAILED = 1


@one_line_errors
def numerics(
    model: Annotated[str, typer.Argument(help="A model directory, tiny-k3 or tiny-kimi-linear, or http://HOST:PORT.")],
    against: Annotated[
        str, typer.Option(help="The truth: reference (float32), standard, latency_specialized; or a second server.")
    ] = "reference",
    candidate: Annotated[str, typer.Option(help="The path that is judged.")] = "latency_specialized",
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; default: the repository's held-out text.")] = None,
    tokens: Annotated[int, typer.Option(help="Compared positions in all.", min=2)] = 2048,
    batch: Annotated[str, typer.Option(help="Sequences in a step, and in a step of the yardstick.")] = "8,3",
    max_mean_kl: Annotated[float, typer.Option(help="Limit of the mean KL in nats.", min=0)] = 2e-4,
    min_top1: Annotated[float, typer.Option(help="Limit of the top-1 agreement.", min=0, max=1)] = 0.995,
    relative: Annotated[
        float | None,
        typer.Option(help="For random weights: limit of mean KL / the standard path's, instead of the two.", min=0),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of two servers: the model directory with its tokenizer.")
    ] = None,
    top_logprobs: Annotated[int, typer.Option(help="Of two servers: likeliest tokens they tell.", min=1)] = 20,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw KL by position and agreement by layer.")] = None,
) -> None:
    """Compare two paths over the same text: KL, top-1, perplexity, routers, states. Exit code 1 above a limit."""
    numpy_threads(threads)
    if model.startswith("http"):
        if relative is not None:
            raise ValueError("--relative is for models in this process; of two servers one is the baseline")
        from stepkernel.cli.eval_servers import compare

        compare(model, against, tokenizer, text, tokens, batch, max_mean_kl, min_top1, top_logprobs, json_file)
        return
    from stepkernel.cli.eval_table import print_limits, print_numerics
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.evaluate.paths import PATHS
    from stepkernel.evaluate.picture import draw
    from stepkernel.evaluate.record import write_record
    from stepkernel.evaluate.report import Plan, run
    from stepkernel.runtime.engine import EngineOptions

    for option, path in (("--against", against), ("--candidate", candidate)):
        if path not in PATHS:
            raise ValueError(f"{option} {path!r}: supported: {', '.join(PATHS)}")
    sizes = integers(batch, "--batch", low=1)
    if len(sizes) not in (1, 2):
        raise ValueError(f"--batch {batch!r}: expected one or two numbers, such as 8,3")
    options = EngineOptions(threads=threads, activation_bits=activation_bits, max_requests=sizes[0])
    other = sizes[1] if len(sizes) > 1 else max(1, sizes[0] // 2)
    plan = Plan(
        candidate,  # type: ignore[arg-type]
        against,  # type: ignore[arg-type]
        tokens,
        sizes[0],
        other,
        max_mean_kl,
        min_top1,
        relative,
        threads,
        activation_bits,
    )
    for file, name in ((json_file, "--json"), (picture, "--picture")):
        if file is not None:
            check_writable(file, name)
    directory, log, out = model_directory(model), messages(), results()
    print_limits(str(plan.main), plan.describe(), plan.limits, out)
    bar = progress_bar(log, *opening(log, options.backend))
    with progress_bar(log, "comparing") as report:
        found, errors, record = run(directory, plan, text or held_out(), report, bar)
    print_numerics(found, errors, record, out)
    if json_file is not None:
        write_record(record, json_file)
    if picture is not None:
        draw(record, picture)
    if not record.passed:
        raise typer.Exit(FAILED)


def held_out() -> Path:
    """The text that the tiny models have not seen."""
    file = assets() / "kjv-heldout.txt"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; run from a clone or give --text FILE")
    return file
