"""`stepkernel eval long-context`: caches and states at up to a million positions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepkernel.cli.common import (
    IN_REPOSITORY,
    check_writable,
    integers,
    messages,
    model_directory,
    numpy_threads,
    one_line_errors,
    results,
)

if TYPE_CHECKING:
    from stepkernel.model.config import ModelConfig

FAILED = 1
FORMULA = (
    "error = |found - float64| / |float64| of one attention output (BF16) or of the recurrent state; ms = median of "
    "the stage alone, one request, with its Python call; step ms = a whole step as one call, one request; attention, "
    "rest = its MLA attention stages, all others; growth = at the most positions / at the fewest"
)


@one_line_errors
def long_context(
    model: Annotated[str, typer.Argument(help="Shapes: a preset or a directory with config.json.")] = "tiny-k3",
    positions: Annotated[str, typer.Option(help="Ascending.")] = "32768,131072,1048576",
    path: Annotated[str, typer.Option(help="latency_specialized, standard or reference.")] = "latency_specialized",
    max_attention_error: Annotated[float, typer.Option(help="Bound; 2^-8 is BF16 rounding.", min=0)] = 2**-8,
    max_state_error: Annotated[float, typer.Option(help="Bound of the drift.", min=0)] = 1e-3,
    threads: Annotated[int | None, typer.Option(help="Default: all processors.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file.")] = None,
) -> None:
    """Run MLA and KDA stages at long contexts on synthetic values, against float64. Exit code 1 above a bound.

    Whole steps are counted in bytes, and timed if MODEL has weights.
    """
    numpy_threads(threads)
    from stepkernel.cli.eval_table import print_figures, print_limits, print_verdict
    from stepkernel.cli.loading import progress_bar
    from stepkernel.evaluate.long_context import attention_points, recurrence_points
    from stepkernel.evaluate.paths import PATHS, Paths
    from stepkernel.evaluate.record import AccuracyRecord, Limit, broken_limits, write_record
    from stepkernel.measure.record import Environment
    from stepkernel.model.presets import resolve_config
    from stepkernel.runtime import provenance

    counts = integers(positions, "--positions", low=1)
    if counts != sorted(set(counts)):
        raise ValueError(f"--positions {positions!r}: expected ascending numbers")
    if path not in PATHS:
        raise ValueError(f"--path {path!r}: supported: {', '.join(PATHS)}")
    if json_file is not None:
        check_writable(json_file, "--json")
    config, out = resolve_config(model), results()
    limits = (
        Limit("attention_error", at_most=max_attention_error),
        Limit("state_error", at_most=max_state_error),
        Limit("rest_bytes_growth", at_most=1),
    )
    how = f"single stages of the shapes of {model}, synthetic values, up to {counts[-1]} positions"
    print_limits(path, how, limits, out)
    make = Paths(None, threads).make_for(path)  # type: ignore[arg-type]  # the stages bring weights of their own
    mla = attention_points(config, make, counts)
    with progress_bar(messages(), "recurrence") as report:
        kda = recurrence_points(config, make, counts, progress=report)
    rows = {
        str(a.positions): {
            "attention error": a.error,
            "attention ms": a.ms,
            "state error": b.error,
            "state size": b.size,
            "KDA ms": b.ms,
        }
        for a, b in zip(mla, kda, strict=True)
    }
    summary = {
        "attention_error": max(p.error for p in mla),
        "state_error": max(p.error for p in kda),
        "attention_growth": mla[-1].ms / mla[0].ms,
        "kda_growth": kda[-1].ms / kda[0].ms,
    }
    steps, growth = _steps(model, config, path, threads, counts)
    summary.update(growth)
    tables = {"positions": rows, "context of a step": steps}
    for heading, table in tables.items():
        print_figures(heading, table, out)
    environment = Environment(
        model=model,
        machine=provenance.machine(),
        versions=provenance.versions(),
        commit=provenance.commit(),
        threads=threads or provenance.processors(),
        flags=(f"path={path}",),
    )
    passed = not broken_limits(limits, summary)
    record = AccuracyRecord("long_context", environment, how, FORMULA, limits, summary, passed, tables)
    print_verdict(record, out)
    if json_file is not None:
        write_record(record, json_file)
    if not passed:
        raise typer.Exit(FAILED)


def _steps(
    model: str, config: "ModelConfig", path: str, threads: int | None, contexts: list[int]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """By context: bytes and, where there are weights, times of attention and the rest; and how much both grow."""
    from stepkernel.evaluate.paths import Paths
    from stepkernel.evaluate.step_cost import step_bytes, step_times
    from stepkernel.model.checkpoint import Checkpoint

    moved = step_bytes(config, contexts)
    rows = {str(b.context): {"attention MB": b.attention / 1e6, "rest MB": b.rest / 1e6} for b in moved}
    growth = {"rest_bytes_growth": moved[-1].rest / moved[0].rest}
    if moved[0].attention:
        growth["attention_bytes_growth"] = moved[-1].attention / moved[0].attention
    if Path(model).is_dir() or model in IN_REPOSITORY:
        weights = Checkpoint.open(model_directory(model)).weights()
        timed = step_times(config, Paths(weights, threads).make(path), contexts)  # type: ignore[arg-type]
        for t in timed:
            rows[str(t.context)] |= {"attention ms": t.attention, "rest ms": t.rest, "step ms": t.step}
        growth["rest_time_growth"] = timed[-1].rest / timed[0].rest
        growth["attention_time_growth"] = timed[-1].attention / timed[0].attention
    return rows, growth
