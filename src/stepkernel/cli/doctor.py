"""`stepkernel doctor`: what this machine supports and what the engine chose."""

import os
from typing import Annotated

import typer

from stepkernel.cli.common import assets, messages, one_line_errors, results

SHOWN_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avx512bf16", "amx-bf16", "neon", "sve")


@one_line_errors
def doctor(
    threads: Annotated[int | None, typer.Option(help="Default: all processors.", min=1)] = None,
) -> None:
    """Show processor features, the chosen kernels, versions, cache directory and the measured read roof."""
    from rich.table import Table

    from stepkernel.cli.loading import kernels_are_compiled
    from stepkernel.cpu import isa
    from stepkernel.cpu.jit import cache_directory
    from stepkernel.runtime import provenance

    console = messages()
    with console.status("measuring the read roof"):
        from stepkernel.cpu.roof import read_roof

        compiled = kernels_are_compiled()
        used = provenance.processors() if threads is None else threads
        roofs = {n: read_roof(n, 0.5) for n in sorted({1, used})}
    facts = provenance.machine()
    has = isa.features()
    kernels = cache_directory()
    size = sum(path.stat().st_size for path in kernels.rglob("*") if path.is_file())
    state = f"{size / 1e6:.1f} MB" if compiled else "no kernels yet: the first run compiles for about a minute"
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("processor", f"{facts['processor']}, {facts['processors']} usable"),
        ("features", ", ".join(f"{name} {'yes' if name in has else 'no'}" for name in SHOWN_FEATURES)),
        ("kernels", f"{isa.chosen()} (STEPKERNEL_ISA={os.environ.get('STEPKERNEL_ISA', '')!r})"),
        ("threads", f"{used} (option --threads of generate and bench)"),
        ("memory", f"{facts['memory_gib']} GiB, last level cache {facts['last_level_cache_mib']} MiB"),
        ("huge pages", str(facts["transparent_huge_pages"])),
        ("read roof", ", ".join(f"{roof:.1f} GB/s with {n} thread{'s' * (n > 1)}" for n, roof in roofs.items())),
        ("versions", ", ".join(f"{name} {found}" for name, found in provenance.versions().items())),
        ("commit", provenance.commit() or "not a repository"),
        ("kernel cache", f"{kernels} ({state})"),
        ("small models", str(assets()) if assets().is_dir() else "not here (in a clone only)"),
        ("GPU", "not in this version"),
    ):
        table.add_row(f"[bold]{name}[/]", value)
    results().print(table)
