"""`stepkernel kernels`: the GPU kernels, made and checked without a GPU."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from stepkernel.cli.common import one_line_errors
from stepkernel.cuda.cases import Case, StageCase, published, small, stages, tiny
from stepkernel.cuda.compile import CompilerMissing, compile_kernel, resources
from stepkernel.cuda.manifest import write
from stepkernel.cuda.spec import ARCHES

Kernels = Literal["published", "tests"]
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
    what: Annotated[
        Kernels, typer.Option("--kernels", help="Of the published models, or those tests run.")
    ] = "published",
    ptx: Annotated[bool, typer.Option("--ptx", help="Write compressed PTX instead of cubins.")] = False,
    max_registers: Annotated[int, typer.Option(help="Refuse kernels that need more.", min=16, max=255)] = 232,
) -> None:
    """Compiles every kernel for every architecture; fails if one spills registers or needs too many."""
    wanted = _arches(arch)
    console = Console()
    table = Table("kernel", "arch", "registers", "spilled", "shared bytes", box=None)
    made = []
    bad = []
    try:
        for case in _cases(what):
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
    manifest = write(out, made, ptx)
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
    from stepkernel.cuda.check import STAGE_LIMIT, Emulated, exceeding, live_contexts, synthetic
    from stepkernel.cuda.manifest import recorded

    console = Console()
    table = Table("kernel", "arch", "compared", "largest difference", "limit", "million instructions", box=None)
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        models: dict[object, Emulated] = {}
        for item in _cases("tests"):
            if match not in item.name:
                continue
            case = item.case if isinstance(item, StageCase) else item
            if case.name not in models:
                weights = synthetic(case, Path(scratch) / case.name)
                models[case.name] = Emulated(case, weights, live_contexts(case))
            emulated = models[case.name]
            for name in _arches(arch):
                text = recorded(directory, item.spec(), name)
                try:
                    if isinstance(item, StageCase):
                        found = emulated.stages(text, item.plan(), {item.stage}, seed)
                        largest = max(d.relative_l2 for d in found)
                        failed, limit, what = bool(exceeding(found)), STAGE_LIMIT, "stage"
                        done = emulated.instructions
                    else:
                        step = emulated.step(text, seed)
                        largest, limit, what = step.found["logits"], step.rounding["logits"], "whole step"
                        failed, done = step.wrong, step.result.instructions
                except LaunchError as error:
                    wrong.append(f"{item.name} for {name}: {error}")
                    continue
                if failed:
                    wrong.append(f"{item.name} for {name}: differs by {largest:.2g}, or wrote elsewhere")
                table.add_row(item.name, name, what, f"{largest:.1e}", f"{limit:.1e}", f"{done / 1e6:.1f}")
    console.print(table)
    if wrong:
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(TOO_DIFFERENT)


def _cases(what: Kernels) -> Sequence[Case | StageCase]:
    tests: list[Case | StageCase] = [*stages(), *small(), *tiny()]
    return published() if what == "published" else tests


def _arches(arch: str) -> list[str]:
    wanted = arch.split(",")
    for name in wanted:
        if name not in ARCHES:
            raise ValueError(f"--arch {name}: supported are {', '.join(ARCHES)}")
    return wanted
