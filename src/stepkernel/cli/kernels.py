"""`stepkernel kernels`: the GPU kernels, made and checked without a GPU."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stepkernel.cuda.compile import CompilerMissing, compile_kernel, resources
from stepkernel.cuda.manifest import write
from stepkernel.cuda.spec import ARCHES, cases, published

kernels = typer.Typer(help="The GPU kernels: compile them for an architecture, without a GPU.", no_args_is_help=True)


@kernels.callback()
def main() -> None:
    """The GPU kernels: compile them for an architecture, without a GPU."""


@kernels.command()
def build(
    out: Annotated[Path, typer.Option(help="Directory for cubins and manifest.json.", file_okay=False)],
    arch: Annotated[str, typer.Option(help=f"One or more of {', '.join(ARCHES)}.")] = "sm_90a,sm_103a",
    cases_only: Annotated[bool, typer.Option("--cases", help="The small shapes that the tests execute.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Write PTX instead of cubins.")] = False,
    max_registers: Annotated[int, typer.Option(help="Refuse kernels that need more.", min=16, max=255)] = 128,
) -> None:
    """Compiles every kernel for every architecture; fails if one spills registers or needs too many."""
    wanted = arch.split(",")
    unknown = [name for name in wanted if name not in ARCHES]
    if unknown:
        typer.echo(f"--arch {unknown[0]}: supported are {', '.join(ARCHES)}", err=True)
        raise typer.Exit(2)
    console = Console()
    table = Table("kernel", "arch", "registers", "spilled", "shared bytes", box=None)
    made = []
    bad = []
    try:
        for spec in cases() if cases_only else published():
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
