"""The `ptxcheck` command."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ptxcheck.image import Argument
from ptxcheck.launch import launch
from ptxcheck.memory import Memory
from ptxcheck.parser import parse
from ptxcheck.report import Result
from ptxcheck.syntax import PtxError

app = typer.Typer(
    help="Executes PTX on the CPU and reports what is wrong with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
NUMBERS: dict[str, Callable[[Any], np.generic]] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "f32": np.float32,
    "f64": np.float64,
}
ARGUMENT_HELP = """One for each parameter, in order:
u64:5, s32:-1 or f32:0.5 (a number);
file:x.npy (a .npy file copied to global memory, its address);
constant:w.npy (the same, not to be written);
empty:4096 or empty:4096:out.npy (so many uninitialised bytes, saved at the end)."""


@app.callback()
def main() -> None:
    """Executes PTX on the CPU and reports what is wrong with it."""


@app.command()
def run(
    source: Annotated[Path, typer.Argument(help="A PTX file.", exists=True, dir_okay=False)],
    grid: Annotated[str, typer.Option(help="CTAs: x, x,y or x,y,z.")] = "1",
    block: Annotated[str | None, typer.Option(help="Threads of a CTA; by default what .reqntid says.")] = None,
    arg: Annotated[list[str] | None, typer.Option("--arg", help=ARGUMENT_HELP)] = None,
    kernel: Annotated[str | None, typer.Option(help="Which kernel, if the file has several.")] = None,
    dynamic_shared: Annotated[int, typer.Option(help="Bytes of dynamic shared memory.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Random order of warps and copies.", min=0)] = None,
    races: Annotated[bool, typer.Option(help="Look for data races.")] = True,
    ordered_stores: Annotated[
        bool, typer.Option("--ordered-stores", help="Strong stores to one place must be in an order too.")
    ] = False,
    counters: Annotated[bool, typer.Option(help="Print sectors and bank conflicts of every access.")] = False,
) -> None:
    """Runs one kernel; exit status 1 if something was found, 2 for PTX or options that cannot be run."""
    memory = Memory()
    outputs: list[tuple[int, int, Path]] = []
    try:
        text = source.read_text(encoding="utf-8", errors="replace")
        kernels = parse(text).kernels
        chosen = kernels.get(kernel) if kernel else next(iter(kernels.values()))
        threads = _shape(block, "--block") if block else (chosen.block if chosen else None)
        if threads is None:
            raise ValueError("--block is needed, the kernel has no .reqntid")
        values = [_argument(text_, memory, outputs) for text_ in arg or []]
        result = launch(
            text,
            _shape(grid, "--grid"),
            threads,
            values,
            memory,
            kernel=kernel,
            dynamic_shared=dynamic_shared,
            seed=seed,
            check_races=races,
            ordered_stores=ordered_stores,
            count=counters,
            strict=False,
        )
    except (PtxError, ValueError, OSError) as error:
        typer.echo(f"{source}: {error}", err=True)
        raise typer.Exit(2) from None
    for address, size, path in outputs:
        np.save(path, memory.get(address, size, np.uint8))
    _print(result, counters)
    raise typer.Exit(1 if result.findings else 0)


def _shape(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text}: expected x, x,y or x,y,z") from None


def _argument(text: str, memory: Memory, outputs: list[tuple[int, int, Path]]) -> Argument:
    kind, _, rest = text.partition(":")
    if kind in ("file", "constant"):
        return memory.put(Path(rest).name, np.load(rest, allow_pickle=False), constant=kind == "constant")
    if kind == "empty":
        size, _, path = rest.partition(":")
        if size.isdecimal() and int(size) > 0:
            address = memory.empty(path or "empty", int(size))
            if path:
                outputs.append((address, int(size), Path(path)))
            return address
    if kind in NUMBERS and rest:
        with contextlib.suppress(ValueError, OverflowError):
            return NUMBERS[kind](float(rest) if kind[0] == "f" else int(rest, 0))
    raise ValueError(f"--arg {text}: expected TYPE:NUMBER, file:PATH, constant:PATH or empty:BYTES[:PATH]")


def _print(result: Result, counters: bool) -> None:
    console = Console()
    if counters:
        table = Table("line", "space", "warps", "transfers", "least", "instruction", box=None)
        for t in result.traffic:
            table.add_row(*map(str, (t.line, t.space, t.warps, t.transfers, t.ideal)), t.instruction)
        console.print(table)
    for finding in result.findings:
        console.print(str(finding), markup=False, soft_wrap=True, highlight=False)
    speed = result.instructions / result.seconds / 1e6 if result.seconds else 0.0
    work = f"{result.instructions} instructions of threads, {speed:.0f} million per second"
    console.print(f"{len(result.findings)} findings, {work}", highlight=False)
