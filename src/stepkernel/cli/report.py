"""`stepkernel report`: a page and pictures of records."""

from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import messages, one_line_errors


@one_line_errors
def report(
    records: Annotated[list[Path], typer.Argument(help="Records; other tools' files go through `import` first.")],
    out: Annotated[Path, typer.Option(help="Directory for index.html and the PNGs.")],
    cost: Annotated[Path | None, typer.Option(help="Cost model (TOML): $ per chip-hour by tier.")] = None,
    reference: Annotated[bool, typer.Option(help="Append the published table, on its own.")] = True,
) -> None:
    """Draw records. Points of different workloads, phases or draft acceptance never share a line; it says why."""
    from stepkernel.measure.cost import read_cost
    from stepkernel.measure.files import read_record
    from stepkernel.measure.report.groups import Named
    from stepkernel.measure.report.page import build_report, write_report

    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: is a file; expected a directory")
    tiers = read_cost(cost) if cost is not None else ()
    names = _names(records)
    found = [Named(name, read_record(file)) for name, file in zip(names, records, strict=True)]
    written = write_report(build_report(found, tiers, reference), out)
    log = messages()
    log.print(f"{written[0]} and {len(written) - 1} pictures", style="dim", markup=False, soft_wrap=True)


def _names(files: list[Path]) -> list[str]:
    """Stems; with their directory where two are alike. ValueError if a file is given twice."""
    if len({file.resolve() for file in files}) != len(files):
        raise ValueError("a record is given twice")
    stems = [file.name.removesuffix(".gz").removesuffix(".json") for file in files]
    return [
        f"{file.resolve().parent.name}/{stem}" if stems.count(stem) > 1 else stem
        for file, stem in zip(files, stems, strict=True)
    ]
