"""`stepkernel import`: another tool's results as records."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stepkernel.cli.common import check_writable, messages, one_line_errors


@one_line_errors
def convert(
    source: Annotated[str, typer.Argument(help="vllm-bench, aiperf, guidellm or inferencex.")],
    file: Annotated[Path, typer.Argument(help="The tool's result file.")],
    out: Annotated[Path, typer.Option(help="The record; several get -1, -2, ... before the suffix.")],
    machine: Annotated[str, typer.Option(help="The server's hardware; these files do not tell it.")] = "",
    chips: Annotated[int, typer.Option(help="Accelerators of the server: tp * pp * pcp.", min=1)] = 1,
    acceptance: Annotated[str, typer.Option(help="Drafts: unknown, none, natural, or synthetic:LENGTH.")] = "unknown",
    label: Annotated[str, typer.Option(help="A name for what was measured.")] = "",
) -> None:
    """Map another tool's names to ours; refuse what means something else."""
    from stepkernel.cli.bench_decode import parse_acceptance
    from stepkernel.measure.files import read_text, write_record
    from stepkernel.measure.importers import IMPORTERS
    from stepkernel.measure.importers.common import Given

    if source not in IMPORTERS:
        raise ValueError(f"{source}: no such format; supported: {', '.join(IMPORTERS)}")
    check_writable(out, "--out")
    kind: Any
    kind, length = ("unknown", None) if acceptance == "unknown" else parse_acceptance(acceptance)
    found = IMPORTERS[source](read_text(file), str(file), Given(machine, chips, kind, length, label))
    log = messages()
    for index, imported in enumerate(found, 1):
        path = out if len(found) == 1 else out.with_name(f"{out.stem}-{index}{out.suffix}")
        write_record(imported.record, path)
        log.print(f"written to {path}", style="dim", markup=False)
        if imported.left_out:
            log.print(f"left out, no counterpart here: {', '.join(imported.left_out)}", style="dim", markup=False)
