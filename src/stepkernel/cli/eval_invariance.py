"""`stepkernel eval invariance`: does a request's output depend on its company?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import check_writable, messages, model_directory, numpy_threads, one_line_errors, results

FAILED = 1
FORMULA = (
    "changed = share of float32 values (logits of every step, caches, states) whose bits differ; largest = |difference|"
)


@one_line_errors
def invariance(
    model: Annotated[str, typer.Argument(help="A model directory, or tiny-k3 or tiny-kimi-linear.")],
    path: Annotated[str, typer.Option(help="latency_specialized or standard.")] = "latency_specialized",
    tokens: Annotated[int, typer.Option(help="Steps of each run.", min=2)] = 20,
    batch: Annotated[int, typer.Option(help="Most requests together.", min=2, max=64)] = 16,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of the comparison of routes.", min=2)] = 64,
    seed: Annotated[int, typer.Option(help="Of the tokens.", min=0)] = 0,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    activation_bits: Annotated[int, typer.Option(help="Activations of MXFP4 experts: 15 or 8.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file.")] = None,
) -> None:
    """Run a request alone and in company and compare every bit. Exit code 1 if company changes one."""
    numpy_threads(threads)
    import numpy as np

    from stepkernel.cli.eval_table import print_figures, print_limits, print_verdict
    from stepkernel.cli.loading import opening, progress_bar
    from stepkernel.evaluate.invariance import Company, company_effects, route_effects, stage_effects
    from stepkernel.evaluate.paths import Paths
    from stepkernel.evaluate.record import AccuracyRecord, Limit, broken_limits, write_record
    from stepkernel.measure.record import Environment
    from stepkernel.model.checkpoint import Checkpoint
    from stepkernel.runtime import provenance
    from stepkernel.runtime.engine import EngineOptions

    options = EngineOptions(path, threads, activation_bits, max_requests=batch)  # type: ignore[arg-type]
    if json_file is not None:
        check_writable(json_file, "--json")
    directory, log, out = model_directory(model), messages(), results()
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    if max(tokens, prompt) > config.max_positions:
        raise ValueError(f"--tokens {tokens}, --prompt {prompt}: the model takes {config.max_positions} positions")
    limits = (Limit("companies_that_change_bits", at_most=0),)
    how = f"{tokens} decode steps, alone and among up to {batch} requests; {prompt} prompt tokens by several routes"
    print_limits(path, how, limits, out)
    weights = checkpoint.weights()
    random = np.random.default_rng(seed)
    ids = [config.bos_token_id, *random.integers(0, config.vocab_size, max(tokens, prompt)).tolist()]
    with progress_bar(log, *opening(log, options.backend)) as report:
        paths = Paths(weights, threads, activation_bits, report)
        make = paths.make(options.backend)
        company = company_effects(config, make, ids[:tokens], batch)
    stages = stage_effects(config, make, ids[: min(4, tokens)], Company(min(6, batch - 1), 1))
    routes, costs = route_effects(config, make, paths.make("standard"), ids[:prompt], (7, 256))
    changed = [effect for effect in company if effect.changed]
    summary = {
        "companies": float(len(company)),
        "companies_that_change_bits": float(len(changed)),
        "largest_change": max(effect.largest for effect in company),
        "stage_kinds_that_depend_on_company": float(sum(effect.changed > 0 for effect in stages.values())),
        "routes_that_change_bits": float(sum(effect.changed > 0 for effect in routes)),
    }
    tables = {
        "company": {effect.what: _row(asdict(effect)) for effect in company},
        "stage kind": {kind: _row(asdict(effect)) for kind, effect in sorted(stages.items())},
        "route": {effect.what: _row(asdict(effect)) for effect in routes},
        "ms per prompt token": {way: {"ms": ms} for way, ms in costs.items()},
    }
    record = AccuracyRecord(
        "invariance",
        Environment(
            model=directory.resolve().name,
            machine=provenance.machine(),
            versions=provenance.versions(),
            commit=provenance.commit(),
            weights_hash=provenance.weights_hash(directory),
            threads=threads or provenance.processors(),
            flags=(f"activation_bits={activation_bits}", f"path={path}"),
        ),
        how,
        FORMULA,
        limits,
        summary,
        not broken_limits(limits, summary),
        tables,
    )
    for heading, rows in tables.items():
        print_figures(heading, rows, out)
    print_verdict(record, out)
    if json_file is not None:
        write_record(record, json_file)
    if not record.passed:
        raise typer.Exit(FAILED)


def _row(effect: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in effect.items() if name != "what"}
