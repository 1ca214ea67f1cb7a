"""`stepkernel kernels`: the GPU kernels, made and checked without a GPU."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from stepkernel.cli.common import check_writable, one_line_errors
from stepkernel.cuda.cases import (
    GRID,
    PAGE_TOKENS,
    Case,
    StageCase,
    many,
    published,
    small,
    stages,
    tiny,
    variants,
    wide,
    wide_stages,
)
from stepkernel.cuda.compile import CompilerMissing, compile_kernel, resources
from stepkernel.cuda.group_cases import Item, exchanges, ranks
from stepkernel.cuda.kernel_search import Formats
from stepkernel.cuda.manifest import write
from stepkernel.cuda.spec import ARCHES

if TYPE_CHECKING:
    from stepkernel.cuda import mutation

Kernels = Literal["published", "tests", "all"]
SHAPES = "1x1,8x1,1x8"
TOO_DIFFERENT = 1

kernels = typer.Typer(help="The GPU kernels: made and checked without a GPU.", no_args_is_help=True)


@kernels.callback()
def main() -> None:
    """The GPU kernels: made and checked without a GPU."""


@kernels.command()
@one_line_errors
def build(
    out: Annotated[Path, typer.Option(help="Directory for the kernels and manifest.json.", file_okay=False)],
    arch: Annotated[str, typer.Option(help=f"One or more of {', '.join(ARCHES)}.")] = "sm_90a,sm_103a",
    model: Annotated[
        str | None, typer.Option("--model", "--preset", help="A preset or a model directory: kernels of its steps.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="With --model: steps as requests x tokens of each.")] = SHAPES,
    ranks: Annotated[int, typer.Option(help="With --model: ranks that share it.", min=1)] = 1,
    page_tokens: Annotated[int, typer.Option(help="With --model: tokens of a cache page.", min=1)] = PAGE_TOKENS,
    grid: Annotated[
        int,
        typer.Option(help="With --model: CTAs, at most the GPU's multiprocessors (H200 132, GB300 148).", min=1),
    ] = GRID,
    kv_cache_dtype: Annotated[Literal["bfloat16", "fp8"], typer.Option(help="With --model: latent rows.")] = "bfloat16",
    recurrent_dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="With --model: KDA states.")
    ] = "float32",
    what: Annotated[
        Kernels | None,
        typer.Option("--kernels", help="Instead of --model: published models, tests or all."),
    ] = None,
    ptx: Annotated[bool, typer.Option("--ptx", help="Write compressed PTX instead of cubins.")] = False,
    max_registers: Annotated[int, typer.Option(help="Refuse kernels that need more.", min=16, max=255)] = 232,
) -> None:
    """Compiles every kernel for every architecture; fails if one spills registers or needs too many.

    Default: those of the published models. With --model, what the directory holds already stays.
    """
    wanted = _arches(arch)
    if model is not None and what is not None:
        raise ValueError(f"--kernels {what} with --model {model}: give one of them")
    formats = Formats(kv_cache_dtype == "fp8", recurrent_dtype == "bfloat16")
    if model is None and formats != Formats():
        raise ValueError(f"{formats.options.strip()} without --model: the other kernels have formats of their own")
    cases = _cases(what or "published") if model is None else _steps(model, shapes, ranks, page_tokens, grid, formats)
    console = Console()
    table = Table("kernel", "arch", "registers", "spilled", "shared bytes", box=None)
    made = []
    bad = []
    try:
        for case in cases:
            spec = case.spec()
            for name in wanted:
                compiled = compile_kernel(spec, name)
                used = resources(compiled)
                made.append((compiled, used))
                table.add_row(spec.name, name, str(used.registers), str(used.spill_bytes), str(used.shared_bytes))
                if used.spill_bytes or used.registers > max_registers:
                    bad.append(f"{spec.name} for {name}: {used.registers} registers, {used.spill_bytes} bytes spilled")
    except CompilerMissing as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    console.print(table)
    if bad:
        typer.echo(f"not written: {'; '.join(bad)}", err=True)
        raise typer.Exit(1)
    manifest = write(out, made, ptx, keep=model is not None)
    console.print(f"{len(made)} kernels in {manifest.parent}", highlight=False)


@kernels.command()
@one_line_errors
def check(
    directory: Annotated[Path, typer.Argument(help="What `build --kernels tests --ptx` wrote.", exists=True)],
    arch: Annotated[str, typer.Option(help=f"One or more of {', '.join(ARCHES)}.")] = "sm_90a,sm_103a",
    match: Annotated[str, typer.Option(help="Only kernels whose names hold this.")] = "",
    seed: Annotated[int | None, typer.Option(help="Random interleaving of warps; default: a fixed order.")] = None,
) -> None:
    """Executes built kernels on the CPU, with all checks, against the reference; random weights and contexts."""
    from ptxcheck import LaunchError
    from stepkernel.cuda.check_kernels import Checker
    from stepkernel.cuda.manifest import recorded

    console = Console()
    table = Table("kernel", "arch", "compared", "largest difference", "limit", "million instructions", box=None)
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        checker = Checker(Path(scratch))
        for item in _cases("tests"):
            if match not in item.name:
                continue
            for name in _arches(arch):
                try:
                    found = checker.check(item, recorded(directory, item.spec(), name), seed)
                except LaunchError as error:
                    wrong.append(f"{item.name} for {name}: {error}")
                    continue
                if found.wrong:
                    wrong.append(f"{item.name} for {name}: differs by {found.largest:.2g}, or wrote elsewhere")
                numbers = (f"{found.largest:.1e}", f"{found.limit:.1e}", f"{found.instructions / 1e6:.1f}")
                table.add_row(item.name, name, found.what, *numbers)
    console.print(table)
    if wrong:
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(TOO_DIFFERENT)


@kernels.command()
@one_line_errors
def mutate(
    directory: Annotated[Path, typer.Argument(help="What `build --kernels tests --ptx` wrote.", exists=True)],
    out: Annotated[Path, typer.Option(help="JSON file for the score; it may not fall.", dir_okay=False)],
    count: Annotated[int, typer.Option(help="Mutants of each kernel.", min=1)] = 20,
    match: Annotated[str, typer.Option(help="Only kernels whose names hold this.")] = "",
) -> None:
    """Puts single mistakes into the kernels' PTX and counts how many of them the emulated comparison notices."""
    from rich.progress import track

    from stepkernel.cuda import mutation, mutation_exchange, mutation_trials
    from stepkernel.cuda.check import synthetic
    from stepkernel.cuda.manifest import recorded
    from stepkernel.cuda.spec import source_hash

    console = Console()
    alone = [item for item in exchanges() if item.name in ("exchange_2", "exchange_4_multicast")]
    wanted: list[Item] = [*stages(), small()[1], *alone]
    items = [(item, "sm_90a") for item in wanted]
    items += [(item, "sm_103a") for item in wanted if item.name == "k3_moe_up"]
    outcomes: list[mutation.Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[str, mutation_trials.Model] = {}

        def model_of(case: Case) -> mutation_trials.Model:
            if case.name not in models:
                models[case.name] = mutation_trials.model_of(case, synthetic(case, Path(scratch) / case.name))
            return models[case.name]

        chosen = [(item, arch) for item, arch in items if match in item.name]
        for item, arch in track(chosen, "mutants", console=console, disable=not console.is_terminal):
            if isinstance(item, StageCase):
                trials = mutation_trials.of_stage(item, model_of(item.case))
            elif isinstance(item, Case):
                trials = mutation_trials.of_step(item, model_of(item))
            else:
                trials = mutation_exchange.of_exchange(item)
            text = recorded(directory, item.spec(), arch)
            walk = isinstance(item, Case)
            done = mutation.study(item.name, text, trials, count, _say_survivor, walk)
            console.print(f"{item.name} for {arch}: {sum(bool(o.noticed) for o in done)} of {len(done)} noticed")
            outcomes += done
    found = mutation.summary(outcomes, source_hash(), mutation.known_reasons(out))
    table = Table("mistake", "noticed", "survived", box=None)
    for kind, counts in found["kinds"].items():
        table.add_row(kind, str(counts.get("noticed", 0)), str(counts.get("survived", 0)))
    console.print(table)
    console.print(f"{found['noticed']} of {found['mutants']} noticed, {found['rate']:.1%}", highlight=False)
    mutation.write(out, found)


def _say_survivor(outcome: "mutation.Outcome") -> None:
    if not outcome.noticed:
        typer.echo(f"survived: {outcome.kind} in line {outcome.line}: {outcome.before} -> {outcome.after}")


@kernels.command("gpu-check")
@one_line_errors
def gpu_check(
    directory: Annotated[Path, typer.Argument(help="What `build --kernels all` wrote.", exists=True)],
    out: Annotated[Path, typer.Option(help="JSON file for the record.", dir_okay=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="All but the GPU: kernels, memory, bytes, time that it will take.")
    ] = False,
    arch: Annotated[str, typer.Option(help="With --dry-run: the GPU's.")] = "sm_90a",
    memory_gb: Annotated[float, typer.Option(help="With --dry-run: the GPU's memory (H200 141).", min=1)] = 141.0,
    with_torch: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Time the same stages in torch too, if it is installed.")
    ] = True,
) -> None:
    """On a GPU: kernels against the reference, then step times against the bytes and against the same stages in torch
    with CUDA graphs. Not run yet: no GPU was there."""
    from stepkernel.cli.gpu_table import timed_table
    from stepkernel.cuda import gpu_check as check
    from stepkernel.cuda.gpu_check import write as write_record

    check_writable(out, "--out")
    if dry_run:
        write_record(out, check.dry_run(directory, _arches(arch)[0], memory_gb, typer.echo))
        return
    record = check.gpu_check(directory, typer.echo, lambda found: write_record(out, found), with_torch)
    write_record(out, record)
    Console().print(timed_table(record.get("timed", [])))
    if not all(case["right"] for case in record["correct"]):
        raise typer.Exit(TOO_DIFFERENT)


def _steps(model: str, shapes: str, ranks: int, page_tokens: int, grid: int, formats: Formats) -> list[Case]:
    """Steps of a model; ValueError for those that the kernels cannot do, before anything is compiled."""
    from stepkernel.model.presets import PRESETS, resolve_config

    config = resolve_config(model)
    place = Path(model).resolve()
    name = model if model in PRESETS else (place.parent if place.suffix == ".json" else place).name
    label = name.replace("-", "_") + ("" if ranks == 1 else f"_tp{ranks}")
    kept = ("_fp8" if formats.fp8_latents else "") + ("_bf16" if formats.bf16_states else "")
    found = []
    for shape in shapes.split(","):
        requests, _, queries = shape.partition("x")
        if not (requests.isdigit() and queries.isdigit()):
            raise ValueError(f"--shapes {shapes}: expected requests x tokens of each, such as {SHAPES}")
        case = Case(
            f"{label}_{shape}{kept}",
            config,
            int(requests),
            int(queries),
            grid,
            page_tokens,
            ranks,
            latents="fp8" if formats.fp8_latents else "bf16",
            states="bfloat16" if formats.bf16_states else "float32",
        )
        case.plan()
        found.append(case)
    return found


def _cases(what: Kernels) -> Sequence[Item]:
    tests: list[Item] = [
        *stages(),
        *small(),
        *variants(),
        *tiny(),
        *many(),
        *wide_stages(),
        wide(),
        *exchanges(),
        *ranks(),
    ]
    if what == "tests":
        return tests
    return [*tests, *published()] if what == "all" else published()


def _arches(arch: str) -> list[str]:
    wanted = arch.split(",")
    for name in wanted:
        if name not in ARCHES:
            raise ValueError(f"--arch {name}: supported are {', '.join(ARCHES)}")
    return wanted
