"""`stepkernel eval numerics URL --against URL`: two servers, through the log probabilities of prompts."""

import os
from dataclasses import asdict
from pathlib import Path

import typer

from stepkernel.cli.common import check_writable, integers, messages, model_directory, results

FAILED = 1
FORMULA = (
    "KL(baseline || candidate) in nats over the tokens that both servers name and one for all others, a lower bound of "
    "the KL over the vocabulary; covered = the baseline's mass of the named tokens; perplexity = exp(mean loss)"
)


def compare(
    candidate: str,
    baseline: str,
    tokenizer: str | None,
    text: Path | None,
    tokens: int,
    batch: str,
    max_mean_kl: float,
    min_top1: float,
    top: int,
    json_file: Path | None,
) -> None:
    """Prints and writes the figures; exits with 1 if a limit is broken."""
    from stepkernel.cli.eval_numerics import held_out
    from stepkernel.cli.eval_table import print_figures, print_limits, print_verdict
    from stepkernel.cli.loading import progress_bar
    from stepkernel.evaluate.answers import ServerAsker
    from stepkernel.evaluate.prompt_logprobs import compare_servers
    from stepkernel.evaluate.record import AccuracyRecord, Limit, broken_limits, write_record
    from stepkernel.evaluate.windows import read_text, token_windows
    from stepkernel.measure.record import Environment
    from stepkernel.model.config import ModelConfig
    from stepkernel.runtime import provenance
    from stepkernel.runtime.text import TextCodec

    if not baseline.startswith("http"):
        raise ValueError(f"--against {baseline!r}: a server is compared with a server; give http://HOST:PORT")
    if tokenizer is None:
        raise ValueError("two servers get token ids: give --tokenizer, the directory of their model")
    if json_file is not None:
        check_writable(json_file, "--json")
    count = integers(batch, "--batch", low=1)[0]
    if tokens < 2 * count:
        raise ValueError(f"--tokens {tokens}: at least 2 for each of {count} sequences are needed")
    directory, file, out = model_directory(tokenizer), text or held_out(), results()
    config = ModelConfig.from_file(directory)
    sequences = token_windows(config, TextCodec(directory), read_text(file), count, tokens // count, str(file))
    limits = (Limit("mean_kl", at_most=max_mean_kl), Limit("top1_agreement", at_least=min_top1))
    how = (
        f"log probabilities of {count} prompts of {tokens // count} tokens after a begin token, {top} likeliest tokens"
    )
    print_limits(f"{candidate} vs {baseline}", how, limits, out)
    key = os.environ.get("OPENAI_API_KEY", "")
    with (
        ServerAsker(candidate, key=key) as one,
        ServerAsker(baseline, key=key) as other,
        progress_bar(messages(), "comparing") as report,
    ):
        found, positions, samples = compare_servers(one, other, sequences, top, report)
        model = one.model
    summary = {name: float(value) for name, value in asdict(found).items()}
    passed = not broken_limits(limits, summary)
    record = AccuracyRecord(
        "numerics",
        Environment(model=model, versions=provenance.versions(), commit=provenance.commit(), server=candidate),
        f"{candidate} vs {baseline}: {how}",
        FORMULA,
        limits,
        summary,
        passed,
        series={"kl": tuple(samples), "kl by position": tuple(positions)},
    )
    print_figures("", {name: {"": value} for name, value in summary.items()}, out)
    print_verdict(record, out)
    if json_file is not None:
        write_record(record, json_file)
    if not passed:
        raise typer.Exit(FAILED)
